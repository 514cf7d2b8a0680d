"""`mvp-tap`: causes as a tree, rates and latency, the whole screen."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from common.actors import Actor, Ctx
from common.addresses import Plane
from common.codec import Message, encode_body, encode_envelope, tag_of
from common.envelope import ENVELOPE_VERSION, Envelope
from common.messages.node_agent import CancelRequest, EncodePrompt
from common.messages.prompt import PromptEncoded, TextDelta
from tests.support.harness import Harness
from tools import tap, tap_story
from tools.tap_live import Screen
from tools.tap_records import Line, Names, parse
from tools.tap_stats import Stats, text
from tools.tap_story import Story

GATEWAY, AGENT = b"g" * 32, b"a" * 32
NAMES = Names()


def line(
    message: Message,
    src: bytes,
    dst: bytes,
    id: int,
    corr: int = 0,
    *,
    at: int = 0,
    broker: str = "router",
    verdict: str = "forwarded",
) -> Line:
    return parse(broker, record(message, src, dst, id, corr, at=at, verdict=verdict))


def record(
    message: Message, src: bytes, dst: bytes, id: int, corr: int = 0, *, at: int = 0, verdict: str = "forwarded"
) -> bytes:
    raw = msgspec.Raw(encode_body(message))
    envelope = Envelope(
        ENVELOPE_VERSION, tag_of(type(message)), id, b"r" * 16, src, 1, src, dst, 1, dst, corr, id, 1, 0, raw
    )
    return msgspec.msgpack.encode((1000 + at, int(Plane.PROMPT), "in", verdict, encode_envelope(envelope)))


def encode(request: int) -> EncodePrompt:
    return EncodePrompt(request_id=request, prompt="x", reply_to=GATEWAY)


def conversation() -> Iterator[Line]:
    """The gateway asks; the agent answers (5 → 9), then says three things by itself; ids of the two nodes overlap."""
    yield line(CancelRequest(request_id=1), GATEWAY, AGENT, 9)
    yield line(encode(7), GATEWAY, AGENT, 5, at=10)
    yield line(PromptEncoded(request_id=7, tokens=[1]), AGENT, GATEWAY, 9, 5, at=25)
    for number in range(5):
        yield line(TextDelta(request_id=7, text="x"), AGENT, GATEWAY, 20 + number, at=40 + 10 * number)
    yield line(CancelRequest(request_id=7), GATEWAY, AGENT, 6, 24, at=100, verdict="full")


# --- the tree --------------------------------------------------------------------------------------------------
def told(wanted: int, *lines: Line) -> list[str]:
    story = Story()
    for one in lines:
        story.add(one)
    return list(story.tell(wanted, NAMES))


def test_answers_and_what_was_said_without_a_cause_hang_where_they_belong() -> None:
    assert told(7, *conversation()) == [
        "      +0 ms  EncodePrompt 67676767 → 61616161 #5 request 7",
        "     +15 ms    PromptEncoded 61616161 → 67676767 #9 request 7",
        "     +30 ms    TextDelta 61616161 → 67676767 #20 request 7",
        "     +40 ms    TextDelta 61616161 → 67676767 #21 request 7",
        "     +50 ms    TextDelta 61616161 → 67676767 #22 request 7",
        "     +70 ms    TextDelta 61616161 → 67676767 #24 request 7",
        "     +90 ms      CancelRequest 67676767 → 61616161 #6 request 7 (full)",
        "     +60 ms    TextDelta 1 more, until +60 ms",
    ]


def test_a_message_in_the_middle_is_shown_below_what_led_to_it() -> None:
    lines = told(24, *conversation())
    assert [text.split()[2] for text in lines] == ["EncodePrompt", "TextDelta", "CancelRequest"]
    assert told(4711, *conversation()) == []


def test_an_envelope_that_two_brokers_saw_is_one() -> None:
    at_router = line(encode(3), GATEWAY, AGENT, 1)
    at_relay = line(encode(3), GATEWAY, AGENT, 1, broker="relay", verdict="gone")
    assert told(3, at_router, at_relay) == ["      +0 ms  EncodePrompt 67676767 → 61616161 #1 request 3 (gone)"]


def test_a_long_run_forgets_its_beginning_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap_story, "KEPT_MAX", 10)
    lines = [line(encode(3), GATEWAY, AGENT, number) for number in range(50)]
    shown = told(3, *lines)
    assert len(shown) == 11 and shown[-1] == "(40 older envelopes were forgotten)"


def test_the_cause_survives_local_messages() -> None:
    """A message between two actors of one process is on no tap: what follows names what came over the bus."""

    class Inner(Actor):
        Incoming = (EncodePrompt,)

        def receive(self, msg: EncodePrompt, ctx: Ctx) -> None:
            ctx.send(GATEWAY, PromptEncoded(request_id=msg.request_id, tokens=[]))

    class Outer(Actor):
        Incoming = (EncodePrompt,)

        def on_start(self, ctx: Ctx) -> None:
            self.inner = ctx.spawn(Inner())
            ctx.timer("alone", 1000)

        def receive(self, msg: EncodePrompt, ctx: Ctx) -> None:
            ctx.send(self.inner, msg)

        def on_timer(self, key: str, ctx: Ctx) -> None:
            ctx.send(self.inner, encode(8))

    harness = Harness(Outer())
    harness.system.deliver(harness.address, encode(7), src=GATEWAY, src_node=GATEWAY, id=1234)
    harness.run()
    harness.advance(1000)
    assert [(out.message.request_id, out.corr) for out in harness.system.outbound] == [(7, 1234), (8, 0)]


# --- rates -----------------------------------------------------------------------------------------------------
def test_rates_latency_and_losses_of_each_type_and_link() -> None:
    stats = Stats()
    for one in conversation():
        stats.add(one)
    stats.add(parse("router", b"junk"))
    rows = {row[0]: row for row in stats.table(NAMES)}
    assert rows["TextDelta"][4:6] == ("5", "50.0")
    assert rows["PromptEncoded"][7:9] == ("15", "15"), "from the question until the answer"
    assert rows["CancelRequest"][9] == "1 full"
    assert "9 envelopes in 0.1 s: 90.0 and" in stats.total() and "1 that are no envelopes" in stats.total()
    lines = text(stats, NAMES).splitlines()
    assert lines[0].split()[:4] == ["type", "from", "to", "plane"] and lines[1].startswith("TextDelta")
    stats.reset()
    assert stats.table(NAMES) == [] and text(stats, NAMES)


def test_equal_ids_of_two_senders_are_two_messages() -> None:
    """Ids are counted per process: what two askers say as #5 to the same agent is answered as long as each waited."""
    other, stats = b"o" * 32, Stats()
    stats.add(line(encode(1), GATEWAY, AGENT, 5, at=0))
    stats.add(line(encode(2), other, AGENT, 5, at=90))
    stats.add(line(PromptEncoded(request_id=1, tokens=[]), AGENT, GATEWAY, 7, 5, at=100))
    stats.add(line(PromptEncoded(request_id=2, tokens=[]), AGENT, other, 8, 5, at=102))
    assert list(stats.rows["PromptEncoded", AGENT, GATEWAY].latencies_ms) == [100]
    assert list(stats.rows["PromptEncoded", AGENT, other].latencies_ms) == [12]
    stats.add(line(CancelRequest(request_id=2), AGENT, b"t" * 32, 9, 5, at=110))
    assert list(stats.rows["CancelRequest", AGENT, b"t" * 32].latencies_ms) == [20], "to a third: the last that asked"


