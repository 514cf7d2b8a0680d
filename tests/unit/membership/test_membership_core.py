"""The membership service: views, transitions, records, names; a SWIM member beside it (S1 4.6, 7.7, 8.3, S2 6.2)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.addresses import Role
from common.config_slices import MembershipSlice, encode_slice
from common.effects import Exit, Log, SendFailed, StopSignal, ViewChanged
from common.limits import RESYNC_MS
from common.messages.bus import Delta, MemberEntry, RouteEntry, Snapshot, Watch
from common.messages.config import ConfigSlice
from common.messages.member import (
    MemberChanged,
    NameRegister,
    NameRegistered,
    NameResolve,
    NameResolved,
    SwimGossip,
    SwimPing,
    SwimPushPull,
)
from common.messages.service import RunEnded, ServiceReady
from services.membership.core import WATCHERS_MAX, MembershipActor
from tests.support.harness import NODE, Harness
from tests.unit.swim.playbook import BOOT, actor, facts, key, replaced

WATCHER = key("watcher")
ORCHESTRATOR = key("orchestrator actor")


class Membership(Harness):
    def __init__(self, profile: str = "lan", *, orchestrator: bool = True, configured: bool = True) -> None:
        super().__init__(MembershipActor(), name=Role.MEMBERSHIP)
        self.routes: list[Any] = []
        if orchestrator:
            self.route(ORCHESTRATOR, "orchestrator", Role.ORCHESTRATOR)
        if configured:
            self.configure(profile)

    def configure(self, profile: str) -> None:
        slice_json = encode_slice(MembershipSlice(profile=profile))
        self.tell(ConfigSlice(part=Role.MEMBERSHIP, digest="d", slice_json=slice_json))

    def route(self, address: bytes, node: str, role: Role, boot: int = BOOT) -> None:
        name = "" if role is Role.AGENT else role
        entry = RouteEntry(address=address, node=key(node), boot=boot, generation=1, role=role, name=name)
        self.routes = [*(route for route in self.routes if route.address != address), entry]
        self.views.routes.apply(Snapshot(view="routes", version=len(self.routes), items=self.routes))
        self.tell(ViewChanged("routes"))

    def hear(self, *updates: Any, sender: str = "ann") -> None:
        self.tell(SwimGossip(updates=list(updates)), src=actor(sender), src_node=key(sender))

    def join(self, name: str, **more: Any) -> None:
        offer = SwimPushPull(sender=facts(name, **more), updates=[])
        self.tell(offer, src=actor(name), src_node=key(name))

    def of(self, kind: type, to: bytes | None = None) -> list[Any]:
        return [message for dst, message in self.sent() if isinstance(message, kind) and to in (None, dst)]

    def watch(self, view: str, who: bytes = WATCHER) -> Snapshot:
        self.tell(Watch(view=view), src=who, src_node=who)
        (snapshot,) = self.of(Snapshot, who)
        assert isinstance(snapshot, Snapshot)
        return snapshot


@pytest.fixture
def service() -> Membership:
    return Membership()


# --- life -----------------------------------------------------------------------------------------------------
def test_it_is_ready_with_its_slice() -> None:
    service = Membership()
    assert service.of(ServiceReady, ORCHESTRATOR) == [ServiceReady(service="membership", boot=7)]


def test_before_its_slice_it_is_no_member() -> None:
    service = Membership(configured=False)
    service.join("ann")
    service.tell(NameResolve(name="x"), src=WATCHER, src_node=WATCHER)
    assert service.of(SwimPushPull) == []
    assert service.watch("members").items == []


def test_an_unknown_profile_is_one_clear_line() -> None:
    service = Membership("mars")
    (line,) = [effect for effect in service.effects() if isinstance(effect, Log)]
    assert line.text == "no membership profile 'mars'; known: lan, wan"
    assert service.of(ServiceReady) == []


@pytest.mark.spec("S1 7.7")
def test_a_joiner_is_answered_at_the_well_known_address(service: Membership) -> None:
    service.hear(facts("bob"))
    service.sent()
    service.join("ann")
    (answer,) = service.of(SwimPushPull, actor("ann"))
    assert answer.reply
    assert answer.sender.swim_actor == service.address
    assert [update.logical_id for update in answer.updates] == ["bob", "ann"]


def test_it_leaves_at_a_stop(service: Membership) -> None:
    service.join("ann")
    service.sent()
    service.tell(StopSignal("SIGTERM", 1))
    assert any(update.state == "left" for gossip in service.of(SwimGossip) for update in gossip.updates)
    assert Exit(0) in service.effects()


# --- the member view ------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 4.6", "S1 7.7", "S1 9.5")
def test_a_watcher_gets_the_whole_view_and_then_each_change(service: Membership) -> None:
    snapshot = service.watch("members")
    assert [(item.node, item.state) for item in snapshot.items if isinstance(item, MemberEntry)] == [(NODE, "alive")]
    service.join("ann")
    (delta,) = service.of(Delta, WATCHER)
    (entry,) = delta.changed
    assert (entry.node, entry.boot, entry.state, entry.reason) == (key("ann"), BOOT, "alive", "joined")
    assert delta.version == snapshot.version + 1
    service.hear(facts("ann", "suspect", by="bob"))
    service.hear(facts("ann", incarnation=1))
    service.hear(facts("ann", "dead", 1, by="bob"))
    changes = [delta.changed[0] for delta in service.of(Delta, WATCHER)]
    assert [(entry.state, entry.incarnation) for entry in changes] == [("suspect", 0), ("alive", 1), ("dead", 1)]
    assert changes[1].reason == "refuted"


@pytest.mark.spec("S1 7.7")
def test_a_silent_worker_is_seen_dead_within_seven_seconds(service: Membership) -> None:
    service.watch("members")
    service.join("ann")
    service.sent()
    service.advance(7_000)
    states = [delta.changed[0].state for delta in service.of(Delta, WATCHER)]
    assert states == ["suspect", "dead"]


@pytest.mark.spec("S1 7.7")
def test_a_new_boot_replaces_the_old_entry(service: Membership) -> None:
    service.join("ann")
    service.watch("members")
    service.join("ann", boot=BOOT + 1)
    changed = [entry for delta in service.of(Delta, WATCHER) for entry in delta.changed]
    assert [(entry.boot, entry.state) for entry in changed] == [(BOOT + 1, "alive")]


@pytest.mark.spec("S2 6.2")
def test_metadata_changes_are_published_and_keep_the_reason(service: Membership) -> None:
    service.join("ann")
    service.watch("members")
    service.hear(replaced(facts("ann", incarnation=1), metadata={"gpu": "H200"}))
    ((entry,),) = [delta.changed for delta in service.of(Delta, WATCHER)]
    assert (entry.metadata, entry.reason, entry.incarnation) == ({"gpu": "H200"}, "joined", 1)


def test_the_role_is_the_routers_word_else_the_claim_else_agent(service: Membership) -> None:
    service.route(actor("bob"), "bob", Role.AGENT)
    service.hear(facts("ann"), replaced(facts("bob"), role="orchestrator"), replaced(facts("cid"), role="king"))
    roles = {entry.logical_id: entry.role for entry in service.watch("members").items if isinstance(entry, MemberEntry)}
    assert roles == {"membership": "membership", "ann": "agent", "bob": "agent", "cid": "agent"}


def test_a_watcher_that_cannot_be_reached_is_dropped(service: Membership) -> None:
    service.watch("members")
    service.join("ann")
    (delta,) = service.of(Delta, WATCHER)
    service.tell(SendFailed(WATCHER, delta, "peer_lost"))
    service.join("bob")
    assert service.of(Delta) == []
    assert len(service.watch("members").items) == 3, "it may watch again"


def test_a_watcher_that_missed_an_update_gets_the_whole_view(service: Membership) -> None:
    service.watch("members")
    service.join("ann")
    (delta,) = service.of(Delta, WATCHER)
    route = RouteEntry(address=b"x" * 32, node=WATCHER, boot=1, generation=1, role=Role.GATEWAY)
    service.views.routes.apply(Snapshot(view="routes", version=1, items=[route]))
    service.tell(SendFailed(WATCHER, delta, "unroutable"))
    service.join("bob")
    assert service.of(Delta) == []
    service.advance(RESYNC_MS)
    (snapshot,) = service.of(Snapshot, WATCHER)
    assert len(snapshot.items) == 3
    service.join("cid")
    assert len(service.of(Delta, WATCHER)) == 1, "it watches again"


def test_watchers_are_limited_and_foreign_views_are_not_ours(service: Membership) -> None:
    for number in range(WATCHERS_MAX + 5):
        service.tell(Watch(view="members"), src=number.to_bytes(32, "big"), src_node=NODE)
    assert len(service.of(Snapshot)) == WATCHERS_MAX
    service.tell(Watch(view="routes"), src=WATCHER, src_node=WATCHER)
    assert service.of(Snapshot) == []


@pytest.mark.spec("S1 7.7")
def test_after_the_run_the_departed_are_removed(service: Membership) -> None:
    service.join("ann")
    service.join("bob")
    service.hear(facts("ann", "left"))
    service.watch("members")
    service.tell(RunEnded(status=0))
    assert [delta.removed for delta in service.of(Delta, WATCHER)] == [[key("ann")]]
    service.hear(facts("bob", "left"))
    assert service.of(Delta, WATCHER)[0].changed[0].state == "left"


# --- transitions ----------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 8.3", "S1 8.4", "S1 3.9")
def test_each_transition_is_a_record_and_a_message_to_the_orchestrator(service: Membership) -> None:
    service.sent()
    service.hear(replaced(facts("ann"), metadata={"node_id": "3", "run_id": "2"}))
    service.hear(facts("ann", "suspect", by="bob"))
    messages = service.of(MemberChanged, ORCHESTRATOR)
    assert [(message.peer, message.from_state, message.to_state) for message in messages] == [
        (key("ann"), "unknown", "alive"),
        (key("ann"), "alive", "suspect"),
    ]
    records = service.observed()
    assert {record.channel for record in records} == {"mvp.swim.membership"}
    assert json.loads(records[0].payload) == {
        "type": "OrchBootstrap",
        "phase": "membership_transition",
        "status": "observed",
        "run_id": 2,
        "node_id": 3,
        "detail": {
            "peer": key("ann")[:8].hex(),
            "logical_id": "ann",
            "boot": BOOT,
            "incarnation": 0,
            "from": "unknown",
            "to": "alive",
            "reason": "joined",
        },
    }
    second = json.loads(records[1].payload)
    assert (second["detail"]["from"], second["detail"]["to"]) == ("alive", "suspect")
    assert second["detail"]["reason"] == f"suspected by {key('bob')[:8].hex()}"
    assert (second["run_id"], second["node_id"]) == (1, 1), "a member that says nothing of its ids"


def test_a_superseded_boot_is_reported_dead_before_the_new_one_is_alive(service: Membership) -> None:
    service.join("ann")
    service.sent()
    service.join("ann", boot=BOOT + 1)
    told = [(message.boot, message.to_state) for message in service.of(MemberChanged, ORCHESTRATOR)]
    assert told == [(BOOT, "dead"), (BOOT + 1, "alive")]


def test_a_late_orchestrator_hears_where_everybody_stands() -> None:
    service = Membership(orchestrator=False)
    service.join("ann")
    service.hear(facts("ann", "suspect", by="bob"))
    assert service.of(MemberChanged) == []
    service.route(ORCHESTRATOR, "orchestrator", Role.ORCHESTRATOR)
    (message,) = service.of(MemberChanged, ORCHESTRATOR)
    assert (message.from_state, message.to_state) == ("unknown", "suspect")
    service.tell(ViewChanged("routes"))
    assert service.of(MemberChanged) == []
    service.route(ORCHESTRATOR, "orchestrator", Role.ORCHESTRATOR, boot=BOOT + 1)
    assert len(service.of(MemberChanged, ORCHESTRATOR)) == 1


def test_odd_ids_in_metadata_do_no_harm(service: Membership) -> None:
    service.hear(replaced(facts("ann"), metadata={"node_id": "-1", "run_id": "9" * 50}))
    record = json.loads(service.observed()[0].payload)
    assert (record["run_id"], record["node_id"]) == (1, 1)


# --- names ----------------------------------------------------------------------------------------------------
@pytest.mark.spec("S2 6.2")
def test_a_name_is_registered_for_the_asker_resolved_and_published(service: Membership) -> None:
    service.join("ann")
    assert service.watch("names").items == []
    service.tell(NameRegister(name="inference", address=actor("bridge")), src=actor("ann"), src_node=key("ann"))
    sent = service.sent()
    assert (actor("ann"), NameRegistered(name="inference")) in sent
    (delta,) = [message for dst, message in sent if isinstance(message, Delta) and dst == WATCHER]
    assert (delta.changed[0].name, delta.changed[0].address, delta.changed[0].node) == (
        "inference",
        actor("bridge"),
        key("ann"),
    )
    service.tell(NameResolve(name="inference"), src=WATCHER, src_node=WATCHER)
    assert service.of(NameResolved) == [NameResolved(name="inference", address=actor("bridge"))]
    service.tell(NameResolve(name="nothing"), src=WATCHER, src_node=WATCHER)
    assert service.of(NameResolved) == [NameResolved(name="nothing")]


@pytest.mark.spec("S2 6.2")
def test_the_name_of_a_dead_worker_resolves_to_nothing(service: Membership) -> None:
    service.join("ann")
    service.tell(NameRegister(name="inference", address=actor("bridge")), src=actor("ann"), src_node=key("ann"))
    service.watch("names")
    service.hear(facts("ann", "dead", by="bob"))
    assert [delta.removed for delta in service.of(Delta, WATCHER) if delta.view == "names"] == [[b"inference"]]
    service.tell(NameResolve(name="inference"), src=WATCHER, src_node=WATCHER)
    assert service.of(NameResolved) == [NameResolved(name="inference")]


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_what_is_no_name_is_not_registered(service: Membership, name: str) -> None:
    service.tell(NameRegister(name=name, address=actor("x")), src=actor("ann"), src_node=key("ann"))
    assert service.of(NameRegistered) == []


# --- the link -------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 7.7")
def test_while_its_own_link_is_down_nobody_dies(service: Membership) -> None:
    service.join("ann")
    service.watch("members")
    service.views.link_up = False
    service.tell(ViewChanged("paths"))
    service.advance(120_000)
    assert service.of(Delta) == []
    assert service.of(SwimPing) == []
    service.views.link_up = True
    service.tell(ViewChanged("paths"))
    service.advance(7_500)
    assert [delta.changed[0].state for delta in service.of(Delta, WATCHER)] == ["suspect", "dead"]
