"""A node of the test's own on the bus of a run: sees routes and members as everybody does, and what becomes of a send.

It takes the key of the config resolver, which nobody needs once every slice is served.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.actors import Actor, Ctx
from common.addresses import Role
from common.effects import Effect, SendFailed, ViewChanged
from common.host import Host
from common.messages.bus import MemberEntry, RouteEntry
from common.messages.config import ConfigFailed
from tests.e2e.stack import Stack, StackError, wait_for


@dataclass(frozen=True, slots=True)
class Say:
    """Event: send one message to an address."""

    to: bytes


class _Actor(Actor):
    Incoming = (Say, SendFailed, ViewChanged)

    def __init__(self) -> None:
        self.failures: list[tuple[float, str]] = []
        """(monotonic seconds, reason)."""

    def on_start(self, ctx: Ctx) -> None:
        ctx.watch("routes")
        ctx.watch("members")

    def receive(self, msg: Any, ctx: Ctx) -> None:
        match msg:
            case Say():
                # Any message that this role may send: the receiver has no use for it, only its way counts.
                ctx.send(msg.to, ConfigFailed(error="a witness"))
            case SendFailed():
                self.failures.append((time.monotonic(), msg.reason))
            case _:
                pass


class Witness:
    """Use as a context manager, in the main thread. It lives only while it waits."""

    def __init__(self, stack: Stack) -> None:
        if any(process.part == "config_resolver" for process in stack.left()):
            stack.kill("config_resolver")
        wait_for("the resolver's end", lambda: not [p for p in stack.left() if p.part == "config_resolver"], 60)
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self._host = Host.from_bus_file(stack.run_dir / "bus" / f"{Role.RESOLVER}.json")
        self._host.on_effect(Effect, lambda *_: None)
        self._actor = _Actor()
        self._address = self._host.spawn(self._actor)

    def __enter__(self) -> Witness:
        self.wait("the members", lambda: self.agent is not None, 60)
        return self

    def __exit__(self, *_: object) -> None:
        self._host.close()
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def wait(self, what: str, condition: Callable[[], Any], limit_s: float) -> float:
        """Live until condition() holds; returns the seconds that it took. Raises StackError."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > limit_s:
                raise StackError(f"the witness does not see {what} within {limit_s:g} s")
            self._host.turn()
        return time.monotonic() - began

    # --- what it sees -----------------------------------------------------------------------------------------
    @property
    def agent(self) -> MemberEntry | None:
        """What SWIM says of the run's one worker."""
        members = self._host.node.views.members
        found = [item for item in members.items.values() if isinstance(item, MemberEntry) and item.role is Role.AGENT]
        return max(found, key=lambda item: item.boot, default=None) if members.known else None

    def agent_state(self) -> str:
        """ "alive", "suspect", "dead", "left", "unknown"."""
        return self.agent.state if self.agent else "unknown"

    def routes(self) -> set[bytes]:
        """The addresses of all actors that are routed, its own included; empty while the view is away."""
        view = self._host.node.views.routes
        return {entry.address for entry in view.entries()} if view.known else set()

    def routes_of(self, node: bytes) -> list[RouteEntry]:
        """Actors that are routed to a node."""
        return [entry for entry in self._host.node.views.routes.entries() if entry.node == node]

    @property
    def router_boot(self) -> int:
        """The router that it is connected with, 0 while there is none."""
        link = self._host.node.link
        return link.router_boot if link.up else 0

    # --- sending ----------------------------------------------------------------------------------------------
    def send(self, to: bytes) -> None:
        """One message."""
        self._host.deliver(self._address, Say(to))

    @property
    def failures(self) -> list[tuple[float, str]]:
        """What could not be delivered: when the witness learned it, and why."""
        return self._actor.failures
