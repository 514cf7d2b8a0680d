"""The gateway's actors: the service itself with its listener and connections, and the prompt reply inbox (S1 6.3, 7.8).

States of the prompt RPC: closed → binding (OpenPromptRpc) → open → closing (CloseRpc, run or owner gone) → closed.
A lost lease or RunEnded settles the run and the gateway waits for the next one; when its owner is gone it settles and
exits (design.md 2). Whatever happens, each accepted prompt gets exactly one terminal event.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from common.actors import Ctx, Inbox
from common.addresses import Role
from common.codec import Message
from common.config_slices import GatewaySlice
from common.effects import Exit, Log, SendFailed, StopSignal
from common.limits import EXIT_SETTLE_MS, OWN_RETRY_MS, RPC_CLOSED_MS, RPC_CONNECTIONS_MAX
from common.messages.edge import SequenceBegun
from common.messages.prompt import PromptEvent, RequestCancelled, TokenizerEvent
from common.messages.serve import (
    CloseRpc,
    HoldServing,
    OpenPromptRpc,
    PromptRpcFailed,
    PromptRpcReady,
    RestoreServing,
    ResumeServing,
    RpcClosed,
    ServingDisturbed,
    ServingFailed,
    ServingRestored,
    ShutdownRequested,
    SuspendServing,
    TokenEndpointFailed,
    TokenEndpointReady,
    TokenOutListening,
)
from common.messages.service import Lease, LeaseKept, RunEnded
from common.service_actor import ServiceActor
from services.prompt_gateway.bind import checked_bind, join_addr
from services.prompt_gateway.connection import Connection
from services.prompt_gateway.queue import PromptWork
from services.prompt_gateway.runtimes import MODES
from services.prompt_gateway.runtimes.base import DECODE_TIMER
from services.prompt_gateway.serving import CANCEL_TIMER, DEAD_TIMER, ServingLoop
from services.prompt_gateway.tcp import (
    TCP_EVENTS,
    ListenFailed,
    Listening,
    ListenTcp,
    StopListening,
    TcpAbort,
    TcpClose,
    TcpClosed,
    TcpConnected,
    TcpData,
    TcpDrained,
    TcpEof,
    TcpWrite,
)
from services.prompt_gateway.token_echo import Foretold
from services.prompt_gateway.token_edges import PUMP_TIMER, TOKEN_EDGE_EVENTS, EdgeDown, TokenEdges, TokenRecord
from services.prompt_gateway.wire import (
    DoneLine,
    ErrorLine,
    FaultLine,
    ProtocolError,
    Request,
    Response,
    Shutdown,
    ShutdownAcceptedLine,
    SubmitPrompt,
    encode_response,
)

CLIENT_CLOSE_MS = RPC_CLOSED_MS * 3 // 4  # the orchestrator waits RPC_CLOSED_MS: the answer needs time to get there
HALF_CLOSE_PROBE_MS = 500  # a client that closed its sending side may be gone: how long it can stay unnoticed
CONNECTIONS_HELD_MAX = 2 * RPC_CONNECTIONS_MAX  # served ones and those that are being told that there is no place

RPC_TIMER = "rpc:close"
UNSAID_TIMER = "rpc:unsaid"
OF_ONE_ATTEMPT = (TokenOutListening, TokenEndpointReady, TokenEndpointFailed, ServingDisturbed, ServingRestored)
"""Said too late, these would be taken for news of the attempt to serve that follows."""
SAID_UNTIL_HEARD = (*OF_ONE_ATTEMPT, PromptRpcReady, PromptRpcFailed, ServingFailed, ShutdownRequested)
CLIENT_TIMER = "client:"
PROBE_TIMER = "probe:"


class RpcState(StrEnum):
    """Of the listener."""

    CLOSED = "closed"
    BINDING = "binding"
    OPEN = "open"
    CLOSING = "closing"


class RepliesPending:
    """Event for the gateway: its prompt reply inbox is not empty any more."""


class ReplyInbox(Inbox):
    """S1 6.3: buffers replies until the serving loop drains them, and wakes it for the first."""

    def __init__(self, owner: bytes, *accepts: Any) -> None:
        super().__init__(*accepts)
        self._owner = owner

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Buffer it."""
        was_empty = self.state == "empty"
        super().receive(msg, ctx)
        if was_empty:
            ctx.send(self._owner, RepliesPending())


