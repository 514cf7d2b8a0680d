"""The real gateway with a scripted worker, and the HTTP front in front of it as a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.unit.prompt_gateway.stack import Stack

MODEL = "tiny"


@dataclass
class Front:
    """url: http://127.0.0.1:port."""

    stack: Stack
    url: str
    process: subprocess.Popen[str]


def start_front(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """(process, http://host:port)."""
    command = [sys.executable, "-P", "-m", "services.prompt_gateway.http", "--model", MODEL, *arguments]
    process = subprocess.Popen([*command, "--http", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words[:1] == ["http:"]
    return process, words[1].removesuffix("/v1")


def stop_front(process: subprocess.Popen[str]) -> None:
    process.terminate()
    assert process.wait(60) == 0
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(scope="module")
def steady() -> Iterator[Front]:
    """One for all tests that leave it as it was."""
    with Stack() as stack:
        process, url = start_front("--connect", stack.addr)
        yield Front(stack, url, process)
        stop_front(process)


@pytest.fixture
def front() -> Iterator[Front]:
    with Stack() as stack:
        process, url = start_front("--connect", stack.addr)
        yield Front(stack, url, process)
        stop_front(process)
