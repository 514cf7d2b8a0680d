"""The node: where a message goes, what becomes of it when nobody is there, how it follows routers and publishers."""

from __future__ import annotations

import pytest

from common.addresses import Plane, Role
from common.codec import tag_of
from common.envelope import Envelope
from common.limits import (
    ENVELOPE_BYTES_MAX,
    HELD_MESSAGES_MAX,
    OWN_RETRY_MS,
    UNROUTABLE_HOLD_MS,
)
from common.messages.bus import (
    Ack,
    Delta,
    Goodbye,
    Hello,
    MemberEntry,
    NoSuchActor,
    Pong,
    Register,
    RouteEntry,
    Snapshot,
    StaleRoute,
    Undeliverable,
    Unregister,
    Unsupported,
    Watch,
)
from common.messages.node_agent import DecodeTokens
from common.messages.prompt import TextDelta, TokensDecoded
from tests.sim.bus_world import key_of
from tests.unit.bus.rig import ROUTER, Lone, Rig, Taker, messages

C, P, S = Plane.CONTROL, Plane.PROMPT, Plane.STREAM
PEER, ACTOR, OTHER = b"p" * 32, b"t" * 32, b"o" * 32
MEMBERSHIP = b"m" * 32


def note(number: int, text: str = "") -> TokensDecoded:
    return TokensDecoded(request_id=number, text=text)


def route(
    address: bytes = ACTOR, node: bytes = PEER, boot: int = 3, name: str = "", role: Role = Role.AGENT
) -> RouteEntry:
    return RouteEntry(address=address, node=node, boot=boot, generation=1, role=role, name=name)


def ready(*routes: RouteEntry) -> Lone:
    """A node that is bound, registered and knows these routes."""
    lone = Lone()
    lone.tick()
    lone.welcome()
    lone.tick()
    lone.give(C, Snapshot(view="routes", version=1, items=list(routes)), seq=1, ack=10)
    lone.tick()
    return lone


def sent(frames: list[tuple[Plane, Envelope]], tag: type) -> list[Envelope]:
    return [envelope for _, envelope in frames if envelope.tag == tag_of(tag)]


def stream(lone: Lone, src: bytes, *numbers: int) -> list[Envelope]:
    for number in numbers:
        lone.node.system.post(ACTOR, note(number), src=src)
    return sent(lone.tick(), TokensDecoded)


# --- joining -------------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 6.2")
def test_it_registers_its_actors_and_watches_the_routes_when_it_is_bound() -> None:
    lone = Lone()
    mine = lone.node.spawn(Taker(TextDelta), "prompt_gateway")
    assert messages(lone.tick(), Register, Watch) == []
    lone.welcome()
    frames = lone.tick()
    assert [(one.address, one.name) for one in messages(frames, Register)] == [(mine, "prompt_gateway")]
    assert messages(frames, Watch) == [Watch(view="routes")]
    late = lone.node.spawn(Taker(TextDelta))
    assert [one.address for one in messages(lone.tick(), Register)] == [late]
    lone.node.system.stop(late)
    assert [one.address for one in messages(lone.tick(), Unregister)] == [late]


def test_another_boot_of_the_router_hears_everything_again() -> None:
    lone = ready()
    mine = lone.node.spawn(Taker(TextDelta))
    lone.tick()
    lone.router_boot = 6
    lone.give(C, Pong(broker_boot=1, router_boot=6), src_node=lone.broker, src_boot=0)
    assert len(messages(lone.tick(), Hello)) == 1
    lone.welcome(C)
    frames = lone.tick()
    assert [one.address for one in messages(frames, Register)] == [mine]
    assert messages(frames, Watch) == [Watch(view="routes")]
    assert {envelope.dst_boot for envelope in sent(frames, Register)} == {6}


def test_after_a_break_of_the_link_it_watches_again() -> None:
    """The publisher may have given up on it meanwhile, and would never say so."""
    lone = ready(route(MEMBERSHIP, MEMBERSHIP, name="membership", role=Role.MEMBERSHIP))
    lone.node.spawn(Taker(views=("members",)))
    assert messages(lone.tick(), Watch) == [Watch(view="members")]
    lone.give(C, Snapshot(view="members", version=4, items=[]), src_node=MEMBERSHIP, src_boot=3, seq=1)
    lone.tick(4000)
    lone.welcome(C)
    frames = lone.tick()
    again = sent(frames, Watch)
    assert {one.view for one in messages(frames, Watch)} == {"routes", "members"}
    assert lone.node.views.members.known, "the same publisher: what is known stays"
    assert again


