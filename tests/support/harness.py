"""A harness for pure actors: deterministic ids and time; say what it is told, read what it sent and wants done."""

from __future__ import annotations

import random
from typing import Any

from common.actors import Actor, ActorSystem, Outbound
from common.effects import Effect, Observed
from common.views import Views

NODE = b"n" * 32


class Harness:
    """One actor (and what it spawns) under validation. Time moves only by `advance`."""

    def __init__(self, actor: Actor, *, name: str = "", seed: int = 1, node: bytes = NODE, boot: int = 7) -> None:
        self._count = 0
        self.views = Views()
        self.views.link_up = self.views.prompt_link_up = True
        self.system = ActorSystem(
            node=node,
            boot=boot,
            rng=random.Random(seed),
            views=self.views,
            new_address=self._address,
            validate=True,
        )
        self.now_ms = 1_000
        self.system.now_ms, self.system.wall_ms = self.now_ms, 1_800_000_000_000
        self.actor = actor
        self.address = self.system.spawn(actor, name)
        self.run()

    def _address(self) -> bytes:
        self._count += 1
        return b"actor" + self._count.to_bytes(27, "big")

    def run(self) -> None:
        self.system.run(self.now_ms, 1_800_000_000_000 + self.now_ms)

    def tell(self, msg: Any, *, src: bytes = b"", src_node: bytes = b"", dst: bytes | None = None) -> None:
        """Deliver a message as if from `src` on `src_node`, and run to quiescence."""
        assert self.system.deliver(dst or self.address, msg, src=src, src_node=src_node)
        self.run()

    def advance(self, ms: int) -> None:
        """Move time, stopping at every timer on the way."""
        end = self.now_ms + ms
        while (due := self.system.next_deadline()) is not None and due <= end:
            self.now_ms = max(self.now_ms, due)
            self.run()
        self.now_ms = end
        self.run()

    def sent(self) -> list[tuple[bytes, Any]]:
        """(dst, message) of everything sent to actors elsewhere since the last call."""
        out: list[Outbound] = self.system.outbound[:]
        self.system.outbound.clear()
        return [(item.dst, item.message) for item in out]

    def effects(self) -> list[Effect]:
        """Effects other than Observed since the last call."""
        mine = [effect for _, effect in self.system.effects if not isinstance(effect, Observed)]
        self.system.effects = [item for item in self.system.effects if isinstance(item[1], Observed)]
        return mine

    def observed(self) -> list[Observed]:
        """Records since the last call."""
        mine = [effect for _, effect in self.system.effects if isinstance(effect, Observed)]
        self.system.effects = [item for item in self.system.effects if not isinstance(item[1], Observed)]
        return mine
