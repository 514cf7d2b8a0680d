"""Views: replicated tables with one publisher and many watchers (Watch → Snapshot, then Deltas; design.md 3).

`ViewTable` is the publisher's side, `Replica` the watcher's, `Views` what one node knows. All pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from common.messages.bus import Delta, MemberEntry, NameEntry, PathEntry, RouteEntry, Snapshot, ViewItem

WENT_MAX = 256  # reasons that a watcher may still ask for; more go at once only when a whole cluster does


def item_key(item: ViewItem) -> bytes:
    """The identity of an item within its view."""
    match item:
        case RouteEntry():
            return item.address
        case PathEntry():
            return item.broker + item.next_hop
        case MemberEntry():
            return item.node
        case NameEntry():
            return item.name.encode()


class ViewTable:
    """The publisher's table of one view."""

    def __init__(self, view: str) -> None:
        self.view = view
        self.version = 0
        self.items: dict[bytes, ViewItem] = {}

    def snapshot(self) -> Snapshot:
        """The whole table, for a new watcher."""
        return Snapshot(view=self.view, version=self.version, items=list(self.items.values()))

    def change(self, changed: list[ViewItem], removed: list[bytes], reason: str = "") -> Delta | None:
        """Apply changes; the Delta for every watcher, or None when nothing is different. reason: of `removed`."""
        real = [item for item in changed if self.items.get(item_key(item)) != item]
        gone = [key for key in dict.fromkeys(removed) if key in self.items]
        if not real and not gone:
            return None
        for item in real:
            self.items[item_key(item)] = item
        for key in gone:
            del self.items[key]
        self.version += 1
        return Delta(view=self.view, version=self.version, changed=real, removed=gone, reason=reason if gone else "")


class Replica:
    """A watcher's copy. `known` is False until the first Snapshot and again after `forget`: then it reads Unknown."""

    def __init__(self, view: str) -> None:
        self.view = view
        self.known = False
        self.current = False
        """Nothing can have been missed: False from a break of the link until the publisher's next word."""
        self.version = 0
        self.revision = 0
        """Counts the changes of this copy: what was derived from it is old when this differs."""
        self.items: dict[bytes, ViewItem] = {}
        self.went: dict[bytes, str] = {}
        """Why the items that went last did."""

    def forget(self) -> None:
        """The publisher restarted: nothing is known until its next Snapshot."""
        self.known = False
        self.revision += 1
        self.items.clear()

    def apply(self, update: Snapshot | Delta) -> bool:
        """True if applied; False on a version gap: the watcher must Watch again."""
        self.revision += 1
        if isinstance(update, Snapshot):
            self.items = {item_key(item): item for item in update.items}
            self.version, self.known, self.current = update.version, True, True
            return True
        if not self.known or update.version != self.version + 1:
            self.known = self.current = False
            return False
        self.current = True
        for item in update.changed:
            self.items[item_key(item)] = item
        for key in update.removed:
            self.items.pop(key, None)
            self.went[key] = update.reason
            if len(self.went) > WENT_MAX:
                del self.went[next(iter(self.went))]
        self.version = update.version
        return True


class RouteReplica(Replica):
    """The route view (S1 6.2)."""

    def __init__(self, view: str) -> None:
        super().__init__(view)
        self._names: dict[str, RouteEntry] = {}
        self._names_of = -1

    def owner(self, address: bytes) -> RouteEntry | None:
        """route_owner: the node that hosts the actor, or None."""
        item = self.items.get(address)
        return item if isinstance(item, RouteEntry) else None

    def entries(self) -> Iterator[RouteEntry]:
        """All routes."""
        return (item for item in self.items.values() if isinstance(item, RouteEntry))

    def named(self, name: str) -> RouteEntry | None:
        """The main actor of a service by its well-known name, or None while it is not there."""
        if self._names_of != self.revision:
            self._names, self._names_of = {}, self.revision
            for route in self.entries():
                self._names.setdefault(route.name, route)
        return self._names.get(name) if name else None


class MemberReplica(Replica):
    """The member view (S1 7.7)."""

    def member(self, node: bytes) -> MemberEntry | None:
        """What SWIM says of a node, or None: unknown."""
        item = self.items.get(node)
        return item if isinstance(item, MemberEntry) else None

    def state(self, node: bytes) -> str:
        """ "alive" | "suspect" | "dead" | "left" | "unknown" (also while membership restarts)."""
        entry = self.member(node)
        return entry.state if entry and self.known else "unknown"


class PathReplica(Replica):
    """The path view: which broker hops are up."""

    def any_down(self) -> bool:
        """Whether any known hop is down: a SWIM member pauses its clock then."""
        return any(isinstance(item, PathEntry) and not item.up for item in self.items.values())

    def none_up(self) -> bool:
        """Whether the router is known to have no relay at the moment."""
        return self.known and not any(isinstance(item, PathEntry) and item.up for item in self.items.values())


@dataclass
class Views:
    """What this node knows of the cluster."""

    routes: RouteReplica = field(default_factory=lambda: RouteReplica("routes"))
    members: MemberReplica = field(default_factory=lambda: MemberReplica("members"))
    paths: PathReplica = field(default_factory=lambda: PathReplica("paths"))
    names: Replica = field(default_factory=lambda: Replica("names"))
    link_up: bool = False
    """Whether this node's own door broker answers; a SWIM clock pauses while not."""
    prompt_link_up: bool = False
    """Whether it answers on the prompt plane, too: after a break the planes come back one by one."""

    def by_name(self, view: str) -> Replica:
        """The replica of a view name. Raises KeyError for an unknown one."""
        found: dict[str, Replica] = {
            "routes": self.routes,
            "members": self.members,
            "paths": self.paths,
            "names": self.names,
        }
        return found[view]