# --- routing -------------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 6.2", "S1 6.11")
def test_a_send_goes_to_the_node_that_hosts_the_actor() -> None:
    rig = Rig(relay=True)
    mine, theirs = Taker(TokensDecoded), Taker(DecodeTokens)
    me = rig.spawn(Role.GATEWAY, mine)
    worker = rig.spawn("agent 0", theirs)
    rig.say(Role.GATEWAY, me, worker, DecodeTokens(request_id=1, tokens=[5], reply_to=me))
    rig.run(1000)
    assert [one.tokens for one in theirs.got] == [[5]]
    owner = rig.member(Role.GATEWAY).node.views.routes.owner(worker)
    assert owner is not None and (owner.node, owner.role) == (key_of("agent 0"), Role.AGENT)
    rig.say("agent 0", worker, me, note(1))
    rig.run(1000)
    assert [one.request_id for one in mine.got] == [1] and mine.failed == theirs.failed == []


def test_who_wrote_to_us_can_be_answered_without_a_route() -> None:
    lone = ready()
    mine = Taker(TextDelta)
    me = lone.node.spawn(mine)
    lone.give(P, TextDelta(request_id=1, text="x"), src_node=PEER, src_boot=8, src=OTHER, dst=me, seq=1)
    lone.tick()
    lone.node.system.post(OTHER, note(1), src=me)
    (envelope,) = sent(lone.tick(), TokensDecoded)
    assert (envelope.dst_node, envelope.dst_boot, envelope.dst) == (PEER, 8, OTHER)
    assert [one.text for one in mine.got] == ["x"]


@pytest.mark.spec("S1 6.11", "S1 10.12")
def test_what_has_no_route_is_held_5_s_and_then_fails() -> None:
    lone = ready()
    mine = Taker()
    me = lone.node.spawn(mine)
    assert stream(lone, me, 1) == []
    lone.tick(UNROUTABLE_HOLD_MS - 1)
    assert mine.failed == [] and lone.node.unsettled
    assert lone.node.next_deadline() is not None
    lone.tick(1)
    lone.tick()
    assert [reason for _, reason in mine.failed] == ["unroutable"]


def test_held_messages_leave_in_order_before_later_ones() -> None:
    lone = ready()
    me = lone.node.spawn(Taker())
    stream(lone, me, 1, 2)
    lone.give(C, Delta(view="routes", version=2, changed=[route()]), seq=2)
    numbers = [envelope.plane_seq for envelope in stream(lone, me, 3)]
    assert numbers == [1, 2, 3]
    assert lone.node.unsettled


def test_no_more_is_held_than_a_queue_holds() -> None:
    lone = ready()
    mine = Taker()
    me = lone.node.spawn(mine)
    stream(lone, me, *range(HELD_MESSAGES_MAX + 5))
    lone.tick()
    assert [reason for _, reason in mine.failed] == ["queue_full"] * 5


def test_a_route_older_than_its_node_holds_until_the_newer_one_is_there() -> None:
    lone = ready(route(boot=3))
    mine = Taker(TextDelta)
    me = lone.node.spawn(mine)
    lone.give(P, TextDelta(request_id=1, text="x"), src_node=PEER, src_boot=9, src=OTHER, dst=me, seq=1)
    assert stream(lone, me, 1) == []
    assert lone.node.next_deadline() != lone.now, "it waits, it does not spin"
    lone.give(C, Delta(view="routes", version=2, changed=[route(boot=9)]), seq=2)
    assert [envelope.dst_boot for envelope in sent(lone.tick(), TokensDecoded)] == [9]


def test_a_newer_incarnation_in_the_routes_ends_what_was_for_the_older() -> None:
    lone = ready(route(boot=3))
    mine = Taker()
    me = lone.node.spawn(mine)
    stream(lone, me, 1, 2)
    lone.give(C, Delta(view="routes", version=2, changed=[route(boot=4)]), seq=2)
    lone.tick()
    assert [(message.request_id, reason) for message, reason in mine.failed] == [(1, "peer_lost"), (2, "peer_lost")]  # type: ignore[attr-defined]
    assert [envelope.dst_boot for envelope in stream(lone, me, 3)] == [4]


