"""The token endpoints of pipeline mode: token-in is produced, token-out consumed here (S1 6.10, 7.11; design.md 3).

`TokenEdges` is the actor's part (pure: messages in, effects out), `TokenEdgeShell` the sockets. The transport carries
bytes; sequencing and prompt semantics are the pipeline prompt runtime's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.actors import Ctx
from common.bus_edges import EdgeSocketError
from common.codec import Message
from common.edge_records import Record, encode_record
from common.edges.carrier import Carried, EdgeCarrierActor, carrier_address
from common.edges.network import EdgeNetwork
from common.edges.port import EdgePort, Transport
from common.effects import Effect
from common.host import Host
from common.limits import TOKEN_EDGES_PUMP_MS
from common.messages.node_agent import StageInboundEdgeWire, StageOutboundEdgeWire
from common.messages.orchestrator import EndpointWire
from common.messages.serve import (
    OpenTokenIn,
    OpenTokenOut,
    TokenEndpointFailed,
    TokenEndpointReady,
    TokenOutListening,
)
from services.prompt_gateway.token_echo import Foretold, TokenEcho

PUMP_TIMER = "edges:pump"


# --- effects ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ListenTokenOut(Effect):
    """Bind and accept the token-out edge; answered by TokenOutBound."""

    run: bytes
    edge: StageInboundEdgeWire


@dataclass(frozen=True, slots=True)
class DialTokenIn(Effect):
    """Connect the token-in edge; EdgeUp follows."""

    edge: StageOutboundEdgeWire


@dataclass(frozen=True, slots=True)
class WriteTokenIn(Effect):
    """Append a record to the token-in edge."""

    edge_id: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CarriedIn(Effect):
    """A stream message that came over the bus."""

    peer: bytes
    frame: bytes


@dataclass(frozen=True, slots=True)
class PumpEdges(Effect):
    """Deadlines of the edges."""


@dataclass(frozen=True, slots=True)
class DropTokenEdges(Effect):
    """Give up both edges, keep the endpoint."""


@dataclass(frozen=True, slots=True)
class CloseTokenEdges(Effect):
    """No byte moves any more."""


# --- events -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class TokenOutBound:
    """candidates: where the last stage can dial; error: one sentence, or empty."""

    candidates: list[str]
    error: str = ""


@dataclass(frozen=True, slots=True)
class EdgeUp:
    """An edge is ready; path: the candidate that answered."""

    edge_id: int
    path: str


@dataclass(frozen=True, slots=True)
class EdgeDown:
    """An edge is over; detail: one sentence."""

    edge_id: int
    detail: str


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A whole record came over token-out."""

    edge_id: int
    record: Record


@dataclass(frozen=True, slots=True)
class CarryOut:
    """A stream message that has to go over the bus to node `peer`."""

    peer: bytes
    message: Message


TOKEN_EDGE_EVENTS = (
    OpenTokenOut,
    OpenTokenIn,
    TokenOutBound,
    EdgeUp,
    EdgeDown,
    TokenRecord,
    CarryOut,
    Carried,
)


def write_token_in(edge_id: int, record: Record, ctx: Ctx) -> None:
    """Send a record to the first stage."""
    ctx.effect(WriteTokenIn(edge_id, encode_record(record)))


