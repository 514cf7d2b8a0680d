"""Whom to probe next, and the two kinds of probe under way: our own round and rounds on behalf of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.messages.member import MemberId

if TYPE_CHECKING:
    import random


class ProbeList:
    """Round robin over a shuffled list: nobody is probed twice in a round, a dead one is met within 2n - 1 periods."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._nodes: list[bytes] = []
        self._known: set[bytes] = set()  # only for `in`: its order would differ from process to process
        self._next = 0

    def __contains__(self, node: bytes) -> bool:
        return node in self._known

    def add(self, node: bytes) -> None:
        """Enter at a random place, so that joiners of one moment are not probed by all at the same one."""
        if node in self._known:
            return
        self._known.add(node)
        index = self._rng.randrange(len(self._nodes) + 1)
        self._nodes.insert(index, node)
        if index < self._next:
            self._next += 1

    def next(self, wanted: Callable[[bytes], bool]) -> bytes | None:
        """The next node to probe or None. At each wrap unwanted ones go and the rest is shuffled anew."""
        for _ in range(2):
            while self._next < len(self._nodes):
                node = self._nodes[self._next]
                self._next += 1
                if wanted(node):
                    return node
            self._nodes = [node for node in self._nodes if wanted(node)]
            self._known = set(self._nodes)
            self._rng.shuffle(self._nodes)
            self._next = 0
        return None


@dataclass(slots=True)
class Round:
    """Our own probe. Times are protocol ms; helpers: the SWIM actors asked, each of whom may answer once."""

    sequence: int
    target: MemberId
    actor: bytes
    ask_at: int
    ends_at: int
    asked: bool = False
    helpers: list[bytes] = field(default_factory=list)
    nacks: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Relay:
    """A probe for somebody else. The nack goes out at nack_at; an answer is passed on also after it, until ends_at."""

    asker: bytes
    asker_sequence: int
    target: MemberId
    actor: bytes
    nack_at: int
    ends_at: int
    nacked: bool = False
