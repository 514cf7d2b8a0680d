"""The dashboard over an archive, in a real Chromium: what it shows, that it is safe, quick and usable by all."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.world import Writer, good_and_bad, huge

Shot = Callable[..., None]
Serve = Callable[..., str]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    good_and_bad(path)
    return path


@pytest.mark.spec("S1 7.15", "S1 8.11", "S1 10.15")
def test_a_failed_run_shows_phase_and_cause(page: Page, serve: Serve, archive: Path, shot: Shot) -> None:
    page.goto(serve("--archive", archive))
    expect(page.get_by_role("status").first).to_have_text("failed")
    expect(page.get_by_role("heading", name="Why it stopped")).to_be_visible()
    expect(page.locator("#cause")).to_have_text(
        "serve prompts: node 3 stage 1 faulted while serving prompts: out of memory <b>812 MiB</b>"
    )
    expect(page.locator("#phases li.failed").first).to_contain_text("serving")
    expect(page.locator("#phases li.failed").last).to_contain_text("exit")
    expect(page.locator("#faults")).to_contain_text("node 3 is dead: no answer to 3 probes")
    expect(page.locator("#faults")).to_contain_text("the worker 2a2a was lost while it worked on this prompt")
    expect(page.locator("#source")).to_contain_text("the last line is torn (25 bytes)")
    workers = page.locator("#workers tbody tr")
    expect(workers).to_have_count(2)
    expect(workers.nth(1)).to_contain_text("failed")
    expect(workers.nth(1)).to_contain_text("exited with status 1")
    expect(workers.nth(1)).to_contain_text("15–29")
    expect(workers.nth(1)).to_contain_text("RTX 4090: 37 %, 812 of 24564 MiB")
    expect(workers.nth(1)).to_contain_text("dead")
    expect(page.locator("#members")).to_contain_text("route goes to the worker")
    shot(page, "failed-light")


def test_what_a_worker_logs_is_only_text(page: Page, serve: Serve, archive: Path) -> None:
    page.goto(serve("--archive", archive))
    page.get_by_label("Source").select_option("3.stderr")
    log = page.get_by_role("log")
    expect(log).to_contain_text('<img src=x onerror="document.title=')
    expect(log).to_contain_text("\\x1b[31m\\x1b]0;t\\x07\\u202e end")
    assert page.locator("#log-box img, #log-box script, #cause b, main b img").count() == 0
    expect(page).to_have_title("failed · swactor-mq")  # the file is read in pieces, and the end comes last
    page.get_by_label("Search").fill("<img")
    expect(log.locator("mark")).to_have_text("<img")
    expect(log.locator("div")).to_have_count(1)


def test_logs_are_searched_and_followed(page: Page, serve: Serve, archive: Path, shot: Shot) -> None:
    page.goto(serve("--archive", archive) + "?run=1")
    page.get_by_label("Source").select_option("2.stderr")
    log = page.get_by_role("log")
    expect(log).to_contain_text("step 1499")
    expect(page.locator("#log-count")).to_have_text("1500 lines")
    page.get_by_label("Search").fill("step 14: ")
    expect(log.locator("div")).to_have_count(1)
    expect(log.locator("mark")).to_have_text("step 14:")
    expect(page.locator("#log-count")).to_have_text("1 of 1500 lines")
    shot(page, "log-search", full=False)


def test_another_run_is_chosen(page: Page, serve: Serve, archive: Path) -> None:
    page.goto(serve("--archive", archive))
    expect(page.get_by_role("status").first).to_have_text("failed")
    page.get_by_role("combobox", name="Run").select_option("1")
    expect(page.get_by_role("status").first).to_have_text("ended")
    expect(page.locator("#cause-box")).to_be_hidden()
    expect(page.locator("#prompt-totals")).to_have_text("4 done, 0 faulted, 1 cancelled · 300 tokens · 0 waiting")
    assert page.url.endswith("?run=1")
    page.reload()
    expect(page.get_by_role("status").first).to_have_text("ended")


def test_a_file_that_grows_is_followed(page: Page, serve: Serve, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.jsonl")
    writer.start(1)
    page.goto(serve("--archive", tmp_path / "a.jsonl"))
    expect(page.get_by_role("status").first).to_contain_text("starting")
    writer.serve()
    writer.answer(7, 5, max_tokens=10, end="")
    expect(page.get_by_role("status").first).to_contain_text("serving")
    expect(page.locator("#prompts tbody tr").first).to_contain_text("5 of 10")
    writer.log(2, "stderr", "a new line")
    expect(page.get_by_role("log")).to_contain_text("a new line")


def test_a_phone_and_the_dark(browser: Browser, serve: Serve, archive: Path, shot: Shot) -> None:
    url = serve("--archive", archive)
    for name, width, scheme in (("phone", 390, "light"), ("phone-dark", 390, "dark"), ("desktop-dark", 1280, "dark")):
        context = browser.new_context(
            viewport={"width": width, "height": 844}, color_scheme=scheme, device_scale_factor=1
        )
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#workers tbody tr")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name}: the page scrolls sideways"
        ink, paper = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        assert contrast(ink, paper) > 7
        for element in (".quiet", "h2", "th", ".pill", ".took"):
            for ink, paper in page.evaluate(COLOURS, element):
                assert contrast(ink, paper) >= 4.5, f"{name}: {element} {ink} on {paper}"
        shot(page, name)
        context.close()


COLOURS = """(selector) => [...document.querySelectorAll(selector)].filter((e) => e.offsetParent).map((element) => {
  let at = element;
  while (at && /rgba\\(0, 0, 0, 0\\)|transparent/.test(getComputedStyle(at).backgroundColor)) at = at.parentElement;
  return [getComputedStyle(element).color, getComputedStyle(at || document.body).backgroundColor];
})"""


def contrast(ink: str, paper: str) -> float:
    """WCAG's ratio of two `rgb(r, g, b)`."""

    def light(colour: str) -> float:
        parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((light(ink), light(paper)))
    return (high + 0.05) / (low + 0.05)