def test_the_screen_shows_both_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(NAMES)
    for one in conversation():
        screen.add(one)
    console = Console(width=100, height=24, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen.drawn(24))
    shown = console.export_text()
    assert "TextDelta" in shown and "newest" in shown and "9 envelopes" in shown
    assert len(shown.splitlines()) <= 24 and "\x1b" not in shown


# --- the program -----------------------------------------------------------------------------------------------
@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "r.tap"
    with path.open("wb") as file:
        for number, at in enumerate(range(0, 100, 10)):
            tap.write_entry(file, "router", record(encode(7), GATEWAY, AGENT, number, at=at))
    return path


def test_the_options(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tap.main(["--read", str(recording), "--tree", "7"]) == 0
    assert capsys.readouterr().out.count("EncodePrompt") == 10
    assert tap.main(["--read", str(recording), "--tree", "8"]) == 0, "message 8"
    assert tap.main(["--read", str(recording), "--tree", "99"]) == 1
    assert "no message and no request 99" in capsys.readouterr().err
    assert tap.main(["--read", str(recording), "--stats", "--type", "EncodePrompt"]) == 0
    assert "10 envelopes" in capsys.readouterr().out
    assert tap.main(["--read", str(recording), "--live"]) == 1
    assert "--live needs a terminal" in capsys.readouterr().err


def test_live_on_a_terminal(recording: Path) -> None:
    main, end = pty.openpty()
    command = [sys.executable, "-P", "-m", "tools.tap", "--read", str(recording), "--live"]
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env={**os.environ, "TERM": "xterm"})
    os.close(end)
    seen = bytearray()

    def read() -> None:
        try:
            while data := os.read(main, 4096):
                seen.extend(data)
        except OSError:
            pass  # the terminal of a process that ended

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(60) == 0
    reader.join(10)
    os.close(main)
    shown = seen.decode(errors="replace")
    assert "EncodePrompt" in shown and "\x1b[?1049h" in shown and "\x1b[?1049l" in shown, "the screen is given back"
