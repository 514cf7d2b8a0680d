"""Actors: one message at a time, in order, with limits; timers that cannot fire late; nobody waits in vain."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest

from common.actors import Actor, ActorSystem, Ctx, Inbox
from common.effects import Log, SendFailed, StopSignal
from common.limits import MAILBOX_MESSAGES_MAX
from common.messages.prompt import TextDelta, TokensDecoded
from common.views import Views


class Script(Actor):
    """Does what it is told when it gets a message of that number."""

    Incoming: ClassVar[tuple[type, ...]] = (TokensDecoded, SendFailed, str)

    def __init__(self, **on: Any) -> None:
        self.on = on
        self.got: list[Any] = []
        self.fired: list[tuple[str, int]] = []
        self.stopped = False

    def on_start(self, ctx: Ctx) -> None:
        self.on.get("start", lambda ctx: None)(ctx)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        self.got.append(msg.reason if isinstance(msg, SendFailed) else getattr(msg, "request_id", msg))
        self.on.get("msg", lambda msg, ctx: None)(msg, ctx)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        self.fired.append((key, ctx.now_ms))
        self.on.get("timer", lambda key, ctx: None)(key, ctx)

    def on_stop(self, ctx: Ctx) -> None:
        self.stopped = True
        self.on.get("stop", lambda ctx: None)(ctx)


class Registry:
    def __init__(self) -> None:
        self.log: list[tuple[str, bytes, int, str]] = []

    def registered(self, address: bytes, generation: int, name: str) -> None:
        self.log.append(("in", address, generation, name))

    def unregistered(self, address: bytes, generation: int) -> None:
        self.log.append(("out", address, generation, ""))


def system(registry: Registry | None = None, *, validate: bool = False) -> ActorSystem:
    count = iter(range(1, 100_000))
    return ActorSystem(
        node=b"n" * 32,
        boot=1,
        rng=random.Random(1),
        views=Views(),
        new_address=lambda: b"actor" + next(count).to_bytes(27, "big"),
        registrar=registry,
        validate=validate,
    )


def note(number: int) -> TokensDecoded:
    return TokensDecoded(request_id=number, text="")


@pytest.mark.spec("S1 6.1")
def test_order_holds_per_sender_and_a_send_is_handled_after_the_current_handler() -> None:
    actors = system()
    sink = Script()
    address = actors.spawn(sink)

    def burst(msg: Any, ctx: Ctx) -> None:
        for number in range(3):
            ctx.send(address, note(100 * msg.request_id + number))
        assert len(sink.got) % 3 == 0

    first, second = actors.spawn(Script(msg=burst)), actors.spawn(Script(msg=burst))
    for number in range(1, 4):
        actors.post(first, note(number))
        actors.post(second, note(number + 10))
    actors.run(0, 0)
    for sender in (0, 10):
        mine = [one for one in sink.got if (one // 1000 > 0) == bool(sender)]
        assert mine == sorted(mine) and len(mine) == 9


@pytest.mark.spec("S1 6.1")
def test_an_actor_has_its_own_address_and_is_registered() -> None:
    registry = Registry()
    actors = system(registry)
    addresses = {actors.spawn(Script()) for _ in range(3)}
    assert len(addresses) == 3 and all(len(one) == 32 for one in addresses)
    named = actors.spawn(Script(), "prompt_gateway", address=b"k" * 32)
    assert named == b"k" * 32 and registry.log[-1] == ("in", named, 4, "prompt_gateway")
    assert actors.addresses()[-1] == (named, 4, "prompt_gateway")
    actors.stop(named)
    actors.run(0, 0)
    assert registry.log[-1] == ("out", named, 4, "") and not actors.hosts(named)


def test_a_timer_never_fires_for_an_old_time() -> None:
    script = Script()
    actors = system()
    address = actors.spawn(script)
    for delay in (50, 10, 30):
        actors.set_timer(address, "a", delay)
    actors.set_timer(address, "b", 20)
    actors.cancel_timer(address, "b")
    actors.cancel_timer(address, "never")
    assert actors.next_deadline() == 30
    for now in (10, 29, 30, 31, 60):
        actors.run(now, 0)
    assert script.fired == [("a", 30)] and actors.next_deadline() is None


def test_a_timer_that_another_one_cancels_or_moves_in_the_same_turn_does_not_fire() -> None:
    def first(key: str, ctx: Ctx) -> None:
        if key == "a":
            ctx.cancel("b")
            ctx.timer("c", 5)

    script = Script(timer=first)
    actors = system()
    address = actors.spawn(script)
    for key, delay in (("a", 1), ("b", 2), ("c", 3)):
        actors.set_timer(address, key, delay)
    actors.run(10, 0)
    assert script.fired == [("a", 10)]
    actors.run(15, 0)
    assert script.fired == [("a", 10), ("c", 15)]


def test_a_stopped_actor_ends_with_its_timers_and_watches() -> None:
    actors = system()
    script = Script(stop=lambda ctx: ctx.effect(Log("info", "bye")), start=lambda ctx: ctx.watch("routes"))
    address = actors.spawn(script)
    assert actors.watchers == {"routes": [address]} and actors.wanted_views == {"routes"}
    actors.set_timer(address, "a", 1)
    actors.stop(address)
    actors.stop(address)
    actors.run(5, 0)
    assert script.stopped and script.fired == [] and actors.watchers["routes"] == []
    assert actors.effects == [(address, Log("info", "bye"))]
    assert not actors.deliver(address, note(1))


def test_what_waits_for_an_actor_that_stops_fails() -> None:
    actors = system()
    target = Script()
    address = actors.spawn(target)

    def late(msg: Any, ctx: Ctx) -> None:
        if isinstance(msg, TokensDecoded):
            ctx.send(address, note(1))
            ctx.stop(address)

    sender = Script(msg=late)
    actors.post(actors.spawn(sender), note(0))
    actors.run(0, 0)
    assert target.got == [] and sender.got == [0, "unroutable"]


def test_a_type_that_an_actor_does_not_take_is_refused_before_it() -> None:
    actors = system()
    target = Script()
    address = actors.spawn(target)
    sender = Script(msg=lambda msg, ctx: ctx.send(address, TextDelta(request_id=1, text="")) if msg == "go" else None)
    actors.post(actors.spawn(sender), "go")
    actors.post(address, TextDelta(request_id=2, text=""))
    actors.run(0, 0)
    assert target.got == [] and sender.got == ["go", "refused"]


def test_a_full_mailbox_is_said_to_the_sender_and_grows_no_further() -> None:
    actors = system()
    target = Script()
    address = actors.spawn(target)

    def flood(msg: Any, ctx: Ctx) -> None:
        if msg == "go":
            for number in range(MAILBOX_MESSAGES_MAX + 3):
                ctx.send(address, note(number))

    sender = Script(msg=flood)
    actors.post(actors.spawn(sender), "go")
    actors.run(0, 0)
    assert len(target.got) == MAILBOX_MESSAGES_MAX
    assert sender.got == ["go", "queue_full", "queue_full", "queue_full"]
    for number in range(MAILBOX_MESSAGES_MAX):
        assert actors.deliver(address, note(number))
    assert not actors.deliver(address, note(0))


def test_what_is_not_here_leaves_with_its_cause() -> None:
    actors = system()
    me = actors.spawn(Script(msg=lambda msg, ctx: ctx.reply(note(2))))
    actors.deliver(me, note(1), src=b"far" * 10 + b"--", src_node=b"p" * 32, id=77)
    assert actors.busy
    actors.run(0, 0)
    (out,) = actors.outbound
    assert (out.src, out.dst, out.corr) == (me, b"far" * 10 + b"--", 77)
    actors.post(b"x" * 32, "an event goes nowhere else")
    assert len(actors.outbound) == 1 and actors.busy


def test_events_reach_those_who_take_them() -> None:
    class Stops(Script):
        Incoming: ClassVar[tuple[type, ...]] = (StopSignal,)

    actors = system()
    takes, other = Stops(), Script()
    actors.spawn(takes), actors.spawn(other)
    actors.broadcast(StopSignal("SIGTERM", 1))
    actors.run(0, 0)
    assert len(takes.got) == 1 and other.got == []


def test_under_validation_messages_go_through_the_codec_and_states_are_checked() -> None:
    class Broken(Script):
        def check(self) -> None:
            assert not self.got, "broken"

    actors = system(validate=True)
    address = actors.spawn(Script())
    with pytest.raises(ValueError):
        actors.post(address, TokensDecoded(request_id=-1, text=""))
    actors.post(actors.spawn(Broken()), note(1))
    with pytest.raises(AssertionError, match="broken"):
        actors.run(0, 0)


@pytest.mark.spec("S1 6.3")
def test_an_inbox_buffers_until_it_is_drained() -> None:
    actors = system()
    inbox = Inbox(TokensDecoded, limit=3)
    address = actors.spawn(inbox)
    assert inbox.state == "empty"
    for number in range(4):
        actors.deliver(address, note(number), src=b"s" * 32)
    actors.post(address, TextDelta(request_id=1, text="not accepted"))
    actors.run(0, 0)
    assert inbox.state == "pending"
    assert [(src, msg.request_id) for src, msg in inbox.drain()] == [(b"s" * 32, number) for number in (1, 2, 3)]
    assert inbox.state == "empty" and inbox.drain() == []
