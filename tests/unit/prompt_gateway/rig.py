"""A gateway actor with hand-driven clients, worker and orchestrator: says what happens, reads what came of it."""

from __future__ import annotations

import json
from typing import Any

from common.addresses import Role
from common.config_slices import GatewaySlice, encode_slice
from common.effects import Effect, ViewChanged
from common.messages.bus import MemberEntry, Snapshot
from common.messages.config import ConfigSlice
from common.messages.node_agent import CancelRequest, InferPrompt
from common.messages.prompt import Done, Fault, RequestCancelled, TextDelta
from common.messages.serve import OpenPromptRpc
from services.prompt_gateway.core import GatewayActor
from services.prompt_gateway.tcp import (
    Listening,
    ListenTcp,
    TcpAbort,
    TcpClose,
    TcpClosed,
    TcpConnected,
    TcpData,
    TcpDrained,
    TcpEof,
    TcpWrite,
)
from tests.support.harness import Harness

AGENT = b"a" * 32
ORCHESTRATOR = b"o" * 32
WORKER_NODE = b"w" * 32
RESOLVER = b"r" * 32
PORT = 19777

OPEN = OpenPromptRpc(
    run_id=1, node_id=1, mode="direct", encode_actor=AGENT, decode_actor=AGENT, nodes=[WORKER_NODE], eos_tokens=[2]
)


