"""What every service does alike: its slice, ServiceReady, the lease, the ends (design.md 2)."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest

from common.actors import Ctx
from common.addresses import Role
from common.config_slices import MembershipSlice, encode_slice
from common.effects import Exit, OwnerGone, SendFailed, StopSignal, ViewChanged
from common.messages.bus import RouteEntry, Snapshot, ViewItem
from common.messages.config import ConfigFailed, ConfigGet, ConfigSlice
from common.messages.service import Lease, RunEnded, ServiceReady
from common.service_actor import ServiceActor
from tests.support.harness import Harness

RESOLVER, ORCHESTRATOR = b"c" * 32, b"o" * 32


class Plain(ServiceActor):
    """Without a slice; writes down which hooks were called."""

    ROLE = Role.MEMBERSHIP
    SLICE: ClassVar[type[msgspec.Struct] | None] = None
    Incoming = ServiceActor.SERVICE_INCOMING

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def on_config_failed(self, error: str, ctx: Ctx) -> None:
        self.called.append(f"config failed: {error}")

    def on_lease_lost(self, ctx: Ctx) -> None:
        self.called.append("lease lost")

    def on_run_ended(self, msg: RunEnded, ctx: Ctx) -> None:
        self.called.append(f"run ended {msg.status}")


class Configured(Plain):
    SLICE = MembershipSlice


class World:
    def __init__(self, actor: Plain) -> None:
        self.actor = actor
        self.harness = Harness(actor, name=actor.ROLE)
        self._version = 0

    def routes(self, **boots: int) -> None:
        """resolver=BOOT, orchestrator=BOOT: who is there."""
        self._version += 1
        known = {"resolver": (RESOLVER, Role.RESOLVER), "orchestrator": (ORCHESTRATOR, Role.ORCHESTRATOR)}
        items: list[ViewItem] = [
            RouteEntry(
                address=known[name][0],
                node=known[name][0],
                boot=boot,
                generation=1,
                role=known[name][1],
                name=known[name][1],
            )
            for name, boot in boots.items()
        ]
        self.harness.views.routes.apply(Snapshot(view="routes", version=self._version, items=items))
        self.harness.tell(ViewChanged("routes"))

    def slice(self, *, part: str = Role.MEMBERSHIP, profile: str = "wan") -> None:
        data = encode_slice(MembershipSlice(profile=profile))
        self.harness.tell(ConfigSlice(part=part, digest="d", slice_json=data), src=RESOLVER, src_node=RESOLVER)

    def said(self) -> list[Any]:
        return self.harness.sent()


def ready(boot: int = 7) -> ServiceReady:
    return ServiceReady(service="membership", boot=boot)


def test_service_without_a_slice_is_ready_when_it_sees_an_orchestrator_and_for_each_new_one() -> None:
    world = World(Plain())
    assert world.said() == []
    world.routes(orchestrator=1)
    assert world.said() == [(ORCHESTRATOR, ready())]
    world.routes(orchestrator=1, resolver=1)
    world.routes(resolver=1)
    assert world.said() == [] and world.actor.orchestrator == b""
    world.routes(orchestrator=2)
    assert world.said() == [(ORCHESTRATOR, ready())]


@pytest.mark.spec("S1 9.1")
def test_service_asks_for_its_slice_until_it_has_it_and_is_ready_only_then() -> None:
    world = World(Configured())
    world.routes(orchestrator=1)
    world.harness.advance(2_000)
    assert world.said() == []
    world.routes(orchestrator=1, resolver=1)
    world.routes(orchestrator=1, resolver=1)
    assert world.said() == [(RESOLVER, ConfigGet(part="membership"))]
    world.harness.advance(1_000)
    assert world.said() == [(RESOLVER, ConfigGet(part="membership"))] * 2
    world.slice(part=Role.GATEWAY)
    assert world.actor.config is None
    world.slice()
    assert world.said() == [(ORCHESTRATOR, ready())]
    world.slice(profile="lan")
    assert world.actor.config == MembershipSlice(profile="wan")
    world.harness.advance(5_000)
    assert world.said() == []


def test_failed_configuration_is_told_until_there_is_one() -> None:
    world = World(Configured())
    world.harness.tell(ConfigFailed(error="bad"))
    world.slice()
    world.harness.tell(ConfigFailed(error="late"))
    assert world.actor.called == ["config failed: bad"]


def test_announcement_that_did_not_arrive_is_repeated() -> None:
    world = World(Plain())
    world.routes(orchestrator=1)
    world.said()
    world.harness.tell(SendFailed(ORCHESTRATOR, ready(), "link_down"))
    world.harness.advance(499)
    assert world.said() == []
    world.harness.advance(1)
    assert world.said() == [(ORCHESTRATOR, ready())]
    world.harness.tell(SendFailed(ORCHESTRATOR, ConfigGet(part="x"), "link_down"))
    world.harness.advance(5_000)
    assert world.said() == []


def test_lease_that_is_not_renewed_is_lost_once() -> None:
    world = World(Plain())
    world.harness.advance(600_000)
    assert world.actor.called == []
    for _ in range(5):
        world.harness.tell(Lease(ttl_ms=60_000))
        world.harness.advance(59_000)
    assert world.actor.called == []
    world.harness.advance(600_000)
    assert world.actor.called == ["lease lost"]


def test_no_lease_is_owed_after_the_run_ended() -> None:
    world = World(Plain())
    world.harness.tell(Lease(ttl_ms=60_000))
    world.harness.tell(RunEnded(status=1, error="x"))
    world.harness.advance(600_000)
    assert world.actor.called == ["run ended 1"]


@pytest.mark.parametrize("event", [OwnerGone(), StopSignal("SIGTERM", 1)])
def test_owner_or_signal_end_a_service(event: object) -> None:
    world = World(Plain())
    world.harness.tell(event)
    assert world.harness.effects() == [Exit(0)]