class TokenEdges:
    """Of one run: idle → bound → open → closed; bound again for a worker that was replaced."""

    def __init__(self) -> None:
        self._bound = False
        self._asked: OpenTokenOut | None = None
        self._listening: EndpointWire | None = None
        """The answer to it."""
        self.token_in: int | None = None
        self.token_out: int | None = None
        self.failed = ""
        self.opener = b""
        """Whose run's edges these are."""

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """One of TOKEN_EDGE_EVENTS but TokenRecord, which is the serving loop's."""
        match msg:
            case OpenTokenOut() if msg == self._asked and ctx.sender == self.opener:
                if self._listening is not None:
                    ctx.reply(TokenOutListening(endpoint=self._listening))
            case OpenTokenOut():
                if self.token_out is not None:
                    self.close(ctx)
                self._bound, self._asked = True, msg
                self.opener, self.failed = ctx.sender, ""
                self.token_out = msg.token_out.edge_id
                ctx.effect(ListenTokenOut(msg.run, msg.token_out))
                ctx.timer(PUMP_TIMER, TOKEN_EDGES_PUMP_MS)
            case TokenOutBound() if self.token_out is not None:
                if msg.error:
                    ctx.send(self.opener, TokenEndpointFailed(endpoint="TokenOut", error=msg.error))
                else:
                    self._listening = EndpointWire(node_key=ctx.node, candidates=msg.candidates, relay=True)
                    ctx.send(self.opener, TokenOutListening(endpoint=self._listening))
            case OpenTokenIn():
                if self.token_out is not None and self.token_in is None:
                    self.token_in = msg.token_in.edge_id
                    ctx.effect(DialTokenIn(msg.token_in))
            case EdgeUp() if self.token_out is not None:
                ready = TokenEndpointReady(endpoint=self._name(msg.edge_id), path=msg.path)
                ctx.send(self.opener, ready)
            case EdgeDown():
                if self.token_out is not None and not self.failed:
                    self.failed = f"pipeline {self._words(msg.edge_id)} stream fault: {msg.detail}"
                    failed = TokenEndpointFailed(endpoint=self._name(msg.edge_id), error=msg.detail)
                    ctx.send(self.opener, failed)
            case CarryOut():
                ctx.send(carrier_address(msg.peer), msg.message)
            case Carried():
                ctx.effect(CarriedIn(msg.peer, msg.frame))

    def _name(self, edge_id: int) -> str:
        return "TokenIn" if edge_id == self.token_in else "TokenOut"

    def _words(self, edge_id: int) -> str:
        return "token-in" if edge_id == self.token_in else "token-out"

    def pump_due(self, ctx: Ctx) -> None:
        """PUMP_TIMER."""
        if self.token_out is not None:
            ctx.effect(PumpEdges())
            ctx.timer(PUMP_TIMER, TOKEN_EDGES_PUMP_MS)

    def drop(self, ctx: Ctx) -> None:
        """Their stages are gone or take others: nothing that still comes counts."""
        if self.token_out is not None:
            self.token_in = self.token_out = self._asked = self._listening = None
            ctx.cancel(PUMP_TIMER)
            ctx.effect(DropTokenEdges())

    def close(self, ctx: Ctx) -> None:
        """The run is over; idempotent."""
        if self._bound:
            self._bound, self.opener = False, b""
            self.token_in = self.token_out = self._asked = self._listening = None
            ctx.cancel(PUMP_TIMER)
            ctx.effect(CloseTokenEdges())


