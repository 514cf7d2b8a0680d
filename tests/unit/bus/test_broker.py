"""The broker core: the six rules of design.md 3, who is bound, who is out, and what is said to whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.addresses import NO_RUN, Plane, Role
from common.broker import GOODBYE_MS, LOCAL, UPLINK, Admission, Broker, NodeBound, NodeGone
from common.codec import Message, decode_body, decode_envelope, encode_envelope, tag_of
from common.datagram import datagram_frame
from common.envelope import Envelope
from common.limits import BROKER_SILENT_MS
from common.messages.bus import (
    Admit,
    Goodbye,
    Hello,
    PeerUp,
    Ping,
    Pong,
    Register,
    Reintroduce,
    StaleRoute,
    Undeliverable,
    Welcome,
)
from common.messages.node_agent import DecodeTokens
from common.messages.prompt import TokensDecoded
from common.node import Identity

ROUTER, RELAY, GATEWAY, AGENT, OTHER = (letter * 32 for letter in (b"r", b"y", b"g", b"a", b"o"))
ACTOR = b"x" * 32
C, P = Plane.CONTROL, Plane.PROMPT


def router() -> Broker:
    roles = {GATEWAY: Role.GATEWAY, AGENT: Role.AGENT, RELAY: Role.RELAY}
    return Broker(ROUTER, 5, Role.ROUTER, {node: Admission(role) for node, role in roles.items()})


def relay() -> Broker:
    return Broker(
        RELAY,
        6,
        Role.RELAY,
        {
            ROUTER: Admission(Role.ROUTER),
            AGENT: Admission(Role.AGENT, operator=ROUTER),
            OTHER: Admission(Role.AGENT, operator=ROUTER),
        },
    )


def hello(source: bytes, boot: int = 1) -> bytes:
    return datagram_frame(Identity(source, Role.AGENT, boot, "n"), ROUTER, Hello(boot=boot, logical_id="n"), id=1)


def frame(message: Message, source: bytes, dst_node: bytes, *, dst: bytes = b"", seq: int = 3) -> bytes:
    return encode_envelope(
        Envelope(
            1,
            tag_of(type(message)),
            42,
            NO_RUN,
            source,
            1,
            source,
            dst_node,
            1,
            dst or dst_node,
            0,
            seq,
            1,
            0,
            decode_envelope(datagram_frame(Identity(source, Role.AGENT, 1, ""), dst_node, message, id=1)).body,
        )
    )


ASK = DecodeTokens(request_id=1, tokens=[1], reply_to=GATEWAY)
ANSWER = TokensDecoded(request_id=1, text="t")


def key(of: bytes) -> Callable[[], bytes]:
    return lambda: of


def give(broker: Broker, conn: bytes, data: bytes, *, of: bytes = b"", plane: Plane = P, now: int = 0) -> Any:
    result = broker.on_frame(plane, conn, key(of), data, now)
    broker.check()
    return result


def bind(broker: Broker, *nodes: bytes, planes: tuple[Plane, ...] = (C, P)) -> None:
    for node in nodes:
        for plane in planes:
            give(broker, node[:1], hello(node), of=node, plane=plane)
    broker.out.clear()


def replies(broker: Broker) -> list[tuple[bytes, Message]]:
    out, broker.out = broker.out, []
    return [(conn, decode_body(e.tag, e.body)) for conn, _, data in out for e in [decode_envelope(data)]]


# --- binding: rule 1 ---------------------------------------------------------------------------------------------
def test_hello_binds_and_is_welcomed_with_both_boots() -> None:
    broker = router()
    assert give(broker, b"c1", hello(AGENT), of=AGENT, plane=C) == (None, "local")
    assert replies(broker) == [(b"c1", Welcome(broker_key=ROUTER, broker_boot=5, router_key=ROUTER, router_boot=5))]
    assert broker.events == [NodeBound(AGENT, 1, Role.AGENT, ROUTER)]
    assert broker.is_bound(C, b"c1") and not broker.is_bound(P, b"c1")


def test_who_is_not_bound_may_only_say_hello() -> None:
    broker = router()
    assert give(broker, b"c1", frame(ANSWER, AGENT, GATEWAY), of=AGENT) == (None, "reintroduce")
    assert replies(broker) == [(b"c1", Reintroduce())]
    assert give(broker, b"c2", frame(ANSWER, OTHER, GATEWAY), of=OTHER) == (None, "reintroduce")
    assert replies(broker) == [], "a key that is not admitted hears nothing"
    assert give(broker, b"c2", hello(OTHER), of=OTHER) == (None, "refused")
    assert give(broker, b"c1", hello(GATEWAY), of=AGENT) == (None, "refused"), "Hello in another's name"
    assert give(broker, b"c1", b"\xc1junk", of=AGENT) == (None, "bad")
    assert broker.events == []


def test_the_newest_connection_counts_and_the_older_is_forgotten() -> None:
    broker = router()
    bind(broker, GATEWAY, AGENT)
    give(broker, b"new", hello(AGENT), of=AGENT)
    assert give(broker, b"g", frame(ASK, GATEWAY, AGENT)) == (b"new", "forwarded")
    broker.out.clear()
    assert give(broker, b"a", frame(ANSWER, AGENT, GATEWAY), of=AGENT) == (None, "reintroduce")
    assert [type(message) for _, message in replies(broker)] == [Reintroduce]


def test_an_older_boot_is_stale_and_a_newer_takes_over_all_planes() -> None:
    broker = router()
    bind(broker, AGENT)
    assert give(broker, b"n", hello(AGENT, boot=9), of=AGENT, plane=C) == (None, "local")
    assert not broker.is_bound(P, b"a"), "the older incarnation's other planes are as dead as it is"
    assert give(broker, b"z", hello(AGENT, boot=1), of=AGENT, plane=C) == (None, "stale")
    assert [event.boot for event in broker.events] == [1, 9]


def test_a_connection_that_is_gone_is_unbound() -> None:
    broker = router()
    bind(broker, GATEWAY, AGENT)
    broker.lost(P, b"a")
    broker.lost(P, b"a")
    assert give(broker, b"g", frame(ASK, GATEWAY, AGENT)) == (None, "unbound")
    assert broker.is_bound(C, b"a")


# --- source and role: rule 2 ---------------------------------------------------------------------------------------
def test_nobody_speaks_in_another_name() -> None:
    broker = router()
    bind(broker, GATEWAY, AGENT)
    assert give(broker, b"a", frame(ANSWER, OTHER, GATEWAY)) == (None, "refused")
    assert give(broker, b"a", frame(ASK, GATEWAY, GATEWAY)) == (None, "refused")
    assert replies(broker) == [(b"a", Undeliverable(reason="refused", dst_node=GATEWAY))] * 2


@pytest.mark.parametrize(
    "message",
    [
        ASK,
        Admit(key=OTHER, role=Role.AGENT, run=NO_RUN, node_id=1),
        PeerUp(node=OTHER, boot=1, role=Role.AGENT),
        Undeliverable(reason="unbound", dst_node=GATEWAY),
        Welcome(broker_key=OTHER, broker_boot=1, router_key=OTHER, router_boot=1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_worker_may_not_say_what_is_not_its_to_say(message: Message) -> None:
    broker = router()
    bind(broker, GATEWAY, AGENT)
    for dst in (GATEWAY, ROUTER):
        assert give(broker, b"a", frame(message, AGENT, dst)) == (None, "refused")


def test_a_datagram_that_cannot_go_is_dropped_without_an_answer() -> None:
    broker = router()
    bind(broker, AGENT)
    assert give(broker, b"a", frame(ANSWER, AGENT, GATEWAY, seq=0)) == (None, "unbound")
    assert give(broker, b"a", frame(ASK, AGENT, GATEWAY, seq=0)) == (None, "refused")
    assert broker.out == []


def test_an_unknown_type_is_forwarded() -> None:
    broker = router()
    bind(broker, GATEWAY, AGENT)
    envelope = decode_envelope(frame(ANSWER, AGENT, GATEWAY))
    unknown = encode_envelope(
        Envelope(*(60_000 if name == "tag" else getattr(envelope, name) for name in envelope.__struct_fields__))
    )
    assert give(broker, b"a", unknown) == (b"g", "forwarded")


# --- forwarding: rules 3 to 6 --------------------------------------------------------------------------------------
def test_bound_here_is_forwarded_and_for_the_broker_is_local() -> None:
    broker = router()
    bind(broker, GATEWAY, AGENT)
    assert give(broker, b"g", frame(ASK, GATEWAY, AGENT)) == (b"a", "forwarded")
    assert give(broker, b"a", frame(Register(address=ACTOR, boot=1, generation=1), AGENT, ROUTER), plane=C)[0] is LOCAL
    assert give(broker, b"a", frame(Ping(), AGENT, ROUTER), plane=C) == (None, "local")
    assert replies(broker) == [(b"a", Pong(broker_boot=5, router_boot=5))]


def test_the_relay_sends_up_what_is_not_here_and_never_back() -> None:
    broker = relay()
    assert give(broker, b"a", hello(AGENT), of=AGENT) == (None, "refused"), "no Welcome without a router"
    assert not broker.is_bound(P, b"a")
    give(broker, b"r", hello(ROUTER, boot=5), of=ROUTER)
    bind(broker, AGENT, OTHER, planes=(P,))
    assert give(broker, b"a", frame(ANSWER, AGENT, GATEWAY)) == (b"r", "forwarded")
    assert give(broker, b"a", frame(ANSWER, AGENT, OTHER)) == (b"o", "forwarded")
    broker.out.clear()
    # The router carries what others sent; the answer goes to them, by the way it came.
    assert give(broker, b"r", frame(ASK, GATEWAY, b"?" * 32)) == (None, "unbound")
    ((conn, _, data),) = broker.out
    answer = decode_envelope(data)
    assert conn == b"r" and answer.dst_node == GATEWAY and answer.corr == 42


def test_the_router_asks_the_relay_for_whom_it_lists() -> None:
    broker = router()
    bind(broker, GATEWAY)
    assert give(broker, b"g", frame(ASK, GATEWAY, AGENT)) == (None, "unbound")
    assert replies(broker) == [(b"g", Undeliverable(reason="unbound", dst_node=AGENT))]
    broker.beyond.add(AGENT)
    assert give(broker, b"g", frame(ASK, GATEWAY, AGENT)) == (UPLINK, "forwarded")
    assert broker.from_uplink(P, frame(ANSWER, AGENT, OTHER)) == (None, "unbound"), "never back to where it came from"


def test_the_router_takes_from_the_relay_only_what_its_workers_may_say() -> None:
    broker = router()
    broker.relay_key = RELAY
    bind(broker, GATEWAY)
    assert broker.from_uplink(P, frame(ANSWER, AGENT, GATEWAY)) == (b"g", "forwarded")
    assert broker.from_uplink(P, frame(ASK, AGENT, GATEWAY)) == (None, "refused")
    assert broker.from_uplink(P, frame(ASK, GATEWAY, GATEWAY)) == (None, "refused"), "a service is not behind it"
    assert broker.from_uplink(P, frame(ANSWER, OTHER, GATEWAY)) == (None, "unbound"), "not admitted yet: it waits"
    assert broker.from_uplink(C, frame(PeerUp(node=AGENT, boot=1, role=Role.AGENT), RELAY, ROUTER))[0] is LOCAL
    assert broker.from_uplink(C, b"\xc1") == (None, "bad")
    assert [conn for conn, _, _ in broker.out] == [UPLINK] * 3


def test_a_stamp_against_the_route_view_is_stale() -> None:
    broker = router()
    bind(broker, GATEWAY, AGENT)
    broker.owners[ACTOR] = OTHER
    assert give(broker, b"g", frame(ASK, GATEWAY, AGENT, dst=ACTOR)) == (None, "stale")
    assert replies(broker) == [(b"g", StaleRoute(address=ACTOR, owner=OTHER))]
    broker.owners[ACTOR] = AGENT
    assert give(broker, b"g", frame(ASK, GATEWAY, AGENT, dst=ACTOR)) == (b"a", "forwarded")
    assert broker.from_local(P, frame(ASK, ROUTER, AGENT, dst=ACTOR)) == (b"a", "forwarded")
    assert broker.from_local(P, frame(ASK, ROUTER, ROUTER))[0] is LOCAL


# --- a relay of several operators: design.md 3 ---------------------------------------------------------------------
HOSTILE, SPY = b"h" * 32, b"s" * 32


def shared_relay() -> Broker:
    broker = relay()
    broker.admit(HOSTILE, Admission(Role.ROUTER))
    broker.admit(SPY, Admission(Role.AGENT, operator=HOSTILE))
    for operator, boot in ((ROUTER, 5), (HOSTILE, 7)):
        for plane in (C, P):
            give(broker, operator[:1], hello(operator, boot=boot), of=operator, plane=plane)
    bind(broker, AGENT, SPY)
    return broker


def test_operators_of_one_relay_reach_only_their_own_nodes() -> None:
    broker = shared_relay()
    assert give(broker, b"h", frame(ASK, GATEWAY, SPY)) == (b"s", "forwarded")
    for target in (AGENT, ROUTER, OTHER):
        assert give(broker, b"h", frame(ASK, GATEWAY, target)) == (None, "unbound"), "as one that does not exist"
        assert give(broker, b"h", frame(ASK, ROUTER, target)) == (None, "unbound"), "nor in the other's name"
        assert give(broker, b"s", frame(ANSWER, SPY, target)) == (b"h", "forwarded"), "up to its own, no further"
    assert give(broker, b"a", frame(ANSWER, AGENT, SPY)) == (b"r", "forwarded")
    assert give(broker, b"r", frame(ASK, GATEWAY, SPY)) == (None, "unbound")


def test_nobody_gives_the_relay_orders_in_another_operators_name() -> None:
    broker = shared_relay()
    for order in (Admit(key=SPY, role=Role.AGENT, run=NO_RUN, node_id=1), Goodbye()):
        assert give(broker, b"h", frame(order, ROUTER, RELAY), plane=C) == (None, "refused")
    assert broker.is_bound(C, b"r")
    assert give(broker, b"h", frame(Admit(key=SPY, role=Role.AGENT, run=NO_RUN, node_id=1), HOSTILE, RELAY))[0] is LOCAL


def test_a_welcome_and_a_pong_name_the_nodes_own_router() -> None:
    broker = shared_relay()
    give(broker, b"n", hello(SPY, boot=3), of=SPY)
    give(broker, b"a", frame(Ping(), AGENT, RELAY))
    assert [message for _, message in replies(broker)] == [
        Welcome(broker_key=RELAY, broker_boot=6, router_key=HOSTILE, router_boot=7),
        Pong(broker_boot=6, router_boot=5),
    ]


# --- leaving -------------------------------------------------------------------------------------------------------
def test_goodbye_ends_a_node_at_once_and_lets_its_last_words_through() -> None:
    broker = router()
    bind(broker, GATEWAY, AGENT)
    broker.events.clear()
    assert give(broker, b"a", frame(Goodbye(), AGENT, ROUTER, seq=0), plane=C, now=100) == (None, "local")
    assert broker.events == [NodeGone(AGENT, 1, "goodbye", ROUTER)]
    assert give(broker, b"a", frame(ANSWER, AGENT, GATEWAY)) == (b"g", "forwarded")
    give(broker, b"a", frame(Goodbye(), AGENT, ROUTER, seq=0), plane=P)
    assert not broker.is_bound(P, b"a")
    assert len(broker.events) == 1


def test_a_goodbye_behind_the_news_that_its_connection_is_gone_counts() -> None:
    """A send to it failed first; its routes would stay for as long as it is only silent."""
    broker = router()
    bind(broker, AGENT)
    broker.events.clear()
    broker.lost(C, b"a")
    assert give(broker, b"a", frame(Goodbye(), AGENT, ROUTER, seq=0), of=AGENT, plane=C) == (None, "local")
    assert [type(event) for event in broker.events] == [NodeGone] and not broker.knows(AGENT)
    # A connection that it has replaced says nothing about it.
    bind(broker, AGENT)
    broker.events.clear()
    give(broker, b"old", frame(Goodbye(), AGENT, ROUTER, seq=0), of=AGENT, plane=C)
    assert broker.events == [] and broker.knows(AGENT)


def test_what_said_goodbye_on_one_plane_only_is_forgotten_soon() -> None:
    broker = router()
    bind(broker, AGENT)
    give(broker, b"a", frame(Goodbye(), AGENT, ROUTER, seq=0), plane=C, now=100)
    broker.tick(100 + GOODBYE_MS)
    assert broker.is_bound(P, b"a")
    broker.tick(101 + GOODBYE_MS)
    assert not broker.is_bound(P, b"a")
    give(broker, b"n", hello(AGENT, boot=2), of=AGENT, plane=C, now=5000)
    broker.tick(9000)
    assert broker.is_bound(C, b"n"), "its next incarnation is not caught by the old one's end"


def test_a_silent_node_is_unbound() -> None:
    broker = router()
    bind(broker, AGENT, GATEWAY)
    broker.events.clear()
    give(broker, b"g", frame(Ping(), GATEWAY, ROUTER, seq=0), plane=C, now=5000)
    broker.tick(BROKER_SILENT_MS + 1)
    assert broker.events == [NodeGone(AGENT, 1, "silent", ROUTER)]
    assert {node.key for node in broker.bound()} == {GATEWAY}


def test_revocation_makes_a_live_connection_mute_and_deaf() -> None:
    broker = router()
    bind(broker, GATEWAY, AGENT)
    broker.events.clear()
    broker.revoke(AGENT)
    broker.revoke(AGENT)
    assert broker.events == [NodeGone(AGENT, 1, "revoked", ROUTER)]
    assert not broker.admits(AGENT)
    assert give(broker, b"a", frame(ANSWER, AGENT, GATEWAY), of=AGENT) == (None, "reintroduce")
    assert give(broker, b"a", hello(AGENT), of=AGENT) == (None, "refused")
    assert broker.out == [], "not even an answer"
    assert give(broker, b"g", frame(ASK, GATEWAY, AGENT)) == (None, "unbound")
