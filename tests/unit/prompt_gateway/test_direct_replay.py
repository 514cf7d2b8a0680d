"""Direct mode with on_worker_loss = "restart": the answer is asked for again, the client gets what is new."""

from __future__ import annotations

import msgspec
import pytest

from common.messages.prompt import Fault
from common.messages.serve import HoldServing, RestoreServing, ServingDisturbed, ServingRestored
from tests.unit.prompt_gateway.rig import OPEN, ORCHESTRATOR, Rig

RESTARTING = msgspec.structs.replace(OPEN, restart=True)


def lost(rig: Rig) -> None:
    rig.tell(HoldServing(error="node 1 exited"), src=ORCHESTRATOR)


def restored(rig: Rig) -> None:
    rig.tell(RestoreServing(run=RESTARTING), src=ORCHESTRATOR)


def text(lines: list[dict[str, object]]) -> str:
    return "".join(str(line["text"]) for line in lines if line["type"] == "text_delta")


@pytest.mark.parametrize("pieces", [["Hello, wor", "ld", "!"], ["Hel", "lo, ", "world!"], ["Hello, ", "world!"]])
def test_the_client_gets_the_text_once_however_it_is_cut(pieces: list[str]) -> None:
    rig = Rig().open(RESTARTING)
    conn = rig.connect()
    rig.ask(conn, 1, "greet", max_tokens=9, sampling={"temperature": 0.5})
    (first,) = rig.prompts()
    rig.delta(first, "Hello", 2)
    rig.delta(first, ", ", 1)
    lost(rig)
    rig.advance(4000)
    rig.delta(first, "from the dead", 5)
    restored(rig)
    (second,) = rig.prompts()
    assert second.request_id != first.request_id
    same = ("prompt", "max_tokens", "sampling", "stop")
    assert [getattr(second, name) for name in same] == [getattr(first, name) for name in same]
    assert second.sampling is not None and second.sampling.seed is not None
    rig.delta(first, "late", 1)
    for piece in pieces:
        rig.delta(second, piece, 2)
    rig.done(second, "Hello, world!")
    *deltas, done = rig.lines(conn)
    assert text(deltas) == "Hello, world!" == done["final_text"] and done["elapsed_ms"] == 4000
    (answer,) = [msg for msg in rig.to_orchestrator if isinstance(msg, ServingRestored)]
    assert answer.replayed == 3


def test_a_worker_that_says_something_else_is_a_fault_and_not_a_mixture() -> None:
    rig = Rig().open(RESTARTING)
    conn = rig.connect()
    rig.ask(conn, 1, "greet")
    (first,) = rig.prompts()
    rig.delta(first, "Hello", 1)
    lost(rig)
    restored(rig)
    (second,) = rig.prompts()
    rig.delta(second, "Good morning", 2)
    *deltas, fault = rig.lines(conn)
    assert text(deltas) == "Hello" and fault["type"] == "fault" and "gives another answer" in fault["error"]


def test_the_engines_death_holds_the_prompt_and_its_own_fault_does_not() -> None:
    rig = Rig().open(RESTARTING)
    conn = rig.connect()
    rig.ask(conn, 1, "greet")
    (first,) = rig.prompts()
    rig.tell(Fault(request_id=first.request_id, error="the engine was killed", lost=True), dst=first.reply_to)
    assert not rig.lines(conn)
    assert [msg.error for msg in rig.to_orchestrator if isinstance(msg, ServingDisturbed)] == ["the engine was killed"]
    lost(rig)
    restored(rig)
    (second,) = rig.prompts()
    rig.fault(second, "the prompt has 900 tokens, the context 512")
    assert rig.lines(conn)[-1]["error"] == "the prompt has 900 tokens, the context 512"


def test_only_the_run_that_is_served_holds_and_restores() -> None:
    """What an earlier run says late would hold a prompt for which nobody ever restores."""
    rig = Rig().open(RESTARTING)
    conn = rig.connect()
    rig.ask(conn, 1, "greet", max_tokens=9)
    (infer,) = rig.prompts()
    stranger = b"s" * 32
    rig.tell(HoldServing(error="node 1 exited"), src=stranger)
    rig.tell(RestoreServing(run=RESTARTING), src=stranger)
    rig.delta(infer, "Hello", 2)
    rig.done(infer, "Hello")
    assert [line["type"] for line in rig.lines(conn)] == ["text_delta", "done"]
    assert rig.prompts() == []
