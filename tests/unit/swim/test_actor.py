"""SWIM on the actor runtime: identity, the verified sender, joining by route, pause by views, the owner's events."""

from __future__ import annotations

from typing import Any

import pytest

from common.actors import Inbox
from common.addresses import Role
from common.effects import Log, ViewChanged
from common.messages.bus import PathEntry, RouteEntry, Snapshot
from common.messages.member import (
    MemberId,
    NameRegister,
    NameRegistered,
    NameResolve,
    NameResolved,
    SwimAck,
    SwimGossip,
    SwimPing,
    SwimPushPull,
)
from common.swim.actor import Leave, SetMetadata, SwimActor
from common.swim.config import LAN
from common.swim.outputs import Left, NameChanged, Superseded, Transition, Updated
from tests.support.harness import NODE, Harness
from tests.unit.swim.playbook import BOOT, actor, facts, key

OWNER = b"owner".ljust(32, b"-")


class Agent(Harness):
    """A SwimActor with an owner's inbox, and a membership service called hub on the other side."""

    def __init__(self) -> None:
        super().__init__(SwimActor(logical_id="node 1", config=LAN, metadata={"node_id": "1"}, owner=OWNER))
        self.inbox = Inbox(Transition, Updated, NameChanged, Superseded, Left, NameRegistered, NameResolved)
        self.system.spawn(self.inbox, address=OWNER)

    def events(self, *kinds: type) -> list[Any]:
        return [event for _, event in self.inbox.drain() if not kinds or isinstance(event, kinds)]

    def of(self, kind: type) -> list[tuple[bytes, Any]]:
        return [(dst, message) for dst, message in self.sent() if isinstance(message, kind)]

    def route_hub(self, boot: int = BOOT) -> None:
        entry = RouteEntry(
            address=actor("hub"), node=key("hub"), boot=boot, generation=1, role=Role.MEMBERSHIP, name=Role.MEMBERSHIP
        )
        self.views.routes.apply(Snapshot(view="routes", version=1, items=[entry]))
        self.tell(ViewChanged("routes"))

    def path(self, up: bool) -> None:
        entry = PathEntry(broker=key("router"), next_hop=key("relay"), up=up)
        self.views.paths.apply(Snapshot(view="paths", version=1, items=[entry]))
        self.tell(ViewChanged("paths"))

    def answer_join(self) -> None:
        self.tell(SwimPushPull(sender=facts("hub"), updates=[], reply=True), src=actor("hub"), src_node=key("hub"))


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.mark.spec("S1 7.7", "S2 6.2")
def test_it_joins_at_the_routed_membership_service_with_its_own_facts(agent: Agent) -> None:
    agent.advance(2_000)
    assert agent.sent() == []
    agent.route_hub()
    agent.advance(2_100)
    offers = agent.of(SwimPushPull)
    assert [dst for dst, _ in offers] == [actor("hub")] * 3
    own = offers[0][1].sender
    assert (own.member, own.swim_actor) == (MemberId(node=NODE, boot=7), agent.address)
    assert (own.logical_id, own.role, own.metadata) == ("node 1", "agent", {"node_id": "1"})
    agent.answer_join()
    agent.sent()
    agent.advance(2_100)
    assert agent.of(SwimPushPull) == []


@pytest.mark.spec("S1 7.7")
def test_it_joins_again_when_the_membership_service_restarts(agent: Agent) -> None:
    agent.route_hub()
    agent.advance(0)
    agent.answer_join()
    agent.sent()
    agent.route_hub(boot=BOOT + 1)
    agent.advance(0)
    assert len(agent.of(SwimPushPull)) == 1


def test_a_member_speaks_only_for_itself(agent: Agent) -> None:
    ping = SwimPing(sequence=1, sender=facts("ann"), target=MemberId(node=NODE, boot=7))
    agent.tell(ping, src=actor("eve"), src_node=key("eve"))
    assert agent.of(SwimAck) == []
    agent.tell(ping, src=actor("ann"), src_node=key("ann"))
    assert [dst for dst, _ in agent.of(SwimAck)] == [actor("ann")]


