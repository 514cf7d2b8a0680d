"""A real Chromium (the system's, headless) and the dashboard's server as a process."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

HERE = Path(__file__).parent
LIMIT_MS = 60_000  # for what is awaited: the other tests of this machine take their time from the browser
expect.set_options(timeout=LIMIT_MS)
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("browser")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_playwright() as play:
        # Its sandbox needs a user namespace, which containers and root do not give; the pages are our own.
        started = play.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, locale="en-GB", timezone_id="UTC")
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.set_default_timeout(LIMIT_MS)
    yield page
    assert problems == [], "errors in the page"


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """serve(*arguments) starts the dashboard and returns its URL."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: object, **environ: str) -> str:
            command = [sys.executable, "-P", "-m", "services.datastream_collector.web", *map(str, arguments)]
            process = subprocess.Popen(
                [*command, "--dashboard", "127.0.0.1:0"],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **environ},
            )

            def stop() -> None:
                process.terminate()
                assert process.wait(60) == 0
                assert process.stdout is not None
                process.stdout.close()

            stack.callback(stop)
            assert process.stdout is not None
            words = process.stdout.readline().split()
            assert words[0] == "dashboard:"
            return words[1]

        yield start


@pytest.fixture
def shot(tmp_path: Path) -> Callable[[Page, str], None]:
    """Screenshots for people, where SMQ_SHOTS says."""
    folder = Path(os.environ.get("SMQ_SHOTS") or tmp_path)

    def take(page: Page, name: str, full: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=folder / f"{name}.png", full_page=full)

    return take
