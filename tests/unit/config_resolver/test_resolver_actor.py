"""Who asks for what, and what the resolver answers (S1 7.1; design.md 2)."""

from __future__ import annotations

import pytest

from common.addresses import Role
from common.config_slices import MembershipSlice, encode_slice
from common.effects import Exit, Log, OwnerGone, StopSignal, ViewChanged
from common.messages.bus import RouteEntry, Snapshot
from common.messages.config import ConfigFailed, ConfigGet, ConfigSlice
from common.messages.service import ServiceFailed, ServiceReady
from services.config_resolver.core import ConfigResolverActor
from tests.support.harness import Harness

SLICES = {Role.MEMBERSHIP: encode_slice(MembershipSlice(profile="wan")), Role.GATEWAY: b"{}"}
MEMBERSHIP = b"m" * 32
GATEWAY = b"g" * 32
TAP = b"t" * 32
ASKER = b"a" * 32


def routes(*entries: tuple[bytes, Role]) -> Snapshot:
    items = [
        RouteEntry(address=bytes([number]) * 32, node=node, boot=3, generation=1, role=role, name=role)
        for number, (node, role) in enumerate(entries, 1)
    ]
    return Snapshot(view="routes", version=1, items=list(items))


def harness(actor: ConfigResolverActor) -> Harness:
    made = Harness(actor, name=Role.RESOLVER)
    made.views.routes.apply(routes((MEMBERSHIP, Role.MEMBERSHIP), (GATEWAY, Role.GATEWAY), (TAP, Role.TAP)))
    return made


def serving() -> Harness:
    return harness(ConfigResolverActor(digest="d1", slices=SLICES))


@pytest.mark.spec("S1 7.1")
def test_each_service_gets_its_slice() -> None:
    h = serving()
    for node, part in ((MEMBERSHIP, Role.MEMBERSHIP), (GATEWAY, Role.GATEWAY)):
        h.tell(ConfigGet(part=part), src=ASKER, src_node=node)
        assert h.sent() == [(ASKER, ConfigSlice(part=part, digest="d1", slice_json=SLICES[part]))]


def test_asking_again_is_answered_again() -> None:
    h = serving()
    for _ in range(3):
        h.tell(ConfigGet(part=Role.GATEWAY), src=ASKER, src_node=GATEWAY)
    assert len(h.sent()) == 3


@pytest.mark.spec("S1 10.16")
def test_nobody_gets_the_slice_of_another_role() -> None:
    h = serving()
    for _ in range(2):
        h.tell(ConfigGet(part=Role.GATEWAY), src=ASKER, src_node=MEMBERSHIP)
    assert h.sent() == []
    assert h.effects() == [Log("warning", "refused the slice of prompt_gateway to a node whose role is membership")]


@pytest.mark.parametrize("node", [b"unknown!" * 4, b""])
def test_an_unknown_node_waits(node: bytes) -> None:
    h = serving()
    h.tell(ConfigGet(part=Role.GATEWAY), src=ASKER, src_node=node)
    assert h.sent() == []
    h.views.routes.apply(routes((b"unknown!" * 4, Role.GATEWAY)))
    h.tell(ConfigGet(part=Role.GATEWAY), src=ASKER, src_node=b"unknown!" * 4)
    assert len(h.sent()) == 1


def test_a_role_without_configuration() -> None:
    h = serving()
    h.tell(ConfigGet(part=Role.TAP), src=ASKER, src_node=TAP)
    assert h.sent() == [(ASKER, ConfigFailed(error="there is no configuration for a tap"))]


@pytest.mark.spec("S1 10.2")
def test_a_wrong_configuration_is_served_as_such() -> None:
    h = harness(ConfigResolverActor(error="argument --x is unknown"))
    assert h.effects() == [Log("error", "argument --x is unknown")]
    h.tell(ConfigGet(part=Role.GATEWAY), src=ASKER, src_node=GATEWAY)
    assert h.sent() == [(ASKER, ConfigFailed(error="argument --x is unknown"))]
    h.tell(ConfigGet(part=Role.GATEWAY), src=ASKER, src_node=MEMBERSHIP)
    assert h.sent() == []


@pytest.mark.spec("S1 9.1")
@pytest.mark.parametrize("mid_run", [True, False])
def test_the_orchestrator_of_a_run_that_has_begun_is_told(mid_run: bool) -> None:
    """It has its slice and does not ask; others would wait for theirs in vain."""
    h = harness(ConfigResolverActor(error="changed", mid_run=mid_run))
    h.views.routes.apply(routes((b"o" * 32, Role.ORCHESTRATOR)))
    h.tell(ViewChanged("routes"))
    h.tell(ViewChanged("routes"))
    told = [message for _, message in h.sent() if isinstance(message, ServiceFailed)]
    assert told == ([ServiceFailed(service=Role.RESOLVER, phase="config", error="changed")] if mid_run else [])


def test_notes_are_said_once() -> None:
    h = harness(ConfigResolverActor(digest="d", slices=SLICES, notes=("a model was chosen",)))
    assert h.effects() == [Log("info", "a model was chosen")]


def test_it_is_ready_when_the_orchestrator_is_there_and_leaves_when_told() -> None:
    from common.effects import ViewChanged

    h = serving()
    h.views.routes.apply(routes((b"o" * 32, Role.ORCHESTRATOR)))
    h.tell(ViewChanged("routes"))
    assert h.sent() == [(bytes([1]) * 32, ServiceReady(service=Role.RESOLVER, boot=7))]
    h.tell(StopSignal("SIGTERM", 1))
    h.tell(OwnerGone())
    assert h.effects() == [Exit(0), Exit(0)]
