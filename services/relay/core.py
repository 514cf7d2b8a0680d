"""The relay's own actor: admissions on the word of its operator's router, who is bound here (design.md 3, S1 2.6)."""

from __future__ import annotations

from typing import Any, ClassVar

from common.actors import Actor, Ctx
from common.addresses import Role
from common.broker import Admission, Broker, NodeBound, NodeGone
from common.effects import Exit, OwnerGone, SendFailed, StopSignal
from common.messages.bus import Admit, Admitted, PeerDown, PeerUp, Revoke, Revoked

OWED_MAX = 1024  # beyond it the router learns from Undeliverable alone


class RelayActor(Actor):
    """Its address is the relay's node key. Admissions and bindings are soft state, re-sent by the router."""

    Incoming: ClassVar[tuple[type, ...]] = (Admit, Revoke, NodeBound, NodeGone, SendFailed, OwnerGone, StopSignal)

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._owed: dict[bytes, PeerDown] = {}
        """Ends that the router was not reachable for; said when it is back."""

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """One message; see `Incoming`."""
        match msg:
            case Admit():
                self._broker.admit(msg.key, Admission(msg.role, msg.run, msg.node_id, msg.logical_id))
                ctx.reply(Admitted(key=msg.key))
            case Revoke():
                self._broker.revoke(msg.key)
                ctx.reply(Revoked(key=msg.key))
            case NodeBound():
                if msg.role is Role.ROUTER:
                    owed, self._owed = self._owed, {}
                    for down in owed.values():
                        ctx.send(msg.key, down)
                    for bound in self._broker.bound():
                        if bound.role is not Role.ROUTER:
                            ctx.send(msg.key, PeerUp(node=bound.key, boot=bound.boot, role=bound.role))
                elif self._broker.router_key:
                    ctx.send(self._broker.router_key, PeerUp(node=msg.key, boot=msg.boot, role=msg.role))
            case NodeGone():
                if self._broker.router_key and msg.key != self._broker.router_key:
                    ctx.send(self._broker.router_key, PeerDown(node=msg.key, boot=msg.boot, reason=msg.reason))
            case SendFailed():
                if isinstance(msg.message, PeerDown) and msg.reason != "peer_lost" and len(self._owed) < OWED_MAX:
                    self._owed[msg.message.node] = msg.message
            case OwnerGone() | StopSignal():
                ctx.effect(Exit(0))
            case _:
                pass
