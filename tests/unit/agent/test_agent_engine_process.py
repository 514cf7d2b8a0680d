"""The engine as a real child process: its messages, its page, and each way in which it can die."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from common.bus import Bus
from common.codec import Message
from common.loop import Loop
from common.messages.engine import (
    EngineDone,
    EngineEncode,
    EngineEncoded,
    EngineFault,
    EngineInfer,
    EngineReady,
    Fatal,
    Initialize,
    Progress,
    Shutdown,
    TokenDelta,
)
from worker.agent.engine_process import UNSENT_BYTES_MAX, EngineProcess
from worker.agent.events import EngineEvent, EngineExited, EngineHungUp, PageRead

FAKE = Path(__file__).with_name("fake_engine.py")
ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 60


class Stage:
    """An engine process in a real loop."""

    def __init__(self, how: str) -> None:
        self.bus = Bus()
        self.loop = Loop(self.bus.poller)
        self.heard: list[object] = []
        command = (sys.executable, str(FAKE), how)
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.engine = EngineProcess(self.loop, self.heard.append, command=command, environ=environ)

    def until(self, kind: type, count: int = 1) -> list[object]:
        """Turn until `count` events of a kind were heard."""
        end = time.monotonic() + LIMIT_S
        while len(found := [event for event in self.heard if isinstance(event, kind)]) < count:
            assert time.monotonic() < end, f"waited {LIMIT_S} s for {kind.__name__}, heard {self.heard}"
            self.loop.turn(50)
        return found

    def messages(self) -> list[Message]:
        return [event.message for event in self.heard if isinstance(event, EngineEvent)]

    def exit(self) -> EngineExited:
        (event,) = self.until(EngineExited)
        assert isinstance(event, EngineExited)
        for _ in range(3):
            self.loop.turn(0)
        assert [item for item in self.heard if isinstance(item, EngineExited)] == [event], "told once"
        assert not self.engine.running
        return event


@pytest.fixture
def stages() -> Iterator[dict[str, Stage]]:
    made: dict[str, Stage] = {}

    class Stages(dict[str, Stage]):
        def __missing__(self, how: str) -> Stage:
            self[how] = made[how] = Stage(how)
            self[how].engine.start()
            return self[how]

    yield Stages()
    for stage in made.values():
        stage.engine.close()
        stage.loop.close()
        stage.bus.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_messages_go_both_ways_and_a_shutdown_ends_with_status_0(stages: dict[str, Stage]) -> None:
    stage = stages["well"]
    stage.engine.send(Initialize())
    stage.engine.send(EngineInfer(request_id=3, prompt="to be or not"))
    stage.until(EngineEvent, 6)
    ready, *deltas, done = stage.messages()
    assert isinstance(ready, EngineReady) and ready.pid == stage.engine.pid
    assert "".join(delta.text for delta in deltas if isinstance(delta, TokenDelta)) == "to be or not "
    assert isinstance(done, EngineDone) and done.tokens_generated == 4
    stage.engine.read_page()
    assert next(event for event in stage.heard if isinstance(event, PageRead)).phase == "loading"
    stage.engine.send(Shutdown())
    assert stage.exit() == EngineExited("the engine exited with status 0", 0)


def test_a_message_larger_than_the_socket_buffer_arrives_whole(stages: dict[str, Stage]) -> None:
    stage = stages["well"]
    prompt = "x" * 1_000_000
    for request_id in range(4):
        stage.engine.send(EngineEncode(request_id=request_id, prompt=prompt))
    stage.until(EngineEvent, 4)
    for request_id, message in enumerate(stage.messages()):
        assert isinstance(message, EngineEncoded) and message.request_id == request_id
        assert len(message.tokens) == len(prompt)


def test_what_was_said_before_the_death_is_heard_before_it(stages: dict[str, Stage]) -> None:
    stage = stages["flood"]
    assert stage.exit().status == 0
    assert [message.done for message in stage.messages() if isinstance(message, Progress)] == list(range(20_000))


@pytest.mark.parametrize(
    ("how", "sentence", "status"),
    [
        ("exit", "the engine exited with status 7", 7),
        ("garbage", "the engine sent garbage: a frame of 5 bytes holds no message", -9),
        ("huge", "the engine sent garbage: a frame of 4294967295 bytes is larger than the 4194304 allowed", -9),
        ("foreign", "the engine sent garbage: Shutdown does not belong on this side of the link", -9),
        ("cut", "the engine closed its link in the middle of a message (8 bytes)", None),
    ],
)
def test_each_way_to_misbehave_ends_the_engine_with_one_sentence(
    stages: dict[str, Stage], how: str, sentence: str, status: int | None
) -> None:
    ended = stages[how].exit()
    assert ended.reason == sentence
    assert status is None or ended.status == status


def test_an_engine_that_hangs_up_and_stays_is_told_so_that_it_can_be_killed(stages: dict[str, Stage]) -> None:
    stage = stages["closes"]
    stage.until(EngineHungUp)
    assert stage.engine.running
    stage.engine.kill()
    assert stage.exit() == EngineExited("the engine was killed by SIGKILL (out of memory?)", -9)


def test_the_last_words_of_a_fatal_engine_come_before_its_death(stages: dict[str, Stage]) -> None:
    stage = stages["fatal"]
    assert stage.exit() == EngineExited("the engine exited with status 1", 1)
    assert stage.messages() == [Fatal(error="no such device: MOON")]


def test_a_death_with_unread_messages_keeps_its_status(stages: dict[str, Stage]) -> None:
    stage = stages["exit"]
    stage.engine.send(Initialize())
    assert stage.exit() == EngineExited("the engine exited with status 7", 7)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_engine_is_noticed_and_named(stages: dict[str, Stage], number: signal.Signals) -> None:
    stage = stages["well"]
    stage.engine.send(Initialize())
    stage.until(EngineEvent)
    os.kill(stage.engine.pid, number)
    ended = stage.exit()
    assert ended.status == -number and number.name in ended.reason
    stage.engine.send(Initialize())
    stage.engine.kill()
    stage.engine.read_page()


def test_kill_works_on_an_engine_that_hears_nothing(stages: dict[str, Stage]) -> None:
    stage = stages["deaf"]
    os.kill(stage.engine.pid, signal.SIGSTOP)
    stage.engine.kill()
    assert stage.exit().status == -9


def test_an_engine_that_reads_nothing_is_ended_before_it_fills_the_memory(stages: dict[str, Stage]) -> None:
    stage = stages["deaf"]
    for _ in range(2 + UNSENT_BYTES_MAX // 1_000_000):
        stage.engine.send(EngineEncode(request_id=1, prompt="x" * 1_000_000))
    assert stage.exit().reason.startswith("the engine has not read ")


def test_a_message_that_is_too_large_harms_nobody(stages: dict[str, Stage]) -> None:
    stage = stages["well"]
    stage.engine.send(EngineEncode(request_id=8, prompt="x" * 5_000_000))
    (fault,) = stage.messages()
    assert isinstance(fault, EngineFault) and fault.request_id == 8 and "larger than" in fault.error
    stage.engine.send(Initialize())
    stage.until(EngineEvent, 2)


def test_a_command_that_does_not_exist_is_told_as_an_exit() -> None:
    bus = Bus()
    loop = Loop(bus.poller)
    heard: list[object] = []
    engine = EngineProcess(loop, heard.append, command=("/no/such/python",))
    engine.start()
    assert heard == [EngineExited("the engine could not be started: /no/such/python: No such file or directory", None)]
    engine.close()
    loop.close()
    bus.close()


def test_no_engine_outlives_its_agent(stages: dict[str, Stage]) -> None:
    stage = stages["deaf"]
    pid = stage.engine.pid
    stage.engine.close()
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    assert not is_alive(pid)


def test_the_engine_writes_into_the_agents_own_stderr(
    stages: dict[str, Stage], capfd: pytest.CaptureFixture[str]
) -> None:
    assert stages["exit"].exit().status == 7
    assert "fake engine: exit" in capfd.readouterr().err


def test_no_descriptor_is_left_open() -> None:
    stage = Stage("exit")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        stage.heard.clear()
        stage.engine.start()
        stage.exit()
    assert len(os.listdir("/proc/self/fd")) == before
    stage.loop.close()
    stage.bus.close()