def test_the_keyboard_reaches_everything_and_names_are_there(page: Page, serve: Serve, archive: Path) -> None:
    page.goto(serve("--archive", archive))
    expect(page.locator("#workers tbody tr")).to_have_count(2)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the run")).to_be_focused()
    reached = []
    where = "document.activeElement.id || document.activeElement.getAttribute('aria-labelledby')"
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(where))
    logs = ["log-source", "log-search", "log-follow", "log-box"]
    assert reached == ["run", "workers-h", "prompts-h", *logs, "streams-h"]
    for role in ("combobox", "searchbox", "checkbox", "log", "table", "region"):
        for element in page.get_by_role(role).all():  # type: ignore[arg-type]
            name = element.evaluate(
                "e => (e.labels && e.labels[0] || {}).textContent || e.getAttribute('aria-label') "
                "|| e.getAttribute('aria-labelledby') || (e.tagName === 'TABLE' && e.tHead && 'table')"
            )
            assert name, f"a {role} without a name"
    levels = page.evaluate("[...document.querySelectorAll('h1,h2')].map((h) => h.tagName)")
    assert levels[0] == "H1" and levels.count("H1") == 1
    assert page.evaluate("document.documentElement.lang") == "en"


def test_nothing_comes_from_elsewhere_and_little_is_loaded(page: Page, serve: Serve, archive: Path) -> None:
    url = serve("--archive", archive)
    sizes: dict[str, int] = {}
    page.on("response", lambda response: sizes.update({response.url: int(response.headers.get("content-length", 0))}))
    page.goto(url)
    expect(page.locator("#workers tbody tr")).to_have_count(2)
    assert all(found.startswith((url, "data:")) for found in sizes), sizes
    assert sum(sizes.values()) < 200_000


def test_a_hundred_megabytes(page: Page, serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    huge(path, 100_000_000)
    url = serve("--archive", path)
    begin = time.monotonic()
    page.goto(url, wait_until="commit")
    paint_ms = None
    while paint_ms is None and time.monotonic() - begin < 60:
        paint_ms = page.evaluate("(performance.getEntriesByName('first-contentful-paint')[0] || {}).startTime ?? null")
    assert paint_ms is not None, "how soon on an idle machine is the bench's to say (dashboard_first_paint_s)"
    expect(page.locator("#source")).to_contain_text("complete", timeout=180_000)
    print(f"first paint {paint_ms:.0f} ms, all read after {time.monotonic() - begin:.1f} s")
    expect(page.get_by_role("status").first).to_have_text("ended")


def test_without_a_token_other_names_and_with_one_other_people_are_refused(
    browser: Browser, serve: Serve, archive: Path, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret-token\n")
    url = serve("--archive", archive, "--token-file", token)
    context = browser.new_context()
    response = context.request.get(url)
    assert response.status == 401 and "bearer token" in response.text()
    context.close()
    context = browser.new_context(http_credentials={"username": "me", "password": "s3cret-token"})
    page = context.new_page()
    page.goto(url)
    expect(page.get_by_role("status").first).to_have_text("failed")
    expect(page.get_by_role("log")).to_contain_text("RuntimeError")
    context.close()