@pytest.mark.spec("S1 6.2", "S1 10.12")
def test_what_was_sent_to_a_revoked_node_fails_at_once() -> None:
    """And what is sent later, too: its key never comes back. A goodbye may be that of a restart."""
    lone = ready(route())
    mine = Taker()
    me = lone.node.spawn(mine)
    stream(lone, me, 1)
    lone.give(C, Delta(view="routes", version=2, removed=[ACTOR], reason="revoked"), seq=2)
    lone.tick()
    assert [reason for _, reason in mine.failed] == ["unroutable"]
    assert stream(lone, me, 2) == []
    lone.tick()
    assert [reason for _, reason in mine.failed] == ["unroutable", "unroutable"]


def test_what_was_sent_to_a_node_that_said_goodbye_waits_for_its_next_life() -> None:
    lone = ready(route())
    mine = Taker()
    me = lone.node.spawn(mine)
    stream(lone, me, 1)
    lone.give(C, Delta(view="routes", version=2, removed=[ACTOR], reason="goodbye"), seq=2)
    lone.tick()
    assert mine.failed == []


def test_an_envelope_larger_than_a_frame_may_be_is_refused_here() -> None:
    lone = ready(route())
    mine = Taker()
    me = lone.node.spawn(mine)
    lone.node.system.post(ACTOR, note(1, "x" * ENVELOPE_BYTES_MAX), src=me)
    lone.tick()
    lone.tick()
    assert [reason for _, reason in mine.failed] == ["refused"]


# --- what brokers and peers answer -----------------------------------------------------------------------------------
def test_no_such_actor_fails_the_message_although_it_is_acknowledged() -> None:
    lone = ready(route())
    mine = Taker()
    me = lone.node.spawn(mine)
    first, second = stream(lone, me, 1, 2)
    gone = NoSuchActor(address=ACTOR)
    lone.give(P, gone, src_node=PEER, src_boot=3, corr=first.id, ack=1)
    lone.give(P, gone, src_node=PEER, src_boot=3, corr=first.id, ack=1)
    lone.tick()
    assert [(message.request_id, reason) for message, reason in mine.failed] == [(1, "unroutable")]  # type: ignore[attr-defined]
    lone.give(P, Unsupported(unknown_tag=1), src_node=PEER, src_boot=3, corr=second.id, ack=2)
    lone.tick()
    assert [reason for _, reason in mine.failed] == ["unroutable", "unsupported"]
    session = lone.node._sessions.known(PEER, P)
    assert session is not None and session.outstanding == 0


def test_a_refusal_fails_one_message() -> None:
    lone = ready(route())
    mine = Taker()
    me = lone.node.spawn(mine)
    first, _ = stream(lone, me, 1, 2)
    refused = Undeliverable(reason="refused", dst_node=PEER)
    lone.give(P, refused, src_node=lone.broker, src_boot=0, corr=first.id)
    lone.tick()
    assert [(message.request_id, reason) for message, reason in mine.failed] == [(1, "refused")]  # type: ignore[attr-defined]


@pytest.mark.parametrize("known", [False, True], ids=["nobody else", "another owner"])
def test_a_stale_route_goes_to_the_owner_or_fails(known: bool) -> None:
    lone = ready(route())
    mine = Taker()
    me = lone.node.spawn(mine)
    (envelope,) = stream(lone, me, 1)
    if known:
        lone.give(C, Delta(view="routes", version=2, changed=[route(node=OTHER, boot=1)]), seq=2)
    stale = StaleRoute(address=ACTOR, owner=OTHER)
    lone.give(P, stale, src_node=ROUTER, src_boot=0, corr=envelope.id)
    again = sent(lone.tick(), TokensDecoded)
    lone.tick()
    if known:
        assert [one.dst_node for one in again] == [OTHER] and mine.failed == []
    else:
        assert again == [] and [reason for _, reason in mine.failed] == ["unroutable"]


def test_it_answers_for_actors_and_types_that_it_does_not_have() -> None:
    lone = ready()
    lone.give(P, note(1), src_node=PEER, src_boot=3, dst=OTHER, seq=1)
    lone.give(P, b"\x80", tag=64_000, src_node=PEER, src_boot=3, dst=OTHER, seq=2)
    lone.give(P, b"\x80", tag=tag_of(TokensDecoded), src_node=PEER, src_boot=3, dst=OTHER, seq=3)
    frames = lone.tick()
    assert messages(frames, NoSuchActor, Unsupported) == [NoSuchActor(address=OTHER), Unsupported(unknown_tag=64_000)]
    assert lone.node.counters["bad_body"] == 1
    lone.node.on_frame(P, b"\xc1", lone.now, 0)
    lone.give(P, note(1), dst_node=PEER)
    assert (lone.node.counters["bad_envelope"], lone.node.counters["foreign_node"]) == (1, 1)