class GatewayActor(ServiceActor):
    """The service's main actor."""

    ROLE = Role.GATEWAY
    SLICE = GatewaySlice
    Incoming: ClassVar[tuple[type, ...]] = (
        *ServiceActor.SERVICE_INCOMING,
        *TCP_EVENTS,
        *TOKEN_EDGE_EVENTS,
        OpenPromptRpc,
        CloseRpc,
        SuspendServing,
        ResumeServing,
        HoldServing,
        RestoreServing,
        RequestCancelled,
        RepliesPending,
        SendFailed,
    )

    def __init__(self) -> None:
        super().__init__()
        self.state = RpcState.CLOSED
        self.loop: ServingLoop | None = None
        self.connections: dict[int, Connection] = {}
        self._inboxes: dict[str, tuple[bytes, ReplyInbox]] = {}
        """By prompt mode: the prompt reply inbox and the tokenizer reply inbox."""
        self.edges = TokenEdges()
        self._run: OpenPromptRpc | None = None
        self._opener = b""
        self._next_run: tuple[OpenPromptRpc, bytes] | None = None
        """What another orchestrator asked for while the run before it is being settled."""
        self._unsaid: list[tuple[bytes, Message]] = []
        """What the bus could not deliver to the orchestrator, and is said again."""
        self._bind = ("", 0)
        self._next_prompt_id = 1
        self._close_askers: list[bytes] = []
        self._suspension: str | None = None
        self._settled = 0
        self._replayed = 0
        self._shutdown_asked = False
        self._exiting = False

    # --- life ---------------------------------------------------------------------------------------------------
    def on_start(self, ctx: Ctx) -> None:
        """Spawn the reply inbox and watch who is alive."""
        super().on_start(ctx)
        ctx.watch("members")
        ctx.watch("paths")
        replies = {"direct": PromptEvent.__args__, "pipeline": (*TokenizerEvent.__args__, SequenceBegun)}
        for mode, accepts in replies.items():
            inbox = ReplyInbox(ctx.address, *accepts)
            self._inboxes[mode] = (ctx.spawn(inbox), inbox)

    def foretell(self) -> Foretold | None:
        """What is going to be done with the next token, as things stand."""
        return self.loop.foretell() if self.loop else None

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """S1 4.10, 4.11 and the events of TCP."""
        match msg:
            case TcpConnected() | TcpData() | TcpEof() | TcpDrained() | TcpClosed():
                self._on_tcp(msg, ctx)
            case RepliesPending():
                self._drain_replies(ctx)
            case OpenPromptRpc():
                self._on_open(msg, ctx.sender, ctx)
            case Listening() | ListenFailed():
                self._on_listening(msg, ctx)
            case CloseRpc():
                self._on_close(msg, ctx)
            case SuspendServing() if self._is_own(ctx):
                self._suspension = msg.error
                if self.loop:
                    self.loop.suspend(msg.error, ctx)
            case ResumeServing() if self._is_own(ctx):
                self._suspension = None
                if self.loop:
                    self.loop.resume(ctx)
            case HoldServing() if self.loop and self._is_own(ctx):
                self._unsaid = [said for said in self._unsaid if not isinstance(said[1], OF_ONE_ATTEMPT)]
                self.edges.drop(ctx)
                self.loop.hold(msg.error, ctx)
            case RestoreServing() if self._is_own(ctx):
                self._restore(msg.run, ctx)
            case RequestCancelled() if self.loop:
                self.loop.confirm_cancel(msg, ctx.sender, ctx)
            case SendFailed():
                super().receive(msg, ctx)
                self._on_send_failed(msg, ctx)
            case TokenRecord():
                if self.loop:
                    self.loop.receive(msg, ctx)
            case _ if isinstance(msg, TOKEN_EDGE_EVENTS):
                self.edges.receive(msg, ctx)
                if isinstance(msg, EdgeDown) and self.loop and self._run and self.edges.failed:
                    (self.loop.disturbed if self._run.restart else self.loop.broken)(self.edges.failed, ctx)
            case Lease():
                super().receive(msg, ctx)
                ctx.reply(LeaseKept())
            case _:
                super().receive(msg, ctx)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """Limits of prompts, of closing connections and of the closing RPC; probes."""
        if key in (CANCEL_TIMER, DEAD_TIMER, DECODE_TIMER):
            if self.loop:
                self.loop.on_timer(key, ctx)
        elif key == UNSAID_TIMER:
            self._say_again(ctx)
        elif key == PUMP_TIMER:
            self.edges.pump_due(ctx)
        elif key == RPC_TIMER:
            for conn in list(self.connections):
                ctx.effect(TcpAbort(conn))
                self._forget(conn, "", ctx)
        elif key.startswith(CLIENT_TIMER):
            ctx.effect(TcpAbort(int(key.removeprefix(CLIENT_TIMER))))
        elif key.startswith(PROBE_TIMER):
            self._probe(int(key.removeprefix(PROBE_TIMER)), ctx)
        else:
            super().on_timer(key, ctx)

    def on_view(self, view: str, ctx: Ctx) -> None:
        """Loss and return of serving nodes."""
        if view == "members" and self.loop:
            self.loop.members_changed(ctx)
        elif view == "paths" and self.loop:
            self.loop.link_changed(ctx)

    def on_lease_lost(self, ctx: Ctx) -> None:
        """The orchestrator hangs or is cut off: end the run here; if it comes back it must not believe we serve."""
        if self.state in (RpcState.BINDING, RpcState.OPEN):
            error = "the prompt gateway lost the orchestrator's lease and closed the prompt RPC"
            ctx.send(self._opener, ServingFailed(error=error))
        self._close("the orchestrator does not answer; the run is over", ctx)

    def on_run_ended(self, msg: RunEnded, ctx: Ctx) -> None:
        """Settle what is left and wait for the next run. What an earlier run says late is not about this one."""
        if self._is_own(ctx):
            self._close(msg.error or "the run has ended", ctx)

    def on_owner_gone(self, ctx: Ctx) -> None:
        """The launcher died: nobody is left to serve for."""
        self._exiting = True
        self._close("the orchestrator has died; the run is over", ctx)

    def on_stop_signal(self, signal: StopSignal, ctx: Ctx) -> None:
        """Settle, then exit; the second signal does not wait."""
        if signal.count > 1:
            ctx.effect(Exit(0))
            return
        self._exiting = True
        self._close(f"the prompt gateway was stopped by {signal.name}", ctx)
        if self.state is RpcState.CLOSING:
            ctx.timer(RPC_TIMER, EXIT_SETTLE_MS)

    # --- opening and closing the RPC ----------------------------------------------------------------------------
    def _on_open(self, msg: OpenPromptRpc, opener: bytes, ctx: Ctx) -> None:
        if msg == self._run and self.state in (RpcState.BINDING, RpcState.OPEN):
            self._opener = opener
            if self.state is RpcState.OPEN:
                ctx.send(self._opener, PromptRpcReady(addr=join_addr(*self._bind)))
            return
        if self.state is not RpcState.CLOSED and opener != self._opener and not self._exiting:
            # One orchestrator is one run: this one's predecessor is gone, and its lease would last for a minute.
            self._next_run = (msg, opener)
            self._close("another run begins", ctx)
            return
        error, where = "", ("", 0)
        if self.config is None:
            error = "the prompt gateway has no configuration yet"
        elif self.state is not RpcState.CLOSED or self._exiting:
            run = f" for run {self._run.run_id}" if self._run else ""
            error = f"the prompt RPC is {'stopping' if self._exiting else f'still {self.state}{run}'}"
        elif msg.mode not in MODES:
            error = f"prompt mode '{msg.mode}' has no prompt runtime in this build; it has: {', '.join(sorted(MODES))}"
        elif msg.mode == "pipeline" and self.edges.failed:
            error = self.edges.failed  # the word of it may have been lost with the bus
        else:
            try:
                where = checked_bind(self.config.rpc_bind, allow_remote=self.config.allow_remote)
            except ValueError as bad:
                error = f"the prompt RPC cannot be bound: {bad}"
        if error:
            if self.state is RpcState.CLOSED:
                self._opener = opener
            ctx.send(opener, PromptRpcFailed(error=error))
            return
        self.state, self._run, self._opener, self._bind = RpcState.BINDING, msg, opener, where
        ctx.effect(ListenTcp(*where))

    def _is_own(self, ctx: Ctx) -> bool:
        """Whether the run that this gateway serves speaks, or none is served."""
        return self.state is RpcState.CLOSED or ctx.sender == self._opener

    def _on_close(self, msg: CloseRpc, ctx: Ctx) -> None:
        """Only a run itself ends its prompts; another orchestrator has nothing open here."""
        if self._is_own(ctx):
            self._close_askers.append(ctx.sender)
            self._close(msg.reason, ctx)
            return
        if self._next_run is not None and self._next_run[1] == ctx.sender:
            self._next_run = None
        ctx.send(ctx.sender, RpcClosed(settled=0))

    def _on_listening(self, msg: Listening | ListenFailed, ctx: Ctx) -> None:
        if self.state is not RpcState.BINDING or self._run is None:
            return
        if isinstance(msg, ListenFailed):
            addr = join_addr(*self._bind)
            why = (
                "the address is in use; stop what listens there, or set [prompt] rpc_addr to another port"
                if msg.busy
                else f"{msg.reason}; check [prompt] rpc_addr"
            )
            self.state, self._run = RpcState.CLOSED, None
            ctx.send(self._opener, PromptRpcFailed(error=f"the prompt RPC cannot be bound at {addr}: {why}"))
            return
        self.state, self._bind = RpcState.OPEN, (msg.host, msg.port)
        self._settled, self._shutdown_asked = 0, False
        reply_to, _ = self._inboxes[self._run.mode]
        self.loop = ServingLoop(self._run, reply_to, self._next_prompt_id, self)
        self.loop.members_changed(ctx)
        if self._suspension is not None:
            self.loop.suspend(self._suspension, ctx)
        if self._run.mode == "pipeline" and self.edges.failed:
            self.loop.broken(self.edges.failed, ctx)
        ctx.send(self._opener, PromptRpcReady(addr=join_addr(*self._bind)))

    def _restore(self, run: OpenPromptRpc, ctx: Ctx) -> None:
        """A worker was replaced; asked again, it is answered again."""
        if self.loop is None or self.state is not RpcState.OPEN:
            return
        if self.loop.held:
            self._run = run
            self._replayed = self.loop.restore(run, ctx)
        ctx.reply(ServingRestored(replayed=self._replayed))

    def _close(self, reason: str, ctx: Ctx) -> None:
        """Faults first, then the connections; idempotent. Ends in _closed."""
        if self.state in (RpcState.BINDING, RpcState.OPEN):
            ctx.effect(StopListening())
            for connection in list(self.connections.values()):
                if connection.in_flight is None and connection.unsent == 0:
                    # Nothing is on its way to an idle client, so the end of the run need not wait until it notices.
                    ctx.effect(TcpAbort(connection.conn))
                    self._forget(connection.conn, "", ctx)
            self.state = RpcState.CLOSING
            if self.loop:
                self._settled = self.loop.stop(reason, ctx)
            for connection in list(self.connections.values()):
                if not connection.closing:
                    self._close_connection(connection, ctx)
            ctx.timer(RPC_TIMER, CLIENT_CLOSE_MS)
        if self.state is RpcState.CLOSED or not self.connections:
            self._closed(ctx)

    def _closed(self, ctx: Ctx) -> None:
        ctx.cancel(RPC_TIMER)
        if self._next_run is None or self.edges.opener != self._next_run[1]:
            # A run that takes over has opened its token edges before it asks for the RPC.
            self.edges.close(ctx)
        ctx.cancel(UNSAID_TIMER)
        self._unsaid.clear()
        self.state, self._run, self._opener, self._suspension = RpcState.CLOSED, None, b"", None
        if self.loop:
            self._next_prompt_id = self.loop.next_id
            self.loop = None
        for asker in self._close_askers:
            ctx.send(asker, RpcClosed(settled=self._settled))
        self._close_askers.clear()
        next_run, self._next_run = self._next_run, None
        if self._exiting:
            ctx.effect(Exit(0))
        elif next_run is not None:
            self._on_open(*next_run, ctx)

    def _on_send_failed(self, failed: SendFailed, ctx: Ctx) -> None:
        if self.loop:
            self.loop.send_failed(failed, ctx)
        if failed.dst in (self._opener, self.edges.opener):
            is_passing = failed.reason != "peer_lost" and self.state is not RpcState.CLOSING
            if is_passing and isinstance(failed.message, SAID_UNTIL_HEARD):
                self._unsaid.append((failed.dst, failed.message))
                ctx.timer(UNSAID_TIMER, OWN_RETRY_MS)
            name = type(failed.message).__name__
            ctx.effect(Log("warning", f"{name} did not reach the orchestrator: {failed.reason}"))

    def _say_again(self, ctx: Ctx) -> None:
        """Unheard, a broken gateway would fault every prompt for ever, a client's shutdown would be lost, a start would
        wait."""
        unsaid, self._unsaid = self._unsaid, []
        for opener, message in unsaid:
            ctx.send(opener, message)

    def _drain_replies(self, ctx: Ctx) -> None:
        for _, inbox in self._inboxes.values():
            for _, event in inbox.drain():
                if self.loop:
                    self.loop.receive(event, ctx)

    # --- connections --------------------------------------------------------------------------------------------
    def _on_tcp(self, msg: TcpConnected | TcpData | TcpEof | TcpDrained | TcpClosed, ctx: Ctx) -> None:
        if isinstance(msg, TcpConnected):
            self._on_connected(msg, ctx)
            return
        connection = self.connections.get(msg.conn)
        if connection is None:
            return
        match msg:
            case TcpData():
                self._on_data(connection, msg.data, ctx)
            case TcpEof():
                self._on_eof(connection, ctx)
            case TcpDrained():
                connection.drained(msg.sent)
            case TcpClosed():
                self._forget(msg.conn, msg.error, ctx)

    def _on_connected(self, msg: TcpConnected, ctx: Ctx) -> None:
        if self.state is not RpcState.OPEN or len(self.connections) >= CONNECTIONS_HELD_MAX:
            ctx.effect(TcpAbort(msg.conn))
            return
        served = sum(not connection.closing for connection in self.connections.values())
        connection = self.connections[msg.conn] = Connection(msg.conn, msg.peer)
        if served >= RPC_CONNECTIONS_MAX:
            self._refuse(connection, f"{RPC_CONNECTIONS_MAX} clients are connected already; try again later", ctx)

    def _on_data(self, connection: Connection, data: bytes, ctx: Ctx) -> None:
        try:
            for request in connection.requests(data):
                self._on_request(connection, request, ctx)
        except ProtocolError as error:
            self._refuse(connection, str(error), ctx)

    def _on_eof(self, connection: Connection, ctx: Ctx) -> None:
        """The client sends nothing more. It may have only shut its sending side down and still wait for its answer."""
        try:
            if (request := connection.last_request()) is not None:
                self._on_request(connection, request, ctx)
        except ProtocolError as error:
            self._refuse(connection, str(error), ctx)
        connection.read_closed = True
        if connection.in_flight is None:
            if not connection.closing:
                self._close_connection(connection, ctx)
        else:
            self._probe(connection.conn, ctx)

    def _on_request(self, connection: Connection, request: Request, ctx: Ctx) -> None:
        if self.loop is None:
            return
        match request:
            case SubmitPrompt():
                work = self.loop.accept(connection.conn, request, self.config.max_tokens, ctx)
                connection.in_flight = work
                self.loop.enqueue(work, ctx)
            case Shutdown():
                self._write(connection, ShutdownAcceptedLine(), ctx)
                if not self._shutdown_asked:
                    self._shutdown_asked = True
                    ctx.send(self._opener, ShutdownRequested(source="rpc"))

    def _probe(self, conn: int, ctx: Ctx) -> None:
        """Tell a client that waits from one that is gone: only a write gets an answer from the latter, a reset."""
        connection = self.connections.get(conn)
        if connection and connection.in_flight and not connection.closing:
            if connection.unsent == 0:
                connection.wrote(1)
                ctx.effect(TcpWrite(conn, b" "))
            ctx.timer(f"{PROBE_TIMER}{conn}", HALF_CLOSE_PROBE_MS)

    def _refuse(self, connection: Connection, error: str, ctx: Ctx) -> None:
        """Rows 7 and 8: the active prompt's fault, then the error line, then close."""
        if self.loop and (work := connection.in_flight):
            self.loop.fail(work, f"protocol error: {error}", ctx)
        if not connection.closing:
            self._write(connection, ErrorLine(error=error), ctx)
            self._close_connection(connection, ctx)

    def _write(self, connection: Connection, response: Response, ctx: Ctx) -> None:
        if connection.closing:
            return
        data = encode_response(response)
        if connection.may_write(len(data), is_last=isinstance(response, DoneLine | FaultLine)):
            connection.wrote(len(data))
            ctx.effect(TcpWrite(connection.conn, data))
            return
        connection.close()
        ctx.effect(TcpAbort(connection.conn))
        ctx.effect(Log("info", f"client {connection.peer} does not read: {connection.unsent} bytes wait; cut off"))
        if self.loop and (work := connection.in_flight):
            self.loop.leave(work, "the client does not read its answer", ctx)

    def _close_connection(self, connection: Connection, ctx: Ctx) -> None:
        connection.close()
        ctx.cancel(f"{PROBE_TIMER}{connection.conn}")
        ctx.effect(TcpClose(connection.conn))
        ctx.timer(f"{CLIENT_TIMER}{connection.conn}", CLIENT_CLOSE_MS)

    def _forget(self, conn: int, error: str, ctx: Ctx) -> None:
        connection = self.connections.pop(conn)
        connection.close()
        ctx.cancel(f"{PROBE_TIMER}{conn}")
        ctx.cancel(f"{CLIENT_TIMER}{conn}")
        if self.loop and (work := connection.in_flight):
            self.loop.leave(work, f"the client disconnected{f': {error}' if error else ''}", ctx)
        if self.state is RpcState.CLOSING and not self.connections:
            self._closed(ctx)

    # --- what the serving loop asks of its clients ----------------------------------------------------------------
    def answer(self, work: PromptWork, response: Response, ctx: Ctx) -> None:
        """serving.Clients."""
        if connection := self.connections.get(work.conn):
            self._write(connection, response, ctx)

    def ended(self, work: PromptWork, ctx: Ctx) -> None:
        """serving.Clients."""
        connection = self.connections.get(work.conn)
        if connection and connection.in_flight is work:
            connection.in_flight = None
            if connection.read_closed and not connection.closing:
                self._close_connection(connection, ctx)

    def serving_failed(self, error: str, ctx: Ctx) -> None:
        """serving.Clients."""
        ctx.send(self._opener, ServingFailed(error=error))

    def serving_disturbed(self, error: str, ctx: Ctx) -> None:
        """serving.Clients."""
        ctx.send(self._opener, ServingDisturbed(error=error))

    def check(self) -> None:
        """Invariants: each prompt in flight is the active one or waits, and the other way round; memory is bounded."""
        assert len(self.connections) <= CONNECTIONS_HELD_MAX, "too many connections are held"
        assert (self.loop is not None) == (self.state in (RpcState.OPEN, RpcState.CLOSING) and self._run is not None)
        works = list(self.loop.queue) if self.loop else []
        if self.loop:
            self.loop.check()
            if self.loop.active and self.loop.active.work.outcome is None:
                works.append(self.loop.active.work)
        in_flight = [connection.in_flight for connection in self.connections.values() if connection.in_flight]
        assert sorted(work.prompt_id for work in works) == sorted(work.prompt_id for work in in_flight)
        for connection in self.connections.values():
            assert connection.in_flight is None or connection.in_flight.outcome is None, "an ended prompt is in flight"
