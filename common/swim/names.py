"""The name registry: name → actor address, gossiped; the last writer wins, removals leave tombstones (S2 6.2)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from common.messages.bus import NameEntry
from common.messages.member import NameUpdate
from common.swim.config import NAME_BYTES_MAX, NAMES_MAX


def precedence(update: NameUpdate) -> tuple[int, int, bytes, bool, bytes, int]:
    """(timestamp, generation, node) decide; the rest only makes the order total, a tombstone before a live entry."""
    return update.timestamp_ms, update.generation, update.node, update.tombstone, update.address, update.boot


class NameRegistry:
    """Names with their tombstones. All copies converge, for merging is a join on `precedence`."""

    def __init__(self) -> None:
        self._entries: dict[str, NameUpdate] = {}
        self._since: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[NameUpdate]:
        return iter(self._entries.values())

    def get(self, name: str) -> NameUpdate | None:
        """The entry or tombstone of a name."""
        return self._entries.get(name)

    def resolve(self, name: str) -> NameEntry | None:
        """resolve_name of S2: where the name leads, None for no such name."""
        entry = self._entries.get(name)
        if entry is None or entry.tombstone:
            return None
        return NameEntry(name=name, address=entry.address, node=entry.node)

    def merge(self, update: NameUpdate, now: int) -> bool:
        """Join an entry in; False when nothing is different or a limit is reached."""
        known = self._entries.get(update.name)
        if known is None and (len(self._entries) >= NAMES_MAX or len(update.name.encode()) > NAME_BYTES_MAX):
            return False
        if known is not None and precedence(update) <= precedence(known):
            return False
        self._entries[update.name] = update
        self._since[update.name] = now
        return True

    def claim(self, name: str, address: bytes, node: bytes, boot: int, wall_ms: int) -> NameUpdate:
        """A new entry that wins over everything known here, whatever the clocks of earlier writers were."""
        known = self._entries.get(name)
        at = max(wall_ms, known.timestamp_ms + 1) if known else wall_ms
        return NameUpdate(name=name, address=address, node=node, timestamp_ms=at, generation=0, boot=boot)

    def tombstone(self, entry: NameUpdate) -> NameUpdate:
        """The removal of an entry. Every member makes the same one from the same entry, so burials converge."""
        return msgspec.structs.replace(entry, generation=entry.generation + 1, tombstone=True)

    def of(self, node: bytes, boot: int) -> list[NameUpdate]:
        """The live entries of one incarnation; an entry without a boot belongs to any."""
        return [
            entry
            for entry in self._entries.values()
            if entry.node == node and entry.boot in (0, boot) and not entry.tombstone
        ]

    def purge(self, older_than: int) -> None:
        """Forget tombstones merged before a protocol time."""
        gone = [name for name, entry in self._entries.items() if entry.tombstone and self._since[name] < older_than]
        for name in gone:
            del self._entries[name], self._since[name]
