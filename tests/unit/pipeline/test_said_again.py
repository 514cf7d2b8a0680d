"""The gateway and a bus that is away for a while: what it is told twice it does once, what it could not say it says
again (S1 10.12; design.md 2)."""

from __future__ import annotations

from typing import Any

import pytest

from common.codec import Message
from common.effects import SendFailed
from common.limits import LEASE_TTL_MS, OWN_RETRY_MS
from common.messages.serve import (
    CloseRpc,
    HoldServing,
    OpenPromptRpc,
    OpenTokenOut,
    PromptRpcFailed,
    PromptRpcReady,
    RestoreServing,
    ServingDisturbed,
    ServingRestored,
    ShutdownRequested,
    TokenEndpointReady,
    TokenOutListening,
)
from common.messages.service import Lease
from services.prompt_gateway.tcp import Listening, ListenTcp
from services.prompt_gateway.token_edges import (
    CloseTokenEdges,
    DialTokenIn,
    DropTokenEdges,
    EdgeDown,
    EdgeUp,
    ListenTokenOut,
)
from tests.unit.pipeline.pipeline_rig import OPEN, TOKEN_IN, TOKEN_OUT, PipelineRig
from tests.unit.pipeline.test_pipeline_runtime import TEXT, texts
from tests.unit.pipeline.test_replay import RESTARTING, rig_with
from tests.unit.prompt_gateway.rig import ORCHESTRATOR

EDGE_EFFECTS = (ListenTokenOut, DialTokenIn, DropTokenEdges, CloseTokenEdges)


class TwiceRig(PipelineRig):
    """Whatever the orchestrator says arrives twice."""

    def tell(self, msg: Any, *, src: bytes = b"", dst: bytes | None = None) -> None:
        super().tell(msg, src=src, dst=dst)
        if src == ORCHESTRATOR and isinstance(msg, Message):
            super().tell(msg, src=src, dst=dst)


def edge_effects(rig: PipelineRig) -> list[str]:
    return [type(effect).__name__ for effect in rig.other if isinstance(effect, EDGE_EFFECTS)]


def failed(rig: PipelineRig, message: Message, reason: str = "unroutable") -> None:
    rig.tell(SendFailed(ORCHESTRATOR, message, reason))


@pytest.mark.spec("S1 10.12")
def test_told_twice_is_done_once() -> None:
    once, twice = (kind(auto="encode begin").open(RESTARTING) for kind in (PipelineRig, TwiceRig))
    for rig in (once, twice):
        assert [type(said) for said in rig.reports()].count(TokenOutListening) == (1 if rig is once else 2)
        conn = rig.connect()
        rig.ask(conn, 7, "hello", max_tokens=5)
        rig.step("token")
        rig.hold()
        rig.reports()
        rig.restore(RESTARTING)
        assert {said.replayed for said in rig.reports() if isinstance(said, ServingRestored)} == {1}
        rig.auto = {"encode", "begin", "token", "decode", "cancel"}
        rig.settle()
        *deltas, done = rig.lines(conn)
        assert texts(deltas) == TEXT == done["final_text"]
        rig.tell(CloseRpc(reason="over"), src=ORCHESTRATOR)
    assert edge_effects(twice) == edge_effects(once)
    assert sum(isinstance(effect, ListenTcp) for effect in twice.other) == 1


@pytest.mark.spec("S1 10.12")
@pytest.mark.parametrize("reason", ["unroutable", "link_down", "queue_full"])
def test_what_the_orchestrator_waits_for_is_said_again(reason: str) -> None:
    rig = PipelineRig()
    rig.open_edges()
    said = rig.reports()
    assert [type(message) for message in said] == [TokenOutListening, TokenEndpointReady, TokenEndpointReady]
    for message in said:
        failed(rig, message, reason)
    assert rig.reports() == []
    rig.advance(OWN_RETRY_MS)
    assert rig.reports() == said
    rig.tell(OPEN, src=ORCHESTRATOR)
    rig.tell(Listening("127.0.0.1", 1))
    (ready,) = rig.reports()
    failed(rig, ready, reason)
    rig.advance(OWN_RETRY_MS)
    assert rig.reports() == [PromptRpcReady(addr="127.0.0.1:1")]
    rig.advance(60 * OWN_RETRY_MS)
    assert rig.reports() == []


@pytest.mark.spec("S1 10.9")
def test_a_refusal_is_said_again() -> None:
    rig = PipelineRig()
    rig.tell(
        OpenPromptRpc(run_id=1, node_id=1, mode="x", encode_actor=b"", decode_actor=b"", nodes=[]), src=ORCHESTRATOR
    )
    (refusal,) = rig.reports()
    failed(rig, refusal)
    rig.advance(OWN_RETRY_MS)
    assert rig.reports() == [refusal] and isinstance(refusal, PromptRpcFailed)


def test_news_of_an_attempt_that_is_over_is_not_said() -> None:
    """A ServingDisturbed that came after the worker was replaced would have it replaced once more."""
    rig = rig_with()
    rig.reports()
    conn = rig.connect()
    rig.say(conn, {"type": "shutdown"})
    rig.tell(EdgeDown(TOKEN_OUT, "closed"))
    said = rig.reports()
    assert ServingDisturbed in [type(message) for message in said]
    for message in said:
        failed(rig, message, "link_down")
    rig.tell(HoldServing(error="node 3 exited"), src=ORCHESTRATOR)
    rig.tell(EdgeUp(TOKEN_IN, "late"))
    rig.advance(OWN_RETRY_MS)
    assert rig.reports() == [ShutdownRequested(source="rpc")]
    rig.tell(RestoreServing(run=RESTARTING), src=ORCHESTRATOR)
    assert [type(message) for message in rig.reports()] == [ServingRestored]


@pytest.mark.parametrize("end", ["lease", "peer"])
def test_nothing_is_said_to_an_orchestrator_that_is_gone(end: str) -> None:
    """Nor does it leave its token edges behind, opened and never used."""
    rig = PipelineRig()
    rig.tell(Lease(ttl_ms=LEASE_TTL_MS), src=ORCHESTRATOR)
    rig.open_edges()
    *_, ready = rig.reports()
    failed(rig, ready, "peer_lost" if end == "peer" else "unroutable")
    if end == "lease":
        rig.advance(OWN_RETRY_MS)
        failed(rig, *rig.reports())
        rig.h.tell(Lease(ttl_ms=1), src=ORCHESTRATOR)
        rig.advance(1)
        rig.reports()
        assert edge_effects(rig)[-1] == "CloseTokenEdges"
    rig.advance(10 * OWN_RETRY_MS)
    assert rig.reports() == []


def test_another_edge_is_another_question() -> None:
    rig = PipelineRig()
    rig.open_edges()
    (opened,) = [effect for effect in rig.other if isinstance(effect, ListenTokenOut)]
    rig.tell(OpenTokenOut(run_id=2, run=b"s" * 16, token_out=opened.edge), src=ORCHESTRATOR)
    assert edge_effects(rig) == ["ListenTokenOut", "DialTokenIn", "CloseTokenEdges", "ListenTokenOut"]