def test_what_was_meant_for_an_earlier_incarnation_is_answered_with_the_boot_of_this_one() -> None:
    lone = ready()
    mine = Taker(TokensDecoded)
    me = lone.node.spawn(mine)
    lone.give(P, note(1), src_node=PEER, src_boot=3, dst=me, dst_boot=99, seq=1)
    (ack,) = sent(lone.tick(), Ack)
    assert ack.src_boot == 100 and mine.got == []
    lone.give(P, note(2), src_node=PEER, src_boot=3, dst=me, seq=1)
    lone.give(P, note(3), src_node=PEER, src_boot=2, dst=me, seq=1)
    lone.tick()
    assert [one.request_id for one in mine.got] == [2] and lone.node.counters["stale_boot"] == 1


# --- the link is down ------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 6.11", "S1 10.12")
def test_after_5_s_without_a_link_sends_fail_at_once() -> None:
    lone = ready(route())
    mine = Taker()
    me = lone.node.spawn(mine)
    stream(lone, me, 1)
    for _ in range(4):
        lone.tick(1000)
    assert not lone.node.link.up and mine.failed == []
    for _ in range(5):
        lone.tick(1000)
    assert [reason for _, reason in mine.failed] == ["link_down"]
    stream(lone, me, 2)
    lone.tick()
    assert [reason for _, reason in mine.failed] == ["link_down", "link_down"]


def test_each_plane_is_up_or_down_for_itself() -> None:
    """A prompt socket that works is not held against the control plane that does not, nor the other way round."""
    lone = Lone()
    lone.tick()
    lone.welcome(C, S)
    lone.tick()
    lone.give(C, Snapshot(view="routes", version=1, items=[route()]), seq=1)
    mine = Taker()
    me = lone.node.spawn(mine)
    lone.tick()
    stream(lone, me, 1)
    for _ in range(6):
        lone.tick(1000)
        lone.give(C, Pong(broker_boot=1, router_boot=5), src_node=lone.broker, src_boot=0)
    assert lone.node.link.up
    assert [reason for _, reason in mine.failed] == ["link_down"]
    lone.welcome(P)
    assert len(stream(lone, me, 2)) == 1
    for _ in range(8):
        lone.tick(1000)
        lone.give(P, Pong(broker_boot=1, router_boot=5), src_node=lone.broker, src_boot=0)
    assert not lone.node.link.up and lone.node.link.is_up(P)
    assert len(mine.failed) == 1, "the prompt plane goes on"


def test_a_registration_that_failed_is_said_again() -> None:
    """The router froze for longer than sends are kept, with the same boot: nobody else would tell it."""
    lone = ready()
    stays, goes = lone.node.spawn(Taker()), lone.node.spawn(Taker())
    lone.tick()
    lone.give(C, Ack(), ack=20)
    for _ in range(10):
        lone.tick(1000)
    assert not lone.node.link.up
    born = lone.node.spawn(Taker())
    lone.node.system.stop(goes)
    lone.tick()
    lone.welcome(C)
    frames = lone.tick()
    frames += lone.tick(OWN_RETRY_MS)
    assert {one.address for one in messages(frames, Register)} >= {born}
    assert {one.address for one in messages(frames, Unregister)} == {goes}
    assert stays not in {one.address for one in messages(frames, Unregister)}


# --- views -----------------------------------------------------------------------------------------------------------
def test_a_gap_in_a_view_is_healed_by_watching_again() -> None:
    lone = ready()
    lone.give(C, Delta(view="routes", version=7, changed=[route()]), seq=2)
    assert messages(lone.tick(), Watch) == [Watch(view="routes")]
    lone.give(C, Snapshot(view="routes", version=8, items=[route()]), seq=3, ack=20)
    assert messages(lone.tick(2000), Watch) == []
    assert lone.node.views.routes.owner(ACTOR) == route()