@pytest.mark.spec("S1 7.7")
@pytest.mark.parametrize("how", ["own link", "a hop of the path"])
def test_it_pauses_while_a_link_is_down(agent: Agent, how: str) -> None:
    agent.tell(SwimGossip(updates=[facts("ann")]), src=actor("ann"), src_node=key("ann"))
    agent.advance(1_000)
    agent.sent()
    if how == "own link":
        agent.views.link_up = False
        agent.tell(ViewChanged("paths"))
    else:
        agent.path(up=False)
    agent.advance(60_000)
    assert agent.of(SwimPing) == []
    assert [event.to_state for event in agent.events(Transition)] == ["alive"]
    if how == "own link":
        agent.views.link_up = True  # noticed without a word, too
    else:
        agent.path(up=True)
    agent.advance(1_500)
    assert [dst for dst, _ in agent.of(SwimPing)][:1] == [actor("ann")]


def test_its_owner_hears_of_transitions_and_names(agent: Agent) -> None:
    agent.tell(SwimGossip(updates=[facts("ann"), facts("ann", "dead", by="bob")]), src_node=key("ann"))
    agent.tell(NameRegister(name="inference", address=OWNER), src=OWNER, src_node=NODE)
    agent.tell(NameResolve(name="inference"), src=OWNER, src_node=NODE)
    events = agent.events()
    seen = [(event.from_state, event.to_state) for event in events if isinstance(event, Transition)]
    assert seen == [("unknown", "alive"), ("alive", "dead")]
    assert NameRegistered(name="inference") in events
    assert NameResolved(name="inference", address=OWNER) in events
    assert [event.name for event in events if isinstance(event, NameChanged)] == ["inference"]


def test_other_nodes_cannot_make_it_leave_or_register_names(agent: Agent) -> None:
    for order in (Leave(), SetMetadata({}), NameRegister(name="x", address=OWNER), NameResolve(name="x")):
        agent.tell(order, src=actor("eve"), src_node=key("eve"))
    assert agent.sent() == []
    assert agent.events(Left) == []


def test_it_leaves_when_told_and_when_stopped(agent: Agent) -> None:
    agent.tell(SwimGossip(updates=[facts("ann")]), src_node=key("ann"))
    agent.sent()
    agent.tell(Leave(), src=OWNER, src_node=NODE)
    assert {update.state for _, gossip in agent.of(SwimGossip) for update in gossip.updates} == {"left"}
    agent.advance(LAN.leave_ms)
    assert agent.events(Left) == [Left()]

    stopped = Agent()
    stopped.tell(SwimGossip(updates=[facts("ann")]), src_node=key("ann"))
    stopped.sent()
    stopped.system.stop(stopped.address)
    stopped.run()
    assert {update.state for _, gossip in stopped.of(SwimGossip) for update in gossip.updates} == {"left"}


def test_new_metadata_is_spread(agent: Agent) -> None:
    agent.tell(SwimGossip(updates=[facts("ann")]), src_node=key("ann"))
    agent.tell(SetMetadata({"gpu": "H200"}), src=OWNER, src_node=NODE)
    agent.advance(300)
    told = [update.metadata for _, gossip in agent.of(SwimGossip) for update in gossip.updates]
    assert {"gpu": "H200"} in told


def test_a_superseded_process_says_so_once_and_is_silent(agent: Agent) -> None:
    newer = MemberId(node=NODE, boot=8)
    update = facts("ann")
    successor = SwimGossip(updates=[type(update)(**{**_fields(update), "member": newer})])
    for _ in range(2):
        agent.tell(successor, src_node=key("ann"))
    assert agent.events(Superseded) == [Superseded(8)]
    assert [type(effect) for effect in agent.effects()] == [Log]
    agent.sent()
    agent.advance(10_000)
    assert agent.sent() == []


def _fields(update: Any) -> dict[str, Any]:
    return {name: getattr(update, name) for name in update.__struct_fields__}
