"""ProcessActor alone: generic, commands in, notifications out to whoever subscribed (S2 3.3)."""

from __future__ import annotations

import pytest

from common.actors import Inbox
from tests.support.harness import Harness
from worker.gpu_node.events import (
    Close,
    CloseChild,
    Error,
    Exited,
    Output,
    ProcessSpec,
    SignalChild,
    SpawnChild,
    Started,
    Stop,
    Subscribe,
    WriteChild,
    WriteStdin,
)
from worker.gpu_node.limits import KILL_TIMEOUT_MS
from worker.gpu_node.process_actor import BUFFERED_MAX, ProcessActor

SPEC = ProcessSpec(("true",))


class Play:
    def __init__(self) -> None:
        self.actor = ProcessActor(SPEC)
        self.harness = Harness(self.actor)

    def subscribe(self) -> Inbox:
        inbox = Inbox(Started, Output, Exited, Error)
        self.harness.tell(Subscribe(self.harness.system.spawn(inbox)))
        return inbox


def facts(inbox: Inbox) -> list[object]:
    return [message for _, message in inbox.drain()]


@pytest.mark.spec("S2 3.3")
def test_what_came_before_the_first_subscriber_is_kept_for_it_and_later_ones_hear_the_rest() -> None:
    play = Play()
    assert play.harness.effects() == [SpawnChild(SPEC)]
    play.harness.tell(Started(5))
    play.harness.tell(Output("stdout", b"a"))
    first = play.subscribe()
    assert facts(first) == [Started(5), Output("stdout", b"a")] and play.actor.pid == 5
    second = play.subscribe()
    play.harness.tell(Exited(0))
    assert facts(first) == facts(second) == [Exited(0)]


@pytest.mark.spec("S2 3.3")
def test_write_close_and_stop_in_order() -> None:
    play = Play()
    play.harness.effects()
    play.harness.tell(Started(5))
    for command in (WriteStdin(b"1"), Close(), WriteStdin(b"2"), Close(), Stop()):
        play.harness.tell(command)
    assert play.harness.effects() == [WriteChild(b"1"), CloseChild(), SignalChild(kill=False)]
    play.harness.advance(KILL_TIMEOUT_MS - 1)
    assert play.harness.effects() == []
    play.harness.advance(1)
    assert play.harness.effects() == [SignalChild(kill=True)]


@pytest.mark.spec("S2 3.3")
def test_a_child_that_has_ended_is_not_written_to_and_not_killed() -> None:
    for end in (Exited(1), Error("no such program")):
        play = Play()
        play.harness.effects()
        inbox = play.subscribe()
        play.harness.tell(end)
        play.harness.tell(WriteStdin(b"x"))
        play.harness.tell(Stop())
        play.harness.system.stop(play.harness.address)
        play.harness.advance(KILL_TIMEOUT_MS)
        assert play.harness.effects() == [] and facts(inbox) == [end]


def test_only_the_shell_can_say_what_the_child_did() -> None:
    play = Play()
    inbox = play.subscribe()
    play.harness.tell(Started(9), src=b"x" * 32)
    assert facts(inbox) == [] and play.actor.pid is None


def test_output_without_a_subscriber_is_bounded() -> None:
    play = Play()
    for number in range(BUFFERED_MAX + 10):
        play.harness.tell(Output("stderr", str(number).encode()))
    assert len(facts(play.subscribe())) == BUFFERED_MAX