class Rig:
    """The shell's part is instant: what is written counts as drained unless `reads` says that the client does not."""

    def __init__(self, *, rpc_bind: str = f"127.0.0.1:{PORT}", max_tokens: int = 0, allow_remote: bool = False) -> None:
        self.gateway = GatewayActor()
        self.h = Harness(self.gateway, name=Role.GATEWAY)
        self.written: dict[int, bytes] = {}
        self.reads: dict[int, bool] = {}
        self.closing: set[int] = set()
        self.gone: set[int] = set()
        self.other: list[Effect] = []
        self.to_orchestrator: list[Any] = []
        self.to_agent: list[Any] = []
        self.next_conn = 1
        config = GatewaySlice(rpc_bind=rpc_bind, max_tokens=max_tokens, allow_remote=allow_remote)
        self.tell(ConfigSlice(part=Role.GATEWAY, digest="d", slice_json=encode_slice(config)), src=RESOLVER)

    # --- driving ------------------------------------------------------------------------------------------------
    def tell(self, msg: Any, *, src: bytes = b"", dst: bytes | None = None) -> None:
        self.h.tell(msg, src=src, dst=dst)
        self.settle()

    def advance(self, ms: int) -> None:
        # In steps, because the shell acts between timers.
        end = self.h.now_ms + ms
        while self.h.now_ms < end:
            due = self.h.system.next_deadline()
            step = end if due is None else min(end, max(due, self.h.now_ms + 1))
            self.h.advance(step - self.h.now_ms)
            self.settle()

    def settle(self) -> None:
        """Play the shell until it has nothing to do."""
        while True:
            for dst, msg in self.h.sent():
                if dst == AGENT:
                    self.to_agent.append(msg)
                elif dst == ORCHESTRATOR:
                    self.to_orchestrator.append(msg)
            effects = self.h.effects()
            if not effects:
                return
            for effect in effects:
                self.perform(effect)

    def perform(self, effect: Effect) -> None:
        match effect:
            case TcpWrite(conn, data):
                assert conn not in self.gone, "written to a closed connection"
                self.written[conn] = self.written.get(conn, b"") + data
                if self.reads.get(conn, True):
                    self.h.tell(TcpDrained(conn, len(data)))
            case TcpClose(conn):
                self.closing.add(conn)
                if self.reads.get(conn, True):
                    self.close(conn)
            case TcpAbort(conn):
                self.close(conn)
            case _:
                self.other.append(effect)

    def close(self, conn: int, error: str = "") -> None:
        if conn not in self.gone:
            self.gone.add(conn)
            self.tell(TcpClosed(conn, error))

    # --- the run ------------------------------------------------------------------------------------------------
    def open(self, msg: OpenPromptRpc = OPEN) -> Rig:
        self.tell(msg, src=ORCHESTRATOR)
        listen = [effect for effect in self.other if isinstance(effect, ListenTcp)]
        self.tell(Listening(listen[-1].host, listen[-1].port))
        return self

    def member(self, state: str) -> None:
        entry = MemberEntry(node=WORKER_NODE, boot=1, logical_id="node 1", role=Role.AGENT, state=state, incarnation=1)
        self.h.views.members.apply(Snapshot(view="members", version=1, items=[entry]))
        self.tell(ViewChanged("members"))

    def link(self, *, up: bool) -> None:
        self.h.views.link_up = self.h.views.prompt_link_up = up
        self.tell(ViewChanged("paths"))

    # --- a client -----------------------------------------------------------------------------------------------
    def connect(self) -> int:
        conn, self.next_conn = self.next_conn, self.next_conn + 1
        self.written[conn] = b""
        self.tell(TcpConnected(conn, f"127.0.0.1:{50000 + conn}"))
        return conn

    def say(self, conn: int, data: bytes | dict[str, Any]) -> None:
        self.tell(TcpData(conn, data if isinstance(data, bytes) else json.dumps(data).encode() + b"\n"))

    def ask(self, conn: int, request_id: int = 1, prompt: str = "hi", **more: Any) -> None:
        self.say(conn, {"request_id": request_id, "prompt_text": prompt, **more})

    def eof(self, conn: int) -> None:
        self.tell(TcpEof(conn))

    def lines(self, conn: int) -> list[dict[str, Any]]:
        """What the client received since the last call."""
        data, self.written[conn] = self.written[conn], b""
        assert data.endswith(b"\n") or not data.strip()
        return [json.loads(line) for line in data.splitlines() if line.strip()]

    # --- the worker ---------------------------------------------------------------------------------------------
    def prompts(self) -> list[InferPrompt]:
        """InferPrompts since the last call; other messages stay."""
        found = [msg for msg in self.to_agent if isinstance(msg, InferPrompt)]
        self.to_agent = [msg for msg in self.to_agent if not isinstance(msg, InferPrompt)]
        return found

    def cancels(self) -> list[int]:
        """Prompt ids of CancelRequests since the last call."""
        found = [msg.request_id for msg in self.to_agent if isinstance(msg, CancelRequest)]
        self.to_agent = [msg for msg in self.to_agent if not isinstance(msg, CancelRequest)]
        return found

    def delta(self, to: InferPrompt, text: str, tokens: int = 1) -> None:
        self.tell(TextDelta(request_id=to.request_id, text=text, tokens=tokens), src=AGENT, dst=to.reply_to)

    def done(self, to: InferPrompt, text: str = "ok") -> None:
        done = Done(
            request_id=to.request_id,
            final_text=text,
            tokens_generated=2,
            elapsed_ms=30,
            prompt_tokens=5,
            finish_reason="stop",
        )
        self.tell(done, src=AGENT, dst=to.reply_to)

    def fault(self, to: InferPrompt, error: str = "engine died") -> None:
        self.tell(Fault(request_id=to.request_id, error=error), src=AGENT, dst=to.reply_to)

    def cancelled(self, prompt_id: int, known: bool = True) -> None:
        self.tell(RequestCancelled(request_id=prompt_id, known=known), src=AGENT)

    # --- the orchestrator ---------------------------------------------------------------------------------------
    def reports(self) -> list[Any]:
        found, self.to_orchestrator = self.to_orchestrator, []
        return found

    def records(self) -> list[dict[str, Any]]:
        """Prompt records since the last call."""
        return [json.loads(item.payload) for item in self.h.observed() if item.channel == "mvp.orch.prompt"]

    def steps(self) -> list[tuple[str, str, str]]:
        """(phase, status, event) of the records since the last call."""
        return [(r["phase"], r["status"], r["detail"].get("event", "")) for r in self.records()]
