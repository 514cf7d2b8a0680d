"""Random interleavings of clients, worker, orchestrator and time against a model of what each client must have seen.

Invariants: each accepted request gets exactly one terminal event while its client is there, after its deltas and before
anything of the next; the worker never has two prompts at a time; the core's own checks hold after each message.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from common.effects import SendFailed
from common.limits import PROMPT_CANCEL_MS, RPC_CLOSED_MS
from common.messages.node_agent import CancelRequest, InferPrompt
from common.messages.serve import CloseRpc, ResumeServing, RpcClosed, ServingFailed, SuspendServing
from services.prompt_gateway.core import RpcState
from tests.unit.prompt_gateway.rig import AGENT, ORCHESTRATOR, Rig

TERMINAL = ("done", "fault")


class Client:
    """What one connection asked and what it must see: asked grows with each prompt, ended with each terminal."""

    def __init__(self, conn: int) -> None:
        self.conn = conn
        self.asked: list[int] = []
        self.ended: list[int] = []
        self.half_line = False
        """Bytes without newline were sent: what is asked next is the rest of a malformed line."""
        self.error = False
        self.eof = False

    @property
    def busy(self) -> bool:
        return len(self.asked) > len(self.ended)


class GatewayMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.rig = Rig().open()
        self.rig.reports()
        self.clients: list[Client] = []
        self.working: dict[int, InferPrompt] = {}
        self.cancelled: set[int] = set()
        self.lost = False
        self.failed = False
        self.closed = False
        self.next_id = 1

    # --- clients ------------------------------------------------------------------------------------------------
    def here(self) -> list[Client]:
        return [client for client in self.clients if client.conn not in self.rig.gone]

    def pick(self, data: st.DataObject) -> Client:
        return data.draw(st.sampled_from(self.here()))

    @rule()
    def connect(self) -> None:
        if len(self.here()) < 6 and not self.closed:
            self.clients.append(Client(self.rig.connect()))

    @precondition(lambda self: self.here())
    @rule(data=st.data(), queued=st.booleans())
    def ask(self, data: st.DataObject, queued: bool) -> None:
        client = self.pick(data)
        if client.eof or client.conn in self.rig.closing:
            return
        if not client.busy and not client.half_line:
            client.asked.append(self.next_id)
        self.rig.ask(client.conn, request_id=self.next_id, **({"events": ["queued"]} if queued else {}))
        self.next_id += 1
        self.observe()

    @precondition(lambda self: self.here())
    @rule(data=st.data(), line=st.sampled_from([b"x\n", b"{}\n", b"x" * 70_000, b'{"request_id":']))
    def garbage(self, data: st.DataObject, line: bytes) -> None:
        client = self.pick(data)
        if not client.eof:
            client.half_line = not line.endswith(b"\n")
            self.rig.say(client.conn, line)
            self.observe()

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        self.rig.close(self.pick(data).conn, "reset")
        self.observe()

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def half_close(self, data: st.DataObject) -> None:
        client = self.pick(data)
        if not client.eof:
            client.eof = True
            self.rig.eof(client.conn)
            self.observe()

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def stop_reading(self, data: st.DataObject) -> None:
        self.rig.reads[self.pick(data).conn] = False

    # --- the worker -----------------------------------------------------------------------------------------------
    @precondition(lambda self: self.working)
    @rule(data=st.data(), size=st.sampled_from([0, 1, 400_000]))
    def delta(self, data: st.DataObject, size: int) -> None:
        self.rig.delta(data.draw(st.sampled_from(list(self.working.values()))), "x" * size)
        self.observe()

    @precondition(lambda self: self.working)
    @rule(data=st.data(), how=st.sampled_from(["done", "fault", "cancelled"]))
    def finish(self, data: st.DataObject, how: str) -> None:
        infer = self.working.pop(data.draw(st.sampled_from(list(self.working))))
        if how == "cancelled":
            self.rig.cancelled(infer.request_id)
        else:
            getattr(self.rig, how)(infer)
        self.observe()

    @rule(prompt_id=st.integers(0, 30), how=st.sampled_from(["done", "delta", "cancelled"]))
    def stale(self, prompt_id: int, how: str) -> None:
        if prompt_id in self.working or not self.rig.gateway.loop or prompt_id >= self.rig.gateway.loop.next_id:
            return
        inbox = self.rig.gateway._inboxes["direct"][0]
        infer = InferPrompt(request_id=prompt_id, prompt="", reply_to=inbox)
        match how:
            case "done":
                self.rig.done(infer)
            case "delta":
                self.rig.delta(infer, "stale")
            case _:
                self.rig.cancelled(prompt_id)
        self.observe()

    @precondition(lambda self: self.working)
    @rule(data=st.data(), reason=st.sampled_from(["unroutable", "peer_lost"]), cancel=st.booleans())
    def send_fails(self, data: st.DataObject, reason: str, cancel: bool) -> None:
        infer = data.draw(st.sampled_from(list(self.working.values())))
        if cancel and infer.request_id not in self.cancelled:
            return
        if not cancel or reason == "peer_lost":
            del self.working[infer.request_id]
        self.rig.tell(SendFailed(AGENT, CancelRequest(request_id=infer.request_id) if cancel else infer, reason))
        self.observe()

    # --- orchestrator and time ------------------------------------------------------------------------------------
    @rule(up=st.booleans())
    def worker_lost_or_back(self, up: bool) -> None:
        self.lost = not up and not self.closed
        self.rig.tell(ResumeServing() if up else SuspendServing(error="dead"), src=ORCHESTRATOR)
        self.observe()

    @rule(state=st.sampled_from(["alive", "dead", "suspect"]))
    def member(self, state: str) -> None:
        self.rig.member(state)
        self.observe()

    @rule(ms=st.sampled_from([1, 600, 5_000, PROMPT_CANCEL_MS]))
    def time(self, ms: int) -> None:
        self.rig.advance(ms)
        self.observe()

    @precondition(lambda self: not self.closed)
    @rule(chance=st.integers(0, 5))
    def close(self, chance: int) -> None:
        if chance == 0:
            self.closed = True
            self.rig.tell(CloseRpc(reason="bye"), src=ORCHESTRATOR)
            self.observe()

    # --- what must hold -------------------------------------------------------------------------------------------
    def observe(self) -> None:
        for infer in self.rig.prompts():
            assert not self.closed
            assert not self.working, "two prompts at the worker"
            self.working[infer.request_id] = infer
        self.cancelled.update(self.rig.cancels())
        for report in self.rig.reports():
            assert isinstance(report, ServingFailed | RpcClosed)
            if isinstance(report, ServingFailed):
                assert not self.failed, "two serving failures"
                self.failed = True
                self.working.clear()
            else:
                self.working.clear()
        for client in self.clients:
            for line in self.rig.lines(client.conn):
                self.check_line(client, line)

    def check_line(self, client: Client, line: dict[str, Any]) -> None:
        assert not client.error, f"{line} after the error line"
        if line["type"] == "error":
            assert not client.busy, "the error line came before the active prompt's fault"
            client.error = True
            return
        assert client.busy, f"{line} while nothing was asked"
        assert line["request_id"] == client.asked[-1]
        assert json.dumps(line).find("stale") < 0
        if line["type"] in TERMINAL:
            client.ended.append(line["request_id"])

    @invariant()
    def settled(self) -> None:
        rig = self.rig
        if rig.gateway.state is RpcState.CLOSED:
            assert not rig.gateway.connections
        for client in self.clients:
            assert client.ended == client.asked[: len(client.ended)]
            if client.conn in rig.gone or client.conn in rig.closing:
                continue
            connection = rig.gateway.connections[client.conn]
            assert (connection.in_flight is not None) == client.busy
        if self.failed or self.closed:
            assert not any(client.busy for client in self.clients if client.conn not in rig.gone)

    def teardown(self) -> None:
        """However it went: closing ends every prompt whose client is there."""
        if not hasattr(self, "rig"):
            return
        if not self.closed:
            self.closed = True
            self.rig.tell(CloseRpc(reason="end"), src=ORCHESTRATOR)
        self.rig.advance(RPC_CLOSED_MS)
        self.observe()
        for client in self.clients:
            if client.conn not in self.rig.gone or client.error:
                assert not client.busy
        assert self.rig.gateway.state is RpcState.CLOSED


@pytest.mark.spec("S1 9.9", "S1 9.10", "S1 6.12")
def test_any_interleaving() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        GatewayMachine,
        settings=settings(max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )
