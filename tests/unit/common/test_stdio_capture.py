"""Capture of stdout and stderr: in a process of its own, because pytest has its own ideas about fd 1 and 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import stdio_capture
from common.limits import LOG_LINE_BYTES_MAX
from common.stdio_capture import LineReader, LineSplitter, StdioCapture, available

PROGRAM = """
import json, os, subprocess, sys
from common.stdio_capture import StdioCapture
lines = []
capture = StdioCapture(lambda stream, line: lines.append((stream, line.decode("latin-1"))))
print("before")
capture.install()
BODY
capture.restore()
print("after")
print("after, stderr", file=sys.stderr)
with open(sys.argv[1], "w") as file:
    json.dump([lines, capture.installed], file)
"""

pytestmark = pytest.mark.skipif(not available(), reason="the capture exists on Linux only (S1 7.14)")


def run(tmp_path: Path, body: str) -> tuple[list[list[str]], str, str]:
    """The captured lines, and what came out of the real stdout and stderr."""
    out = tmp_path / "lines.json"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("BODY", body), str(out)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines, installed = json.loads(out.read_text())
    assert installed is False
    return lines, done.stdout, done.stderr


@pytest.mark.spec("S1 3.2", "S1 7.14", "S1 8.8")
def test_lines_go_to_the_capture_and_nothing_to_the_terminal(tmp_path: Path) -> None:
    lines, stdout, stderr = run(
        tmp_path,
        """
print("from print")
os.write(1, b"from the descriptor\\n")
subprocess.run(["sh", "-c", "echo from a child; echo its error >&2"])
print("an error", file=sys.stderr)
os.write(2, bytes([255, 0, 10]))
""",
    )
    assert [line for stream, line in lines if stream == "stdout"] == [
        "from print",
        "from the descriptor",
        "from a child",
    ]
    assert [line for stream, line in lines if stream == "stderr"] == ["its error", "an error", "\xff\0"]
    assert stdout == "before\nafter\n"
    assert stderr == "after, stderr\n"


@pytest.mark.spec("S1 8.8")
def test_the_original_stderr_stays_reachable_for_the_last_line(tmp_path: Path) -> None:
    lines, _, stderr = run(tmp_path, 'capture.write_original("mvp-orchestrator: it failed\\n")')
    assert lines == []
    assert stderr == "mvp-orchestrator: it failed\nafter, stderr\n"


def test_a_partial_last_line_is_not_lost(tmp_path: Path) -> None:
    lines, _, _ = run(tmp_path, 'sys.stdout.write("no newline"); os.write(2, b"nor here")')
    assert sorted(lines) == [["stderr", "nor here"], ["stdout", "no newline"]]


def test_a_child_that_keeps_the_pipe_open_does_not_hold_the_restore(tmp_path: Path) -> None:
    lines, stdout, _ = run(tmp_path, 'subprocess.Popen(["sleep", "20"]); print("x")')
    assert lines == [["stdout", "x"]]
    assert stdout == "before\nafter\n"


def test_a_flood_comes_through_whole_and_in_order(tmp_path: Path) -> None:
    lines, _, _ = run(tmp_path, 'for n in range(20000): print(n)\nsys.stdout.write("y" * 100000)')
    numbers = [line for _, line in lines[:20000]]
    assert numbers == [str(number) for number in range(20000)]
    pieces = [line for _, line in lines[20000:]]
    assert "".join(pieces) == "y" * 100_000
    assert max(map(len, pieces)) == LOG_LINE_BYTES_MAX


def test_a_second_install_and_restore_change_nothing(tmp_path: Path) -> None:
    lines, stdout, _ = run(tmp_path, 'capture.install(); print("once"); capture.restore(); print("free")')
    assert lines == [["stdout", "once"]]
    assert stdout == "before\nfree\nafter\n"


@pytest.mark.spec("S1 7.14")
def test_elsewhere_the_capture_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio_capture.sys, "platform", "darwin")
    assert not available()
    with pytest.raises(RuntimeError, match="Linux only"):
        StdioCapture(lambda stream, line: None).install()


# --- the reader of other processes' pipes ----------------------------------------------------------------------
def test_a_reader_ends_with_its_pipe() -> None:
    read, write = os.pipe()
    lines: list[bytes] = []
    reader = LineReader(read, lines.append)
    os.write(write, b"one\r\n\ntwo\nthree")
    os.close(write)
    assert reader.join(60_000)
    assert lines == [b"one", b"", b"two", b"three"]


def test_a_reader_can_be_stopped_and_reads_what_is_there() -> None:
    read, write = os.pipe()
    lines: list[bytes] = []
    reader = LineReader(read, lines.append)
    os.write(write, b"a\nb")
    assert reader.stop()
    assert lines == [b"a", b"b"]
    assert reader.stop()
    os.close(write)


def test_a_callback_that_fails_does_not_stop_the_reading() -> None:
    read, write = os.pipe()
    seen: list[bytes] = []

    def callback(line: bytes) -> None:
        seen.append(line)
        raise ValueError(line)

    reader = LineReader(read, callback)
    os.write(write, b"1\n2\n")
    os.close(write)
    assert reader.join(60_000)
    assert (seen, reader.errors) == ([b"1", b"2"], 2)


def test_readers_leave_neither_threads_nor_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        read, write = os.pipe()
        reader = LineReader(read, lambda line: None)
        os.close(write)
        assert reader.join(60_000) and reader.stop()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "smq-lines"]


@given(st.lists(st.binary(max_size=50)))
def test_lines_do_not_depend_on_how_the_bytes_came(chunks: list[bytes]) -> None:
    data = b"".join(chunks)
    lines: list[bytes] = []
    splitter = LineSplitter(lines.append)
    for chunk in chunks:
        splitter.feed(chunk)
    splitter.close()
    expected = data.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert lines == [line.removesuffix(b"\r") for line in expected]


@given(st.integers(0, 3 * LOG_LINE_BYTES_MAX), st.integers(100, LOG_LINE_BYTES_MAX))
def test_long_lines_come_in_bounded_pieces(length: int, chunk: int) -> None:
    lines: list[bytes] = []
    splitter = LineSplitter(lines.append)
    data = b"z" * length + b"\nend\n"
    for start in range(0, len(data), chunk):
        splitter.feed(data[start : start + chunk])
    assert b"".join(lines[:-1]) == b"z" * length
    assert lines[-1] == b"end"
    assert all(len(line) <= LOG_LINE_BYTES_MAX for line in lines)
