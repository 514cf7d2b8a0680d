"""What a node keeps asking of the bus: routes for its actors, and views at whoever publishes them (design.md 3).

All of it is said again when its receiver is a new incarnation, when it was lost because the way was gone for too long,
and after a gap.
"""

from __future__ import annotations

from collections.abc import Callable

from common.actors import ActorSystem, Outbound
from common.addresses import Role
from common.limits import OWN_RETRY_MS
from common.link import Link, LocalDoor
from common.messages.bus import Register, Unregister, Watch
from common.views import Views

Send = Callable[[Outbound, bytes, int], None]  # a message, the node and the boot it goes to


class Standing:
    """Registrations and watches of one node; `on_unknown` hears of a view that nobody publishes now."""

    def __init__(
        self, system: ActorSystem, views: Views, link: Link | LocalDoor, send: Send, on_unknown: Callable[[str], None]
    ) -> None:
        self._system, self._views, self._link, self._send, self._on_unknown = system, views, link, send, on_unknown
        self._watched: dict[str, tuple[bytes, int]] = {}
        self._watch_again: set[str] = set()
        self._register_again: dict[bytes, int] = {}
        self._retry_at = 0
        self._subscribed_for = (0, -1)

    def next_deadline(self) -> int | None:
        """When something is to be said again, monotonic ms."""
        return self._retry_at if (self._watch_again or self._register_again) and self._link.up else None

    # --- registrations ----------------------------------------------------------------------------------------
    def register(self, address: bytes, generation: int, name: str) -> None:
        """Publish an actor's route, if the router is known; it is told of all actors once it is."""
        if self._link.router_key:
            self._tell_router(Register(address=address, boot=self._system.boot, generation=generation, name=name))

    def unregister(self, address: bytes, generation: int) -> None:
        if self._link.router_key:
            self._tell_router(Unregister(address=address, generation=generation))

    def _tell_router(self, message: Register | Unregister) -> None:
        router = self._link.router_key
        self._send(Outbound(self._system.node, router, message, 0), router, self._link.router_boot)

    def fresh_router(self) -> None:
        """A router without a memory: it is told everything."""
        self._register_again.clear()
        for address, generation, name in self._system.addresses():
            self.register(address, generation, name)

    def _say_registrations(self) -> None:
        """What the router was not told, because the way to it was gone for so long that the session gave up."""
        again, self._register_again = self._register_again, {}
        alive = {address: (generation, name) for address, generation, name in self._system.addresses()}
        for address, generation in sorted(again.items()):
            if address in alive:
                self.register(address, *alive[address])
            else:
                self.unregister(address, generation)

    # --- watches ----------------------------------------------------------------------------------------------
    def publishes(self, view: str, node: bytes) -> bool:
        """Whether updates of the view are expected from this node."""
        return self._watched.get(view, (b"", 0))[0] == node

    def missed(self, view: str, now_ms: int) -> None:
        """An update is missing: watch anew."""
        self._watch_again.add(view)
        self._retry_at = now_ms

    def watch_all_again(self, now_ms: int) -> None:
        """After a break of the link, during which a publisher may have given this watcher up."""
        self._watch_again |= self._watched.keys()
        self._retry_at = now_ms

    def failed(self, message: Watch | Register | Unregister, now_ms: int) -> None:
        """It did not arrive: once more, a little later."""
        if isinstance(message, Watch):
            self._watch_again.add(message.view)
        else:
            self._register_again[message.address] = message.generation
        self._retry_at = max(self._retry_at, now_ms + OWN_RETRY_MS)

    def turn(self, now_ms: int) -> None:
        """Say what is due, and watch what is wanted at whoever publishes it now."""
        if isinstance(self._link, LocalDoor) or not self._link.up:
            return
        wanted = (self._views.routes.revision, len(self._system.wanted_views))
        due = bool(self._watch_again or self._register_again) and now_ms >= self._retry_at
        if wanted == self._subscribed_for and not due:
            return
        self._subscribed_for = wanted
        if due:
            self._retry_at = now_ms + OWN_RETRY_MS
            self._say_registrations()
        for view in sorted({"routes"} | self._system.wanted_views):
            self._watch(view, due and view in self._watch_again)

    def _watch(self, view: str, again: bool) -> None:
        found = self._publisher(view)
        if found is None:
            if self._watched.pop(view, None):
                self._on_unknown(view)
            return
        publisher, boot, actor = found
        same = self._watched.get(view) == (publisher, boot)
        if same and not again:
            return
        self._watch_again.discard(view)
        self._watched[view] = (publisher, boot)
        if not same and view != "routes":
            self._on_unknown(view)
        self._send(Outbound(self._system.node, actor, Watch(view=view), 0), publisher, boot)

    def _publisher(self, view: str) -> tuple[bytes, int, bytes] | None:
        """Node, boot and actor: the router of routes and paths, membership of the others; None: not known."""
        if view in ("routes", "paths"):
            return self._link.router_key, self._link.router_boot, self._link.router_key
        route = self._views.routes.named(Role.MEMBERSHIP)
        return None if route is None else (route.node, route.boot, route.address)
