"""The link to the door broker: what it says when, when it rebuilds a socket, and that nothing makes it chatter."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.addresses import Plane
from common.limits import HELLO_RESEND_MS, LINK_PING_MS, LINK_REBUILD_MS_MAX, LINK_REBUILD_MS_MIN, LINK_SILENT_MS
from common.link import Link, LinkEffect, LinkReset, LinkSend, LinkUp, LocalDoor
from common.messages.bus import Hello, Ping, Pong, Reintroduce, Welcome

C, P = Plane.CONTROL, Plane.PROMPT
BROKER, ROUTER = b"b" * 32, b"r" * 32


def welcome(broker_boot: int = 1, router_boot: int = 5) -> Welcome:
    return Welcome(broker_key=BROKER, broker_boot=broker_boot, router_key=ROUTER, router_boot=router_boot)


def pong(broker_boot: int = 1, router_boot: int = 5) -> Pong:
    return Pong(broker_boot=broker_boot, router_boot=router_boot)


def said(effects: list[LinkEffect]) -> list[object]:
    """In short: (plane, type of message) for sends, "reset" and "up" for the others."""
    short: list[object] = []
    for effect in effects:
        match effect:
            case LinkSend():
                short.append((effect.plane, type(effect.message)))
            case LinkReset():
                short.append((effect.plane, "reset"))
            case LinkUp():
                short.append((effect.plane, "up", effect.fresh_router))
    return short


def up_link(now: int = 1000, planes: tuple[Plane, ...] = (C,)) -> Link:
    link = Link(7, "node 1", planes)
    link.tick(now)
    for plane in planes:
        link.on_message(plane, welcome(), now)
    return link


def test_hello_until_welcome_on_each_plane() -> None:
    link = Link(7, "node 1", (C, P))
    assert said(link.tick(1000)) == [(C, Hello), (P, Hello)]
    assert not link.up and link.tick(1000 + HELLO_RESEND_MS - 1) == []
    assert said(link.tick(1000 + HELLO_RESEND_MS)) == [(C, Hello), (P, Hello)]
    assert said(link.on_message(P, welcome(), 1300)) == [(P, "up", True)]
    assert link.is_up(P) and not link.up, "the control plane decides"
    assert said(link.on_message(C, welcome(), 1301)) == [(C, "up", False)], "one plane registers, not each"
    assert link.up
    assert (link.broker_key, link.router_key, link.router_boot) == (BROKER, ROUTER, 5)


def test_a_ping_each_second_and_no_more() -> None:
    link = up_link()
    sent = []
    for now in range(1000, 6000, 10):
        sent += said(link.tick(now))
        link.on_message(C, pong(), now)
    assert sent == [(C, Ping)] * 4


def test_silence_rebuilds_the_socket_and_says_hello() -> None:
    link = up_link()
    link.tick(2000)
    link.tick(3000)
    assert said(link.tick(1000 + LINK_SILENT_MS)) == [(C, Ping)]
    assert said(link.tick(1001 + LINK_SILENT_MS)) == [(C, "reset"), (C, Hello)]
    assert not link.up and link.down_since(C) == 1001 + LINK_SILENT_MS


def test_any_frame_is_a_sign_of_life() -> None:
    link = up_link()
    for now in range(1000, 20_000, 500):
        link.heard(C, now)
        assert all(isinstance(effect, LinkSend) for effect in link.tick(now))
    assert link.up


@pytest.mark.parametrize("answer", [pong(broker_boot=2), pong(router_boot=6)], ids=["broker", "router"])
def test_a_pong_of_another_boot_means_that_we_are_forgotten(answer: Pong) -> None:
    link = up_link()
    assert said(link.on_message(C, answer, 2000)) == [(C, Hello)]
    assert not link.up
    assert said(link.on_message(C, welcome(answer.broker_boot, answer.router_boot), 2010)) == [
        (C, "up", answer.router_boot == 6)
    ]


def test_a_burst_of_reintroduce_is_answered_by_one_hello() -> None:
    """A restarted broker answers each frame of a window."""
    link = up_link()
    effects = [effect for _ in range(256) for effect in link.on_message(C, Reintroduce(), 2000)]
    assert said(effects) == [(C, Hello)]
    assert said(link.tick(2000 + HELLO_RESEND_MS)) == [(C, Hello)]


def test_a_refused_handshake_is_tried_again_with_back_off() -> None:
    link = Link(7, "node 1", (C,))
    link.tick(0)
    resets: list[int] = []
    now = 0
    for _ in range(8):
        assert link.on_refused(C, now) == []
        due = link.next_deadline()
        assert due is not None and due > now
        now = due
        assert (C, "reset") in said(link.tick(now))
        resets.append(now)
    gaps = [b - a for a, b in itertools.pairwise(resets)]
    assert resets[0] == LINK_REBUILD_MS_MIN
    assert gaps[:5] == [500, 1000, 2000, 4000, 5000] and max(gaps) == LINK_REBUILD_MS_MAX


def test_a_silent_broker_costs_a_rebuild_now_and_then() -> None:
    link = Link(7, "node 1", (C,))
    resets = hellos = 0
    for now in range(0, 60_000, 10):
        for effect in link.tick(now):
            resets += isinstance(effect, LinkReset)
            hellos += isinstance(effect, LinkSend)
    assert hellos <= 60_000 // HELLO_RESEND_MS
    assert 10 <= resets <= 20


def test_a_plane_that_is_not_dialled_was_never_up() -> None:
    link = up_link()
    assert not link.is_up(Plane.EDGE) and link.down_since(Plane.EDGE) == 0
    assert link.down_since(C) is None


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 1500), st.sampled_from(["welcome", "pong", "other", "again", "refused", "frame", ""])),
        max_size=60,
    )
)
def test_it_never_storms_and_always_comes_back(events: list[tuple[int, str]]) -> None:
    link, now, sends = Link(7, "n", (C, P)), 0, 0
    for ms, event in events:
        now += ms
        effects = list(link.tick(now))
        match event:
            case "welcome":
                effects += link.on_message(C, welcome(), now)
            case "pong":
                effects += link.on_message(C, pong(), now)
            case "other":
                effects += link.on_message(C, pong(broker_boot=9), now)
            case "again":
                effects += link.on_message(C, Reintroduce(), now)
            case "refused":
                effects += link.on_refused(C, now)
            case "frame":
                link.heard(C, now)
        sends += sum(isinstance(effect, LinkSend) for effect in effects)
        due = link.next_deadline()
        assert due is not None
        assert link.is_up(C) == (link.down_since(C) is None)
    # Each lane says at most one thing per event and what its timers allow.
    assert sends <= 2 * len(events) + 2 * (now // HELLO_RESEND_MS + 1)
    for _ in range(40):
        due = link.next_deadline()
        assert due is not None
        now = max(now + 1, due)
        for effect in link.tick(now):
            if isinstance(effect, LinkSend) and isinstance(effect.message, Hello):
                link.on_message(effect.plane, welcome(), now)
            elif isinstance(effect, LinkSend):
                link.on_message(effect.plane, pong(), now)
    assert link.is_up(C) and link.is_up(P)


def test_the_local_door_is_always_there() -> None:
    door = LocalDoor(BROKER, 3, is_router=True)
    assert door.up and door.is_up(P) and door.down_since(C) is None and door.next_deadline() is None
    assert door.tick(9) == door.on_refused(C, 9) == door.on_message(C, Reintroduce(), 9) == []
    assert door.router_key == BROKER and LocalDoor(BROKER, 3, is_router=False).router_key == b""
    assert LINK_PING_MS < LINK_SILENT_MS