class TokenEdgeShell:
    """The effects above on an EdgePort in the gateway's loop. foretell: what the actor is going to do with the next
    token, as things stand with it."""

    def __init__(
        self,
        host: Host,
        gateway: bytes,
        transport: Transport = EdgeNetwork,
        foretell: Callable[[], Foretold | None] = lambda: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._host, self._gateway, self._transport = host, gateway, transport
        self._foretell, self._echo = foretell, TokenEcho()
        self._clock_ns = clock_ns
        self._port: EdgePort | None = None
        self._candidates: list[str] = []
        self._arrived: list[tuple[int, Record]] = []
        self._owed: list[tuple[int, int]] = []
        """(edge, end offset) of records that were handed over and not credited yet."""
        self._turning = False
        # At once because of the write; the others too, so that they keep their order.
        host.on_effect(ListenTokenOut, lambda _, effect: self._listen(effect), at_once=True)
        host.on_effect(DialTokenIn, lambda _, effect: self._dial(effect), at_once=True)
        host.on_effect(WriteTokenIn, lambda _, effect: self._write(effect), at_once=True)
        host.on_effect(DropTokenEdges, lambda _, __: self._drop(), at_once=True)
        host.on_effect(CloseTokenEdges, lambda _, __: self.close(), at_once=True)
        host.on_effect(CarriedIn, lambda _, effect: self._carried(effect))
        host.on_effect(PumpEdges, lambda _, __: self._pump())
        host.node.spawn(EdgeCarrierActor(gateway), address=carrier_address(host.node_key))

    def _now_ms(self) -> int:
        return self._host.loop.now_ms()

    def _listen(self, effect: ListenTokenOut) -> None:
        if self._port is None or self._port.run != effect.run:
            self.close()
            self._port = EdgePort(self._host.bus_file.keys, effect.run, self, self._transport, self._clock_ns)
            path = self._host.bus_file.run_dir / "edge-gateway.sock"
            try:
                self._candidates = self._port.bind([f"ipc://{path}"])
            except EdgeSocketError as error:
                self.close()
                self._host.deliver(self._gateway, TokenOutBound([], str(error)))
                return
            self._host.loop.add_fd(self._port.fd, self._readable)
        self._port.accept(effect.edge)
        self._host.deliver(self._gateway, TokenOutBound(self._candidates))

    def _drop(self) -> None:
        self._forget()
        if self._port is not None:
            self._port.reset()

    def _forget(self) -> None:
        self._echo.disarm()
        self._arrived.clear()
        self._owed.clear()

    def _dial(self, effect: DialTokenIn) -> None:
        if self._port is not None:
            self._port.open(effect.edge, self._now_ms())

    def _write(self, effect: WriteTokenIn) -> None:
        if self._port is not None and self._port.has(effect.edge_id):
            self._port.write(effect.edge_id, effect.data, self._now_ms())
            if not self._turning:
                self._pump()

    def _carried(self, effect: CarriedIn) -> None:
        self._echo.disarm()
        if self._port is not None:
            self._port.carried(effect.peer, effect.frame, self._now_ms())
            self._hand_over()
            self._give_back()

    def _readable(self) -> None:
        """The stages wait for what follows from a token: that comes before its credit and everything else of the
        turn."""
        if self._port is None:
            return
        self._echo.turn(self._port, self._foretold(), self._clock_ns())
        if self._arrived or self._port.look(self._now_ms()):
            self._hand_over()
            self._turning = True
            self._host.run_actors()
            self._turning = False
            self._give_back()
        self._pump()

    def _foretold(self) -> Foretold | None:
        """None while the actor has something to handle that comes before a token."""
        due = self._host.node.system.next_deadline()
        return self._foretell() if due is None or due > self._now_ms() else None

    def _pump(self) -> None:
        if self._port is not None:
            self._port.pump(self._now_ms())
            self._hand_over()
            self._give_back()
        if self._port is not None:
            self._echo.arm(self._port, self._foretold())

    def _hand_over(self) -> None:
        arrived, self._arrived = self._arrived, []
        for edge_id, record in arrived:
            self._host.deliver(self._gateway, TokenRecord(edge_id, record))
            self._owed.append((edge_id, record.end_offset))

    def _give_back(self) -> None:
        """A token is consumed when it is read."""
        owed, self._owed = self._owed, []
        for edge_id, end_offset in owed:
            if self._port is not None:
                self._port.consumed(edge_id, end_offset)

    def close(self) -> None:
        """CloseTokenEdges."""
        if self._port is not None:
            port, self._port = self._port, None
            self._forget()
            self._host.loop.remove_fd(port.fd)
            port.term()

    # --- EdgeEvents -------------------------------------------------------------------------------------------
    def edge_record(self, edge_id: int, record: Record) -> None:
        """To the serving loop."""
        self._arrived.append((edge_id, record))

    def edge_ready(self, edge_id: int, path: str) -> None:
        """To the orchestrator."""
        self._host.deliver(self._gateway, EdgeUp(edge_id, path))

    def edge_failed(self, edge_id: int, reason: str, detail: str) -> None:
        """To the serving loop and the orchestrator."""
        self._host.deliver(self._gateway, EdgeDown(edge_id, f"{reason}: {detail}"))

    def edge_carry(self, peer: bytes, message: Message) -> None:
        """Over the bus."""
        self._host.deliver(self._gateway, CarryOut(peer, message))