def test_the_members_are_unknown_while_membership_restarts() -> None:
    lone = ready(route(MEMBERSHIP, MEMBERSHIP, boot=3, name="membership", role=Role.MEMBERSHIP))
    mine = Taker(views=("members",))
    lone.node.spawn(mine)
    assert messages(lone.tick(), Watch) == [Watch(view="members")]
    entry = MemberEntry(node=PEER, boot=3, logical_id="n", role=Role.AGENT, state="alive", incarnation=0)
    lone.give(C, Snapshot(view="members", version=1, items=[entry]), src_node=MEMBERSHIP, src_boot=3, seq=1)
    lone.tick()
    assert lone.node.views.members.state(PEER) == "alive"
    lone.give(C, Snapshot(view="members", version=9, items=[]), src_node=OTHER, src_boot=3, seq=1)
    assert lone.node.views.members.state(PEER) == "alive", "only the publisher may say"
    newer = route(MEMBERSHIP, MEMBERSHIP, boot=4, name="membership", role=Role.MEMBERSHIP)
    lone.give(C, Delta(view="routes", version=2, changed=[newer]), seq=2)
    assert messages(lone.tick(), Watch) == [Watch(view="members")]
    assert lone.node.views.members.state(PEER) == "unknown"
    lone.give(C, Delta(view="routes", version=3, removed=[MEMBERSHIP]), seq=3)
    lone.tick()
    assert lone.node.views.members.state(PEER) == "unknown"
    assert mine.changed.count("members") >= 2


# --- leaving ---------------------------------------------------------------------------------------------------------
def test_goodbye_acknowledges_first_and_is_said_on_each_plane() -> None:
    lone = ready()
    mine = Taker(TokensDecoded)
    me = lone.node.spawn(mine)
    lone.tick()
    lone.give(P, note(1), src_node=PEER, src_boot=3, dst=me, seq=1)
    lone.node.goodbye()
    frames = lone.out()
    prompt = [envelope.tag for plane, envelope in frames if plane is P]
    assert prompt == [tag_of(Ack), tag_of(Goodbye)]
    assert {plane for plane, envelope in frames if envelope.tag == tag_of(Goodbye)} == set(Plane)


def test_who_leaves_repeats_what_is_not_acknowledged_and_nothing_else() -> None:
    """A repetition is acknowledged at once (test_session.py); an ack that comes by itself may take ACK_DELAY_MS."""
    rig = Rig()
    mine, theirs = Taker(), Taker(DecodeTokens)
    me, worker = rig.spawn(Role.GATEWAY, mine), rig.spawn("agent 0", theirs)
    rig.run(500)
    node = rig.member(Role.GATEWAY).node
    settled = node.unsettled
    node.ask_for_acks()
    assert settled == 0 and node.take_frames() == []
    rig.say(Role.GATEWAY, me, worker, DecodeTokens(request_id=1, tokens=[], reply_to=me))
    rig.run(20)
    assert theirs.got and node.unsettled == 1, "it has arrived and nobody has said so"
    node.ask_for_acks()
    rig.member(Role.GATEWAY).turn()
    rig.run(20)
    assert len(theirs.got) == 1 and node.unsettled == 0


def test_a_peer_that_left_keeps_nobody_from_leaving() -> None:
    rig = Rig()
    mine, theirs = Taker(), Taker(DecodeTokens)
    me, worker = rig.spawn(Role.GATEWAY, mine), rig.spawn("agent 0", theirs)
    rig.run(500)
    agent = rig.member("agent 0")
    agent.node.goodbye()
    agent.turn()
    agent.alive = False
    rig.run(50)
    rig.say(Role.GATEWAY, me, worker, DecodeTokens(request_id=1, tokens=[], reply_to=me))
    rig.run(UNROUTABLE_HOLD_MS + 1000)
    assert [reason for _, reason in mine.failed] == ["unroutable"]
    assert not rig.member(Role.GATEWAY).node.unsettled


def test_sessions_of_workers_that_are_gone_do_not_pile_up() -> None:
    rig = Rig()
    router = rig.doors[Role.ROUTER].pure.node
    for _ in range(5):
        agent = rig.member("agent 0")
        agent.node.goodbye()
        agent.turn()
        rig.run(20)
        rig.restart_member("agent 0")
        rig.run(3000, lambda: rig.member("agent 0").node.link.up)
        rig.run(100)
    assert len(router._sessions) <= 3 * len(rig.members)
