"""`mvp-tap`: it shows what passed, hides what must not be seen, and no bytes make it stumble."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.addresses import NO_RUN, Plane, Role
from common.codec import Message, encode_body, encode_envelope, tag_of
from common.envelope import ENVELOPE_VERSION, Envelope
from common.messages.bus import Delta, Hello, Register, RouteEntry, Snapshot, Welcome
from common.messages.config import ConfigSlice
from common.messages.prompt import TextDelta, TokensDecoded
from common.messages.stream import StreamFrames
from common.security import init
from tests.support.bus import RealBus
from tests.support.echo import Sink, Source
from tools import tap as tool
from tools.tap_records import Names, as_json, parse, printable, shown

WALL = 1_800_000_000_123
GATEWAY, AGENT, ROUTER = b"g" * 32, b"a" * 32, b"r" * 32
INBOX = b"i" * 32


def frame(
    message: Message, *, src_node: bytes = AGENT, src: bytes = AGENT, dst: bytes = GATEWAY, tag: int = 0, corr: int = 0
) -> bytes:
    return encode_envelope(
        Envelope(
            ENVELOPE_VERSION,
            tag or tag_of(type(message)),
            77,
            b"\x5a" * 16,
            src_node,
            1,
            src,
            GATEWAY,
            1,
            dst,
            corr,
            5,
            1,
            4,
            msgspec.Raw(encode_body(message)),
        )
    )


def record(data: bytes, *, plane: Plane = Plane.PROMPT, verdict: str = "forwarded") -> bytes:
    return msgspec.msgpack.encode((WALL, int(plane), "in", verdict, data))


def recording(path: Path, *frames: bytes) -> Path:
    with path.open("wb") as file:
        for data in frames:
            tool.write_entry(file, "router", record(data))
    return path


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert tool.main(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


# --- showing ---------------------------------------------------------------------------------------------------
def test_an_envelope_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recording(tmp_path / "r.tap", frame(TextDelta(request_id=9, text="hello"), corr=12))
    (line,) = lines(capsys, "--read", str(file))
    assert line.endswith(
        'router prompt  in  61616161 → 67676767 TextDelta 193B forwarded #77←#12 seq=5 ack=4 {"request_id": 9, '
        '"text": "hello"}'
    )


def test_names_are_learnt_from_what_passes() -> None:
    names = Names()
    for message, source in (
        (Hello(boot=1, logical_id="node 1"), AGENT),
        (Register(address=INBOX, boot=1, generation=1, name="prompt_gateway"), GATEWAY),
        (Welcome(broker_key=b"y" * 32, broker_boot=1, router_key=ROUTER, router_boot=1), ROUTER),
        (
            Snapshot(
                view="routes",
                version=1,
                items=[RouteEntry(address=b"c" * 32, node=b"k" * 32, boot=1, generation=1, role=Role.COLLECTOR)],
            ),
            ROUTER,
        ),
        (Delta(view="routes", version=2, changed=[]), ROUTER),
    ):
        names.learn(parse("router", record(frame(message, src_node=source))))
    assert names.of(AGENT, AGENT) == "node 1"
    assert names.of(AGENT, b"x" * 32) == "node 1/78787878"
    assert names.of(GATEWAY, INBOX) == "prompt_gateway"
    assert names.of(ROUTER, ROUTER) == "router"
    assert names.of(b"y" * 32, b"y" * 32) == "relay"
    assert names.of(b"k" * 32, b"k" * 32) == "datastream_collector"
    assert names.of(b"q" * 32, b"q" * 32) == "71717171"


def test_secrets_do_not_show_and_tokens_of_the_model_do() -> None:
    body = {"token": b"\xee" * 16, "edge_token": b"\xee", "HF_TOKEN": "hf_abc", "tokens": [1, 2], "secret_key": "k"}
    text = json.dumps(shown({"outer": [body], "slice_json": json.dumps({"vastai": {"api_key": "vast-1"}})}, 120))
    assert "hf_abc" not in text and "eeee" not in text and "vast-1" not in text
    assert '"tokens": [1, 2]' in text


def test_the_token_of_a_flow_and_a_config_slice_on_the_wire_are_hidden() -> None:
    flow = parse("router", record(frame(StreamFrames(flow_id=b"f" * 16, token=b"\xabSECRET"))))
    part = parse("router", record(frame(ConfigSlice(part="p", digest="d", slice_json='{"hf_token": "hf_xyz"}'))))
    text = as_json(flow, Names()) + as_json(part, Names())
    assert "SECRET" not in text and b"\xabSECRET".hex() not in text and "hf_xyz" not in text
    assert text.count("<redacted>") == 2


def test_long_things_are_cut_for_people_only() -> None:
    line = parse("router", record(frame(TextDelta(request_id=1, text="x" * 5000))))
    assert len(tool.pretty(line, Names())) < 400
    assert json.loads(as_json(line, Names()))["body"]["text"] == "x" * 5000
    assert shown(b"\x01" * 100, 10) == "0101010101010101…(100)"
    assert shown(list(range(100)), 3) == [0, 1, 2, "… 100 in all"]


def test_text_from_the_wire_does_nothing_to_the_terminal() -> None:
    line = parse("router", record(frame(TextDelta(request_id=1, text="\x1b]0;owned\x07\x9b2J\u202e"))))
    assert tool.pretty(line, Names()).isprintable()
    assert as_json(line, Names()).isascii()
    assert printable("a\nb") == "a\\nb"


def test_an_unknown_type_is_shown_with_its_body() -> None:
    line = parse("router", record(frame(TextDelta(request_id=1, text="new"), tag=64_999)))
    assert (line.type, line.body) == ("?64999", {"request_id": 1, "text": "new"})


@pytest.mark.parametrize(
    "junk", [b"", b"\xc1", b"\x00" * 99, b"\x93\x01\x02\x03", b"\xdf\xff\xff\xff\xff", b"\x91" * 5000]
)
def test_what_is_no_envelope_is_shown_as_bad(junk: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = lines(capsys, "--read", str(recording(tmp_path / "r.tap", junk)))
    assert f"BAD {len(junk)} bytes" in line
    (line,) = lines(capsys, "--read", str(tmp_path / "r.tap"), "--json")
    assert json.loads(line)["bad"]
    assert lines(capsys, "--read", str(tmp_path / "r.tap"), "--type", "TextDelta") == []


@settings(max_examples=300)
@given(st.data())
def test_mutated_bytes_never_raise(data: st.DataObject) -> None:
    good = record(frame(Delta(view="routes", version=1, removed=[b"k"])))
    spoilt = bytearray(good)
    for _ in range(data.draw(st.integers(1, 6))):
        spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
    line, names = parse("router", bytes(spoilt)), Names()
    names.learn(line)
    assert tool.pretty(line, names).isprintable()
    assert json.loads(as_json(line, names))
    assert tool.Filter(actor="x", run="ab", types=frozenset({"delta"})).wants(line, names) in (True, False)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_never_raise(junk: bytes, cut: int) -> None:
    for data in (junk, record(junk), record(frame(TextDelta(request_id=1, text="x")))[:cut]):
        line = parse("relay", data)
        tool.pretty(line, Names()), as_json(line, Names())


# --- choosing --------------------------------------------------------------------------------------------------
def test_filters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recording(
        tmp_path / "r.tap",
        frame(Hello(boot=1, logical_id="node 1")),
        frame(TextDelta(request_id=1, text="a"), corr=12),
        frame(TokensDecoded(request_id=1, text="b"), src_node=b"z" * 32, src=b"z" * 32),
    )
    read = ("--read", str(file))

    def types(*arguments: str) -> list[str]:
        return [json.loads(line)["type"] for line in lines(capsys, *read, "--json", *arguments)]

    assert types() == ["Hello", "TextDelta", "TokensDecoded"]
    assert types("--type", "textdelta", "--type", "Hello") == ["Hello", "TextDelta"]
    assert types("--type", str(tag_of(TextDelta))) == ["TextDelta"]
    assert types("--actor", "node 1") == ["Hello", "TextDelta"]
    assert types("--actor", "7a7a") == ["TokensDecoded"]
    assert types("--corr", "12") == ["TextDelta"]
    assert types("--corr", "77") == ["Hello", "TextDelta", "TokensDecoded"]
    assert types("--run", "5A5a") == ["Hello", "TextDelta", "TokensDecoded"]
    assert types("--run", NO_RUN.hex()) == []
    assert types("--plane", "control") == [] and len(types("--plane", "prompt")) == 3
    assert types("--verdict", "full") == []


# --- recordings --------------------------------------------------------------------------------------------------
def test_a_torn_recording_shows_what_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recording(tmp_path / "r.tap", *[frame(TextDelta(request_id=n, text="x")) for n in range(3)])
    file.write_bytes(file.read_bytes()[:-5])
    assert tool.main(["--read", str(file)]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2 and "torn" in said.err


@pytest.mark.parametrize("content", [b"{}{}{}{}{}{}", b"\x00\x00\x00\x02\xc0\xc0", b"\x00\x00\x00\x00"])
def test_a_file_that_is_no_recording(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_bytes(content)
    assert tool.main(["--read", str(tmp_path / "x")]) == 1
    assert "is no recording of mvp-tap" in capsys.readouterr().err


def test_errors_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = init(tmp_path / "r", relay=False)
    monkeypatch.setattr(tool, "newest_run", lambda: (_ for _ in ()).throw(tool.TapError("no run is going on here")))
    for arguments, expected in (
        ((), "no run is going on here"),
        (("--read", str(tmp_path / "none")), "none: No such file"),
        (("--bus", str(tmp_path / "none")), "bus file"),
        (("--bus", str(files[Role.GATEWAY])), "is the bus file of prompt_gateway; the tap has its own"),
    ):
        assert tool.main(list(arguments)) == 1
        said = capsys.readouterr().err
        assert expected in said and said.count("\n") == 1 and said.startswith("mvp-tap: ")


def test_only_a_run_whose_lock_is_held_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("smq-older", "smq-newer", "smq-dead"):
        init(tmp_path / name, relay=False)
        (tmp_path / name / "lock").touch()
    for at, name in enumerate(("smq-older", "smq-newer", "smq-dead")):
        os.utime(tmp_path / name / "bus" / "tap.json", (4e9 + at, 4e9 + at))
    held = [(tmp_path / name / "lock").open() for name in ("smq-older", "smq-newer")]
    for file in held:
        fcntl.flock(file, fcntl.LOCK_EX)
    assert tool.newest_run() == tmp_path / "smq-newer" / "bus" / "tap.json"
    held[1].close()
    assert tool.newest_run() == tmp_path / "smq-older" / "bus" / "tap.json"
    held[0].close()


def test_the_next_run_is_none_of_those_that_were_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs live while one waits, and the newer of them ends: the older one is not the next."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    # Other tests begin runs in /tmp at the same time.
    monkeypatch.setattr(tool, "Path", lambda place: Path(tmp_path / "none" if place == "/tmp" else place))
    held: dict[str, IO[str]] = {}

    def begin(name: str) -> None:
        init(tmp_path / name, relay=False)
        os.utime(tmp_path / name / "bus" / "tap.json", (4e9 + len(held), 4e9 + len(held)))
        held[name] = (tmp_path / name / "lock").open("w")
        fcntl.flock(held[name], fcntl.LOCK_EX)

    begin("smq-older")
    begin("smq-newer")
    known = frozenset(file for _, file in tool.live_runs())
    assert {tmp_path / name / "bus" / "tap.json" for name in held} <= known
    found: list[Path] = []
    waiting = threading.Thread(target=lambda: found.append(tool.next_run(known)), daemon=True)
    waiting.start()
    held["smq-newer"].close()
    waiting.join(10 * tool.WAIT_POLL_S)
    assert not found
    begin("smq-next")
    waiting.join(30)
    assert found == [tmp_path / "smq-next" / "bus" / "tap.json"]
    for file in held.values():
        file.close()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--every", "5"), "--every is for --stats"),
        (("--live", "--every", "5"), "--every is for --stats"),
        (("--read", "x", "--wait"), "--wait and --bus are for a live run"),
        (("--read", "x", "--bus", "y"), "--wait and --bus are for a live run"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tool.main(list(arguments))
    assert why in capsys.readouterr().err


# --- live --------------------------------------------------------------------------------------------------------
def test_taps_of_router_and_relay_are_joined_recorded_and_ctrl_c_ends_well(tmp_path: Path) -> None:
    bus = RealBus(tmp_path / "r", relay=True)
    kept = tmp_path / "kept.tap"
    shown = tmp_path / "shown.jsonl"
    with shown.open("wb") as out:
        tap = subprocess.Popen(
            [sys.executable, "-m", "tools.tap", "--bus", str(bus.files[Role.TAP]), "--json", "--record", str(kept)],
            stdout=out,
            stderr=subprocess.PIPE,
        )
    try:
        assert tap.stderr is not None and b"router and relay" in tap.stderr.readline()
        gateway, agent = bus.service(Role.GATEWAY), bus.agent()
        sink = Sink()
        address = gateway.spawn(sink)

        def told() -> dict[str, set[int]]:
            """The numbers of the messages that each broker has shown; the last line may be on its way."""
            seen: dict[str, set[int]] = {}
            for one in map(json.loads, shown.read_bytes().split(b"\n")[:-1]):
                numbers = {one["body"]["request_id"]} if one["type"] == "TokensDecoded" else set()
                seen.setdefault(one["broker"], set()).update(numbers)
            return seen

        bus.until(lambda: told().keys() == {"router", "relay"}, 60)
        bus.until(lambda: agent.node.views.routes.owner(address), 60)
        agent.spawn(Source(address, 20))
        bus.until(lambda: all(len(numbers) == 20 for numbers in told().values()), 60)
        bus.until(lambda: len(sink.got) == 20, 60)  # the taps may be faster
        tap.send_signal(signal.SIGINT)
        _, err = tap.communicate(timeout=60)
    finally:
        tap.kill()
        bus.close()
    assert tap.returncode == 0 and b"Traceback" not in err
    seen = [json.loads(line) for line in shown.read_text().splitlines()]
    texts = [one for one in seen if one["type"] == "TokensDecoded"]
    for broker in ("router", "relay"):
        passed = [one["body"]["request_id"] for one in texts if one["broker"] == broker]
        assert sorted(set(passed)) == list(range(1, 21)), broker
    assert {one["src_node"] for one in texts} == {agent.node_key.hex()}
    assert kept.stat().st_mode & 0o077 == 0
    again = [parse(*entry) for entry in tool.recorded(kept) if entry is not None]
    assert len(again) == len(seen)


def test_the_tap_key_alone_may_listen_and_it_may_do_nothing_else(tmp_path: Path) -> None:
    from common.bus import TapReader
    from common.security import read_bus_file

    bus = RealBus(tmp_path / "r")
    file = read_bus_file(bus.files[Role.TAP])
    worker, rightful = TapReader(file.taps, bus.agent_keys[0]), TapReader(file.taps, file.keys)
    try:
        gateway = bus.service(Role.GATEWAY)
        bus.until(lambda: gateway.node.link.up, 60)
        heard: list[tuple[str, bytes]] = []
        bus.until(lambda: heard.extend(rightful.read(0)) or heard, 60)
        assert worker.read(300) == []
    finally:
        worker.close()
        rightful.close()
        bus.close()
