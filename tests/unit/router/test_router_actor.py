"""The router's actor: who owns which address, who is admitted, and who hears of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.addresses import NO_RUN, Plane, Role
from common.broker import Admission, Broker, NodeBound, NodeGone
from common.effects import Exit, Log, OwnerGone, SendFailed, StopSignal
from common.limits import ADMIT_RESEND_MS, RESYNC_MS
from common.messages.bus import (
    Admit,
    Admitted,
    Delta,
    PathEntry,
    PeerDown,
    PeerUp,
    Register,
    Revoke,
    Revoked,
    RouteEntry,
    Snapshot,
    Unregister,
    Watch,
)
from services.router.core import RouterActor, UplinkChanged
from tests.support.harness import Harness

ROUTER, RELAY, GATEWAY, PROVISIONER, AGENT, OTHER = (letter * 32 for letter in (b"r", b"y", b"g", b"p", b"a", b"o"))
INBOX, STEP = b"i" * 32, b"s" * 32


class Routers:
    """The actor with its broker core; `tell` speaks as a node."""

    def __init__(self, *, relay: bool = False) -> None:
        roles = {GATEWAY: Role.GATEWAY, PROVISIONER: Role.PROVISIONER, OTHER: Role.AGENT, ROUTER: Role.ROUTER}
        self.broker = Broker(ROUTER, 5, Role.ROUTER, {key: Admission(role) for key, role in roles.items()})
        self.broker.relay_key = RELAY if relay else b""
        self.rig = Harness(RouterActor(self.broker, relay=relay), node=ROUTER)
        self.router = self.rig.actor

    def tell(self, msg: Any, source: bytes, src: bytes = b"") -> list[tuple[bytes, Any]]:
        self.rig.tell(msg, src=src or source, src_node=source)
        return self.rig.sent()

    def event(self, msg: Any) -> list[tuple[bytes, Any]]:
        self.rig.tell(msg)
        return self.rig.sent()

    def register(self, source: bytes, address: bytes, boot: int = 1, name: str = "") -> list[tuple[bytes, Any]]:
        return self.tell(Register(address=address, boot=boot, generation=1, name=name), source)

    def admit(self, key: bytes = AGENT) -> list[tuple[bytes, Any]]:
        return self.tell(admission(key), PROVISIONER)


def admission(key: bytes = AGENT, role: Role = Role.AGENT) -> Admit:
    return Admit(key=key, role=role, run=NO_RUN, node_id=2, stage_index=1, logical_id="node 2")


def route(address: bytes, node: bytes, role: Role, *, boot: int = 1, name: str = "") -> RouteEntry:
    return RouteEntry(address=address, node=node, boot=boot, generation=1, role=role, name=name)


# --- routes --------------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 6.2")
def test_a_registered_address_is_owned_and_everybody_who_watches_hears_of_it() -> None:
    routers = Routers()
    assert routers.tell(Watch(view="routes"), GATEWAY) == [(GATEWAY, Snapshot(view="routes", version=0, items=[]))]
    entry = route(INBOX, GATEWAY, Role.GATEWAY, name="prompt_gateway")
    said = routers.register(GATEWAY, INBOX, name="prompt_gateway")
    assert said == [(GATEWAY, Delta(view="routes", version=1, changed=[entry]))]
    assert routers.broker.owners == {INBOX: GATEWAY}
    assert routers.register(GATEWAY, INBOX, name="prompt_gateway") == [], "said again: nothing new"
    assert routers.tell(Watch(view="routes"), OTHER) == [(OTHER, Snapshot(view="routes", version=1, items=[entry]))]
    assert routers.tell(Watch(view="weather"), OTHER) == []


@pytest.mark.spec("S1 6.2")
def test_an_unregistered_address_has_no_owner() -> None:
    routers = Routers()
    routers.register(GATEWAY, INBOX)
    routers.tell(Watch(view="routes"), GATEWAY)
    assert routers.tell(Unregister(address=INBOX, generation=1), OTHER) == [], "not its own"
    assert routers.tell(Unregister(address=INBOX, generation=1), GATEWAY) == [
        (GATEWAY, Delta(view="routes", version=2, removed=[INBOX], reason="unregistered"))
    ]
    assert routers.broker.owners == {}


def test_another_nodes_address_cannot_be_claimed() -> None:
    routers = Routers()
    routers.register(GATEWAY, INBOX)
    routers.register(OTHER, INBOX)
    assert routers.broker.owners == {INBOX: GATEWAY}
    assert [effect.level for effect in routers.rig.effects() if isinstance(effect, Log)] == ["warning"]


@pytest.mark.parametrize("name", ["orchestrator", "membership", "prompt_gateway "])
def test_a_name_belongs_to_its_role(name: str) -> None:
    routers = Routers()
    routers.register(GATEWAY, INBOX, name=name)
    (item,) = routers.tell(Watch(view="routes"), OTHER)[0][1].items
    assert item.name == ""


def test_who_is_not_admitted_registers_nothing() -> None:
    routers = Routers()
    routers.register(b"?" * 32, INBOX)
    assert routers.broker.owners == {}


def test_a_newer_incarnation_ends_the_routes_of_the_older_at_once() -> None:
    routers = Routers()
    routers.register(GATEWAY, INBOX, boot=3)
    routers.tell(Watch(view="routes"), OTHER)
    routers.tell(Watch(view="routes"), GATEWAY)
    assert routers.event(NodeBound(GATEWAY, 4, Role.GATEWAY)) == [
        (OTHER, Delta(view="routes", version=2, removed=[INBOX], reason="superseded"))
    ], "the older incarnation watches no more"
    assert routers.register(GATEWAY, STEP, boot=3) == [], "what it said before its end comes too late"
    routers.register(GATEWAY, STEP, boot=4)
    assert routers.broker.owners == {STEP: GATEWAY}


def test_goodbye_ends_routes_and_silence_does_not() -> None:
    routers = Routers()
    routers.register(GATEWAY, INBOX, boot=3)
    routers.register(OTHER, STEP, boot=3)
    routers.event(NodeGone(OTHER, 3, "silent"))
    assert routers.broker.owners == {INBOX: GATEWAY, STEP: OTHER}
    routers.event(NodeGone(OTHER, 2, "goodbye"))
    assert STEP in routers.broker.owners, "an older incarnation's goodbye"
    routers.event(NodeGone(OTHER, 3, "goodbye"))
    assert routers.broker.owners == {INBOX: GATEWAY}


def test_a_watcher_that_missed_something_gets_the_whole_view_when_it_can_be_reached() -> None:
    routers = Routers()
    routers.tell(Watch(view="routes"), OTHER)
    ((_, delta),) = routers.register(GATEWAY, INBOX)
    routers.event(SendFailed(OTHER, delta, "unroutable"))
    routers.register(GATEWAY, STEP)
    assert routers.rig.sent() == [], "nothing piles up for it meanwhile"
    routers.rig.advance(RESYNC_MS)
    ((to, snapshot),) = routers.rig.sent()
    assert to == OTHER and isinstance(snapshot, Snapshot) and len(snapshot.items) == 2
    routers.event(SendFailed(OTHER, snapshot, "unroutable"))
    routers.rig.advance(RESYNC_MS)
    assert len(routers.rig.sent()) == 1, "again and again"
    routers.event(SendFailed(OTHER, snapshot, "unroutable"))
    routers.event(NodeGone(OTHER, 1, "silent"))
    routers.rig.advance(10 * RESYNC_MS)
    assert routers.rig.sent() == [], "but not for one that is gone: it watches again when it is back"


# --- admission -----------------------------------------------------------------------------------------------------
def test_an_admitted_key_may_join_and_a_revoked_one_is_out_with_its_routes() -> None:
    routers = Routers()
    assert routers.admit() == [(PROVISIONER, Admitted(key=AGENT))]
    assert routers.broker.admits(AGENT) and routers.broker.admitted[AGENT].node_id == 2
    routers.register(AGENT, STEP)
    routers.tell(Watch(view="routes"), GATEWAY)
    said = routers.tell(Revoke(key=AGENT), PROVISIONER)
    assert said == [
        (GATEWAY, Delta(view="routes", version=2, removed=[STEP], reason="revoked")),
        (PROVISIONER, Revoked(key=AGENT)),
    ]
    assert not routers.broker.admits(AGENT)
    assert routers.tell(Revoke(key=AGENT), PROVISIONER) == [(PROVISIONER, Revoked(key=AGENT))], "idempotent"
    # Its Hello was on its way to us when it was revoked: nothing is kept of it.
    assert routers.event(NodeBound(AGENT, 9, Role.AGENT)) == []


@pytest.mark.parametrize("role", [Role.ROUTER, Role.RELAY, Role.ORCHESTRATOR, Role.TAP])
def test_only_workers_are_admitted_at_run_time(role: Role) -> None:
    routers = Routers()
    assert routers.tell(admission(role=role), PROVISIONER) == []
    assert not routers.broker.admits(AGENT)


def test_a_static_key_cannot_be_revoked() -> None:
    routers = Routers()
    routers.tell(Revoke(key=GATEWAY), PROVISIONER)
    assert routers.broker.admits(GATEWAY)


# --- the relay -----------------------------------------------------------------------------------------------------
def up(routers: Routers, boot: int = 9) -> list[tuple[bytes, Any]]:
    return routers.event(UplinkChanged(RELAY, boot))


def test_admission_is_confirmed_when_the_relay_knows_it_and_repeated_until_then() -> None:
    routers = Routers(relay=True)
    assert routers.admit() == [], "the relay is not there yet"
    assert routers.broker.admits(AGENT)
    assert up(routers)[0] == (RELAY, admission())
    routers.rig.advance(ADMIT_RESEND_MS)
    assert routers.rig.sent() == [(RELAY, admission())]
    assert routers.tell(Admitted(key=AGENT), RELAY) == [(PROVISIONER, Admitted(key=AGENT))]
    routers.rig.advance(10 * ADMIT_RESEND_MS)
    assert routers.rig.sent() == []


def test_a_restarted_relay_is_told_every_admission_again() -> None:
    routers = Routers(relay=True)
    up(routers, 9)
    for key in (AGENT, b"b" * 32):
        routers.admit(key)
        routers.tell(Admitted(key=key), RELAY)
    up(routers, 0)
    assert up(routers, 9) == [(RELAY, admission(AGENT)), (RELAY, admission(b"b" * 32))]
    up(routers, 0)
    assert {msg.key for _, msg in up(routers, 10) if isinstance(msg, Admit)} == {AGENT, b"b" * 32}


def test_revocation_reaches_the_relay_before_it_is_confirmed() -> None:
    routers = Routers(relay=True)
    up(routers)
    routers.admit()
    routers.tell(Admitted(key=AGENT), RELAY)
    routers.event(PeerUp(node=AGENT, boot=1, role=Role.AGENT))
    assert routers.tell(Revoke(key=AGENT), PROVISIONER) == [(RELAY, Revoke(key=AGENT))]
    assert AGENT not in routers.broker.beyond
    assert routers.tell(Revoked(key=AGENT), RELAY) == [(PROVISIONER, Revoked(key=AGENT))]
    routers.event(PeerUp(node=AGENT, boot=1, role=Role.AGENT))
    assert AGENT not in routers.broker.beyond, "the relay's word about a revoked key counts nothing"


def test_what_the_relay_says_of_a_worker_before_its_admission_is_kept() -> None:
    """A restarted router hears of the workers from the relay first and only then from the provisioner."""
    routers = Routers(relay=True)
    routers.event(PeerUp(node=AGENT, boot=4, role=Role.AGENT))
    routers.event(PeerUp(node=b"b" * 32, boot=4, role=Role.AGENT))
    routers.event(PeerDown(node=b"b" * 32, boot=4, reason="silent"))
    assert routers.broker.beyond == set()
    routers.admit()
    routers.admit(b"b" * 32)
    assert routers.broker.beyond == {AGENT}
    routers.register(AGENT, STEP, boot=3)
    assert STEP not in routers.broker.owners
    routers.register(AGENT, STEP, boot=4)
    assert routers.broker.owners == {STEP: AGENT}


def test_peers_come_and_go_beyond_the_relay() -> None:
    routers = Routers(relay=True)
    routers.admit()
    routers.event(PeerUp(node=AGENT, boot=4, role=Role.AGENT))
    routers.register(AGENT, STEP, boot=4)
    routers.event(PeerDown(node=AGENT, boot=3, reason="goodbye"))
    assert AGENT in routers.broker.beyond, "an older incarnation's end"
    routers.event(PeerDown(node=AGENT, boot=4, reason="silent"))
    assert AGENT not in routers.broker.beyond and STEP in routers.broker.owners
    routers.event(PeerUp(node=AGENT, boot=4, role=Role.AGENT))
    routers.event(PeerDown(node=AGENT, boot=4, reason="goodbye"))
    assert routers.broker.owners == {}


def test_the_path_to_the_relay_is_a_view() -> None:
    routers = Routers(relay=True)
    routers.tell(Watch(view="paths"), OTHER)
    entry = PathEntry(broker=routers.rig.address, next_hop=RELAY, up=True)
    assert up(routers)[-1] == (OTHER, Delta(view="paths", version=1, changed=[entry]))
    ((_, down),) = up(routers, 0)
    assert [item.up for item in down.changed] == [False]


def test_it_ends_with_its_owner_or_a_signal() -> None:
    for event in (OwnerGone(), StopSignal("SIGTERM", 1)):
        routers = Routers()
        routers.event(event)
        assert routers.rig.effects() == [Exit(0)]


@pytest.mark.spec("S1 7.7")
def test_what_passed_is_counted_and_told_to_the_collector() -> None:
    routers = Routers()
    collector = b"c" * 32
    routers.broker.admitted[collector] = Admission(Role.COLLECTOR)
    routers.broker.passed.update({(Plane.PROMPT, "forwarded"): 3, (Plane.PROMPT, "full"): 1})
    routers.rig.advance(60_000)
    assert routers.rig.sent() == [], "nobody to tell"
    routers.register(collector, INBOX, name="datastream_collector")
    routers.rig.advance(1000)
    ((dst, observe),) = routers.rig.sent()
    (record,) = observe.records
    assert (dst, record.producer_seq, record.channel) == (INBOX, 1, "mvp.bus.envelopes")
    assert json.loads(record.payload) == {"broker": "router", "passed": {"prompt": {"forwarded": 3, "full": 1}}}
    routers.rig.advance(10_000)
    assert [observe.records[0].producer_seq for _, observe in routers.rig.sent()] == [2]
    routers.tell(Unregister(address=INBOX, generation=1), collector)
    routers.rig.advance(60_000)
    assert routers.rig.sent() == []
