"""The frame archive file: its records, its errors, and that a SIGKILL costs at most the last line."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.datastream_collector import archive as module
from services.datastream_collector.archive import ArchiveError, FrameArchive, encode_payload
from services.datastream_collector.frames import CollectedFrame

FIELDS = ["arrival_seq", "source", "stream", "channel", "channel_id", "position", "payload"]


def frame(position: int, payload: bytes = b"x", **more: object) -> CollectedFrame:
    values: dict[str, object] = {
        "source": "orchestrator",
        "stream": "mvp-orchestrator/1",
        "channel": "mvp.orch.bootstrap",
        "channel_id": 2,
        "position": position,
        "payload": payload,
        "unix_ms": 1_800_000_000_000,
        "producer": "aa" * 8,
        "producer_seq": position + 1,
    }
    return CollectedFrame(**{**values, **more})  # type: ignore[arg-type]


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.spec("S1 3.11", "S1 7.13", "S1 8.12")
def test_records_have_the_fields_of_the_specification_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "a.jsonl"
    archive = FrameArchive(str(path))
    archive.append(frame(0, '{"phase":"ünï"}'.encode()))
    archive.append(frame(1, b"\xff\x00"))
    archive.close()
    first, second = records(path)
    assert list(first)[:7] == FIELDS
    assert list(first)[7:] == ["collected"]
    assert first["payload"] == {"encoding": "utf8", "value": '{"phase":"ünï"}'}
    assert second["payload"] == {"encoding": "bytes", "value": [255, 0]}
    assert [first["arrival_seq"], second["arrival_seq"]] == [0, 1]
    assert (second["source"], second["stream"], second["channel"], second["channel_id"], second["position"]) == (
        "orchestrator",
        "mvp-orchestrator/1",
        "mvp.orch.bootstrap",
        2,
        1,
    )


@pytest.mark.spec("S1 8.12")
@given(st.binary(max_size=100))
def test_payloads_come_back_byte_for_byte(payload: bytes) -> None:
    stored = json.loads(
        json.dumps({"encoding": encode_payload(payload).encoding, "value": encode_payload(payload).value})
    )
    back = stored["value"].encode() if stored["encoding"] == "utf8" else bytes(stored["value"])
    assert back == payload


@pytest.mark.spec("S1 7.13", "S1 8.12")
def test_numbering_continues_when_a_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for run in range(3):
        archive = FrameArchive(str(path))
        assert archive.next_seq == run * 2
        archive.append(frame(0))
        archive.append(frame(1))
        archive.close()
    assert [record["arrival_seq"] for record in records(path)] == list(range(6))


@pytest.mark.parametrize("tail", [b'{"arrival_seq":5,"sou', b"garbage", b"\xff\xfe", b'{"arrival_seq":"x"}'])
def test_a_torn_last_line_is_left_alone_and_a_fresh_one_begun(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "a.jsonl"
    archive = FrameArchive(str(path))
    archive.append(frame(0))
    with path.open("ab") as file:
        file.write(tail)
    archive = FrameArchive(str(path))
    archive.append(frame(1))
    lines = path.read_bytes().split(b"\n")
    assert lines[1] == tail
    assert json.loads(lines[2])["arrival_seq"] == 1


def test_numbering_is_found_behind_a_long_stretch_of_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCAN_BYTES", 256)
    path = tmp_path / "a.jsonl"
    FrameArchive(str(path)).append(frame(7))
    with path.open("ab") as file:
        file.write(b"\0" * 100_000)
    assert FrameArchive(str(path)).next_seq == 1


def test_an_old_archive_says_what_it_holds_of_the_last_run(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    archive = FrameArchive(str(path))
    for position in range(5):
        archive.append(frame(position, producer="old" * 5, channel="gone", channel_id=9, run_boot=3))
    for position in range(3):
        archive.append(frame(position, producer_seq=position + 11, run_boot=4 if position else 0))
        archive.append(frame(position, stream="2/1", source="node_cluster", producer_seq=0))
    again = FrameArchive(str(path)).recovered
    # Who spoke in an earlier run may still be there, and repeats it to a collector that is started again.
    assert again.producers == {"old" * 5: [(1, 5)], "aa" * 8: [(11, 13)]}
    assert set(again.streams) == {"mvp-orchestrator/1"}
    assert again.streams["mvp-orchestrator/1"].position == 2 and again.streams["mvp-orchestrator/1"].run_boot == 4
    assert again.streams["mvp-orchestrator/1"].channels == {"mvp.orch.bootstrap": 2}
    assert again.positions == {("aa" * 8, "2/1"): [(0, 2)]}
    assert again.whole


@pytest.mark.spec("S1 10.11")
def test_startup_errors_name_what_cannot_be_done(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ArchiveError, match=r"^cannot create the directory .*/file/x of the frame archive .*: Not a dir"
    ):
        FrameArchive(str(tmp_path / "file" / "x" / "a.jsonl"))
    with pytest.raises(ArchiveError, match=r"^cannot open the frame archive .*: Is a directory$"):
        FrameArchive(str(tmp_path))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ArchiveError, match=r"^cannot open the frame archive .*fifo: "):
        FrameArchive(str(tmp_path / "fifo"))


@pytest.mark.spec("S1 10.11")
def test_a_full_disk_loses_the_frame_and_no_other() -> None:
    archive = FrameArchive("/dev/full")
    with pytest.raises(OSError):
        archive.append(frame(0))
    assert (archive.errors, archive.written, archive.next_seq) == (1, 0, 0)


def test_after_half_a_write_the_next_line_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    archive = FrameArchive(str(path))
    real = os.write
    monkeypatch.setattr(module.os, "write", lambda fd, data: real(fd, data[:20]))
    with pytest.raises(OSError, match="only 20 of"):
        archive.append(frame(0))
    monkeypatch.undo()
    archive.append(frame(1))
    torn, whole = path.read_bytes().splitlines()
    assert len(torn) == 20
    assert json.loads(whole)["position"] == 1


def test_one_old_generation_is_kept_and_the_numbering_goes_on(tmp_path: Path) -> None:
    path, old = tmp_path / "a.jsonl", tmp_path / "a.jsonl.1"
    archive = FrameArchive(str(path), max_bytes=1000)
    for position in range(20):
        archive.append(frame(position))
    assert path.stat().st_size <= 1000 and old.stat().st_size <= 1000
    kept = [record["arrival_seq"] for record in records(old) + records(path)]
    assert kept == list(range(kept[0], 20))
    path.unlink()
    assert FrameArchive(str(path)).next_seq == records(old)[-1]["arrival_seq"] + 1  # type: ignore[operator]


WRITER = """
import sys
from services.datastream_collector.archive import FrameArchive
from services.datastream_collector.frames import CollectedFrame
archive = FrameArchive(sys.argv[1])
print("open", archive.next_seq, flush=True)
position = 0
while True:
    payload = bytes(range(256)) * 40 if position % 3 == 0 else b"x" * (position % 5000)
    archive.append(CollectedFrame("orchestrator", "mvp-orchestrator/1", "c", 8, position, payload))
    position += 1
"""


@pytest.mark.spec("S1 7.13")
def test_a_kill_at_any_instant_tears_at_most_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rng = random.Random(5)
    for _ in range(10):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline().startswith(b"open")
        time.sleep(rng.uniform(0.0, 0.04))
        child.send_signal(signal.SIGKILL)
        child.communicate()
    lines = path.read_bytes().split(b"\n")
    unreadable, numbers = 0, []
    for line in filter(None, lines):
        try:
            numbers.append(json.loads(line)["arrival_seq"])
        except ValueError:
            unreadable += 1
    assert unreadable <= 10
    assert len(numbers) > 10
    assert numbers == list(range(len(numbers)))
