"""Any messages at any time: the core's invariants hold, its incarnation never falls, its states only climb."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.codec import Message
from common.messages.member import (
    MemberId,
    MemberUpdate,
    NameUpdate,
    SwimAck,
    SwimGossip,
    SwimNack,
    SwimPing,
    SwimPingReq,
    SwimPushPull,
)
from common.swim.table import RANK, precedence
from tests.unit.swim.playbook import BOOT, Stage, actor, facts, key

NAMES = ["me", "ann", "bob", "cid"]
who = st.sampled_from(NAMES)
peers = st.sampled_from(NAMES[1:])
boots = st.integers(BOOT - 1, BOOT + 1)
sequences = st.integers(0, 6)


@st.composite
def updates(draw: st.DrawFn) -> MemberUpdate:
    name = draw(who)
    boot = min(draw(boots), BOOT) if name == "me" else draw(boots)  # a newer boot of ours ends every example at once
    state, incarnation = draw(st.sampled_from(list(RANK))), draw(st.integers(0, 3))
    return facts(name, state, incarnation, boot=boot, by=draw(who))


ids = st.builds(MemberId, node=st.builds(key, who), boot=boots)
tables = st.lists(updates(), max_size=4)
names = st.lists(
    st.builds(
        NameUpdate,
        name=st.sampled_from(["inference", "other"]),
        address=st.builds(actor, who),
        node=st.builds(key, who),
        timestamp_ms=st.integers(0, 3),
        generation=st.integers(0, 2),
        tombstone=st.booleans(),
        boot=st.sampled_from([0, BOOT]),
    ),
    max_size=2,
)
senders = st.builds(facts, peers, boot=boots)
messages = st.one_of(
    st.builds(SwimPing, sequence=sequences, sender=senders, target=ids, updates=tables, names=names),
    st.builds(SwimAck, sequence=sequences, target=ids, incarnation=st.integers(0, 3), updates=tables, names=names),
    st.builds(SwimPingReq, sequence=sequences, sender=senders, target=updates(), updates=tables),
    st.builds(SwimNack, sequence=sequences),
    st.builds(SwimGossip, updates=tables, names=names),
    st.builds(SwimPushPull, sender=senders, updates=tables, names=names, reply=st.booleans()),
)
steps = st.one_of(
    st.tuples(messages, peers),
    st.integers(0, 8_000),
    st.sampled_from(["pause", "resume", "freeze", "forget", "register", "unregister", "leave"]),
)


@settings(max_examples=120)
@given(st.lists(steps, max_size=25))
def test_nothing_breaks_the_core(story: list[tuple[Message, str] | int | str]) -> None:
    stage = Stage("ann")
    for step in story:
        before = {member.member.node: precedence(member) for member in stage.core.members()}
        match step:
            case (message, sender):
                assert isinstance(message, Message)
                stage.tell(message, str(sender))
            case int():
                stage.advance(step)
            case "pause":
                stage.do(stage.core.pause(stage.now))
            case "resume":
                stage.do(stage.core.resume(stage.now))
            case "freeze":
                stage.now += 30_000
                stage.do(stage.core.tick(stage.now))
            case "forget":
                stage.do(stage.core.forget_departed(stage.now))
            case "register":
                stage.do(stage.core.register_name("inference", actor("me"), stage.now, stage.now))
            case "unregister":
                stage.do(stage.core.unregister_name("inference", stage.now))
            case _:
                stage.do(stage.core.leave(stage.now))
        for member in stage.core.members():
            assert precedence(member) >= before.get(member.member.node, (0, 0, 0))
