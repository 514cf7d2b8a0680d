"""The relay's own actor: admissions on the word of each operator's router, who is bound here (design.md 3, S1 2.6).

An operator is a router's key. It admits and revokes workers of its own only, and hears of those only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from common.actors import Actor, Ctx
from common.addresses import Role
from common.broker import Admission, Broker, NodeBound, NodeGone
from common.codec import Message
from common.effects import Exit, JobDone, Log, OwnerGone, RunJob, SendFailed, StopSignal
from common.limits import RELAY_NODES_MAX, RELAY_SAVE_LIMIT_MS, RELAY_UNCONFIRMED_MS
from common.messages.bus import Admit, Admitted, PeerDown, PeerUp, Revoke, Revoked

OWED_MAX = 1024  # beyond it the router learns from Undeliverable alone
SAVE_JOB = "save"
_CONFIRM = "confirm:"


@dataclass(slots=True)
class _Operator:
    """One router. owed: ends that it was not reachable for; said when it is back. unconfirmed: workers that its earlier
    incarnation admitted and this one has not spoken of yet."""

    owed: dict[bytes, PeerDown] = field(default_factory=dict)
    unconfirmed: set[bytes] = field(default_factory=set)
    complained: bool = False


class RelayActor(Actor):
    """Its address is the relay's node key. Admissions and bindings are soft state, re-sent by the routers.

    persistent: every change is saved by the job `save` before it is acknowledged, because an operator may be away when
    this relay restarts.
    """

    Incoming: ClassVar[tuple[type, ...]] = (
        Admit,
        Revoke,
        NodeBound,
        NodeGone,
        SendFailed,
        JobDone,
        OwnerGone,
        StopSignal,
    )

    def __init__(self, broker: Broker, *, persistent: bool = False) -> None:
        self._broker, self._persistent = broker, persistent
        self._operators: dict[bytes, _Operator] = {}
        self._answers: list[tuple[bytes, Message]] = []
        """What is acknowledged once it is saved."""
        self._saving: list[tuple[bytes, Message]] | None = None
        self._dirty = False

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """One message; see `Incoming`."""
        match msg:
            case Admit():
                self._admit(msg, ctx)
            case Revoke():
                known = self._broker.admitted.get(msg.key)
                ours = known is not None and known.role is Role.AGENT and known.operator == ctx.sender_node
                if ours:
                    self._broker.revoke(msg.key)
                    self._operator(ctx.sender_node).unconfirmed.discard(msg.key)
                self._answer(ctx.sender, Revoked(key=msg.key), ctx, changed=ours)
            case NodeBound():
                self._bound(msg, ctx)
            case NodeGone():
                if msg.operator in self._broker.routers and msg.key != msg.operator:
                    ctx.send(msg.operator, PeerDown(node=msg.key, boot=msg.boot, reason=msg.reason))
            case SendFailed():
                owed = self._operator(msg.dst).owed
                if isinstance(msg.message, PeerDown) and msg.reason != "peer_lost" and len(owed) < OWED_MAX:
                    owed[msg.message.node] = msg.message
            case JobDone():
                self._saved(msg, ctx)
            case OwnerGone() | StopSignal():
                ctx.effect(Exit(0))
            case _:
                pass

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """A router has come back and did not speak of these workers: they are a run's that is over."""
        operator = bytes.fromhex(key.removeprefix(_CONFIRM))
        forgotten, self._operator(operator).unconfirmed = self._operator(operator).unconfirmed, set()
        for worker in sorted(forgotten):
            self._broker.revoke(worker)
        if forgotten:
            self._dirty = True
            self._save(ctx)

    def _operator(self, key: bytes) -> _Operator:
        return self._operators.setdefault(key, _Operator())

    def _admit(self, msg: Admit, ctx: Ctx) -> None:
        operator, known = ctx.sender_node, self._broker.admitted.get(msg.key)
        refusal = ""
        if msg.role is not Role.AGENT:
            refusal = f"to admit a key as {msg.role}"
        elif known is not None and (known.role is not Role.AGENT or known.operator != operator):
            refusal = "to admit a key that is not its to admit"
        elif known is None and len(self._workers(operator)) >= RELAY_NODES_MAX:
            refusal = f"more than {RELAY_NODES_MAX} workers at once"
        if refusal:
            # No answer: what a stranger may not touch, he is told nothing about. Once is enough for the log.
            if not self._operator(operator).complained:
                self._operator(operator).complained = True
                ctx.effect(Log("warning", f"operator {operator.hex()[:16]} is refused {refusal}"))
            return
        wanted = Admission(msg.role, msg.run, msg.node_id, msg.logical_id, operator)
        self._broker.admit(msg.key, wanted)
        self._operator(operator).unconfirmed.discard(msg.key)
        self._answer(ctx.sender, Admitted(key=msg.key), ctx, changed=wanted != known)

    def _workers(self, operator: bytes) -> set[bytes]:
        """Not the nodes that stand in the relay's own file: those nobody has to confirm."""
        admitted = self._broker.admitted.items()
        return {key for key, known in admitted if known.operator == operator and known.role is Role.AGENT}

    def _bound(self, msg: NodeBound, ctx: Ctx) -> None:
        operator = msg.operator
        if msg.role is not Role.ROUTER:
            if operator in self._broker.routers:
                ctx.send(operator, PeerUp(node=msg.key, boot=msg.boot, role=msg.role))
            return
        state = self._operator(operator)
        owed, state.owed = state.owed, {}
        for down in owed.values():
            ctx.send(operator, down)
        for bound in self._broker.bound():
            if bound.role is not Role.ROUTER and bound.operator == operator:
                ctx.send(operator, PeerUp(node=bound.key, boot=bound.boot, role=bound.role))
        state.unconfirmed = self._workers(operator)
        if state.unconfirmed:
            ctx.timer(_CONFIRM + operator.hex(), RELAY_UNCONFIRMED_MS)

    # --- the state file ---------------------------------------------------------------------------------------
    def _answer(self, to: bytes, message: Message, ctx: Ctx, *, changed: bool) -> None:
        self._dirty = self._dirty or changed
        if not self._persistent or (not self._dirty and self._saving is None):
            ctx.send(to, message)
            return
        self._answers.append((to, message))
        self._save(ctx)

    def _save(self, ctx: Ctx) -> None:
        """One save at a time; what comes meanwhile is in the next one."""
        if not self._persistent or self._saving is not None:
            return
        self._saving, self._answers, self._dirty = self._answers, [], False
        workers = {key: known for key, known in self._broker.admitted.items() if known.role is Role.AGENT}
        ctx.effect(RunJob(SAVE_JOB, "", {"workers": workers}, limit_ms=RELAY_SAVE_LIMIT_MS))

    def _saved(self, done: JobDone, ctx: Ctx) -> None:
        answers, self._saving = self._saving or [], None
        if done.error:
            # Unsaved is unsaid: the routers ask again.
            self._dirty = True
            ctx.effect(Log("error", done.error))
            return
        for to, message in answers:
            ctx.send(to, message)
        if self._answers or self._dirty:
            self._save(ctx)
