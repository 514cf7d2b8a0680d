"""The node agent under random events and a lawful engine: every request is settled exactly once (S1 9.10)."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from common.codec import Message
from common.effects import Exit, OwnerGone, SendFailed
from common.messages.engine import (
    Cancel,
    Cancelled,
    EngineDone,
    EngineEncode,
    EngineEncoded,
    EngineFault,
    EngineInfer,
    Fatal,
    Progress,
    Released,
    ReleaseRun,
    ResetRole,
    RoleReset,
    TokenDelta,
)
from common.messages.node_agent import CancelRequest, EncodePrompt, StopRun
from common.messages.orchestrator import ObserveStageFault, ObserveStageStopped
from common.messages.prompt import Done, Fault, PromptEncoded, RequestCancelled, TextDelta, TokenizerFault
from common.messages.service import Lease
from tests.unit.agent.playbook import (
    ACK,
    ENGINE_READY,
    GATEWAY_INBOX,
    ORCHESTRATOR,
    RUN,
    WEIGHTS,
    Agent,
    prompt,
    provision,
)
from worker.agent.events import EngineExited, KillEngine, PageRead, StopAsked

GATEWAY = b"G" * 32


class Worker(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.agent = Agent()
        self.queue: list[Message] = []  # what the engine still has to do
        self.running: list[int] = []
        self.engine_alive = True
        self.next_id = 1
        self.asked: dict[int, str] = {}
        self.answers: Counter[int] = Counter()
        self.cancelled: set[int] = set()
        self.unheard: set[int] = set()
        self.stage_faults: set[str] = set()
        self.exit: Exit | None = None
        self.collect()

    def collect(self) -> None:
        for message in self.agent.told():
            if not self.engine_alive:
                continue
            if isinstance(message, EngineInfer):
                assert not self.running, "two generations at once"
                self.running.append(message.request_id)
            self.queue.append(message)
        for effect in self.agent.effects():
            if isinstance(effect, Exit):
                assert self.exit in (None, effect), "two different ends"
                self.exit = effect
            elif isinstance(effect, KillEngine) and self.engine_alive:
                self.engine_dies("the engine was killed by SIGKILL")
        for dst, message in self.agent.sent():
            match message:
                case TextDelta():
                    assert dst == GATEWAY_INBOX and not self.answers[message.request_id]
                    assert message.request_id not in self.cancelled
                case Done() | Fault() | PromptEncoded() | TokenizerFault():
                    assert dst == GATEWAY_INBOX
                    assert message.request_id not in self.cancelled, "an answer beside the cancel's confirmation"
                    self.answers[message.request_id] += 1
                case RequestCancelled():
                    assert dst == GATEWAY
                    self.cancelled.discard(message.request_id)
                    self.answers[message.request_id] = max(1, self.answers[message.request_id])
                case ObserveStageFault():
                    self.stage_faults.add(message.reason)
                case ObserveStageStopped():
                    assert not self.running or not self.engine_alive, "stopped while the engine generates"

    def engine_dies(self, reason: str) -> None:
        self.engine_alive = False
        self.queue.clear()
        self.running.clear()
        self.agent.tell(EngineExited(reason, -9))
        self.collect()

    @precondition(lambda self: self.exit is None)
    @rule()
    def start_up(self) -> None:
        if self.engine_alive and not self.agent.actor.engine_ready:
            self.agent.engine(ENGINE_READY)
        self.agent.tell(ACK)
        self.agent.tell(provision())
        if self.engine_alive and not self.agent.actor.core.weights_ready:
            self.agent.engine(Progress(phase="tensors", done=1, total=2), WEIGHTS)
        self.collect()

    @rule(fresh=st.booleans())
    def asks(self, fresh: bool) -> None:
        if fresh or self.next_id == 1:
            self.asked[self.next_id] = "infer"
            self.next_id += 1
            self.agent.tell(prompt(self.next_id - 1))
        else:
            self.asked[self.next_id] = "encode"
            self.next_id += 1
            self.agent.tell(EncodePrompt(request_id=self.next_id - 1, prompt="x", reply_to=GATEWAY_INBOX))
        self.collect()

    @rule(back=st.integers(1, 3))
    def cancels(self, back: int) -> None:
        request_id = max(0, self.next_id - back)
        if self.asked.get(request_id) == "encode":
            return
        if not self.answers[request_id]:
            self.cancelled.add(request_id)
        self.agent.tell(CancelRequest(request_id=request_id), src=GATEWAY)
        self.collect()

    @precondition(lambda self: self.running)
    @rule()
    def listener_is_lost(self) -> None:
        request_id = self.running[0]
        if not self.answers[request_id] and request_id not in self.cancelled:
            self.unheard.add(request_id)
        self.agent.tell(SendFailed(GATEWAY_INBOX, TextDelta(request_id=request_id, text="x"), "peer_lost"))
        self.collect()

    @precondition(lambda self: self.running)
    @rule(end=st.sampled_from(["", "", "done", "fault"]))
    def engine_generates(self, end: str) -> None:
        request_id = self.running[0]
        self.queue = [item for item in self.queue if not isinstance(item, EngineInfer)]
        if not end:
            self.agent.engine(TokenDelta(request_id=request_id, text="x", tokens=1))
        elif end == "fault":
            self.running.clear()
            self.agent.engine(EngineFault(request_id=request_id, error="no"))
        else:
            self.running.clear()
            done = EngineDone(
                request_id=request_id,
                final_text="x",
                tokens_generated=1,
                elapsed_ms=1,
                prompt_tokens=1,
                finish_reason="stop",
            )
            self.agent.engine(done)
        self.collect()

    @precondition(lambda self: self.queue)
    @rule()
    def engine_works(self) -> None:
        message = self.queue.pop(0)
        match message:
            case Cancel():
                known = message.request_id in self.running
                if known:
                    self.running.remove(message.request_id)
                self.agent.engine(Cancelled(request_id=message.request_id, known=known))
            case EngineEncode():
                self.agent.engine(EngineEncoded(request_id=message.request_id, tokens=[1]))
            case ReleaseRun():
                self.agent.engine(Released())
            case ResetRole():
                self.agent.engine(RoleReset())
            case _:
                pass
        self.collect()

    @rule(what=st.sampled_from(["stop_run", "lease", "page", "other_run", "time"]))
    def life(self, what: str) -> None:
        match what:
            case "stop_run":
                self.agent.tell(StopRun(run_id=RUN))
            case "lease":
                self.agent.tell(Lease(ttl_ms=60_000))
            case "page":
                self.agent.tell(PageRead("loading", self.next_id, 1))
            case "other_run":
                self.agent.tell(StopRun(run_id=RUN + 1), src=ORCHESTRATOR)
            case _:
                self.agent.advance(300)
        self.collect()

    @rule(how=st.sampled_from(["death", "fatal", "shutdown", "owner", "time"]), dice=st.integers(0, 5))
    def ends(self, how: str, dice: int) -> None:
        if dice:
            return
        if how == "death" and self.engine_alive:
            self.engine_dies("the engine exited with status 1")
        elif how == "fatal" and self.engine_alive:
            self.agent.engine(Fatal(error="cannot go on"))
        elif how == "shutdown":
            self.agent.tell(StopAsked("standard input said shutdown"))
        elif how == "owner":
            self.agent.tell(OwnerGone())
        else:
            self.agent.advance(70_000)
        self.collect()

    @invariant()
    def at_most_one_answer(self) -> None:
        assert all(count <= 1 for count in self.answers.values()), self.answers

    def teardown(self) -> None:
        """Whatever happened: when the engine is gone, everything has been settled, and the worker ends."""
        if self.engine_alive:
            self.engine_dies("the engine was killed by SIGKILL")
        self.agent.advance(70_000)
        self.collect()
        assert self.exit is not None
        owed = {number for number in self.asked if not self.answers[number]} - self.unheard
        assert owed == set(), f"never answered: {owed}"
        assert not self.cancelled - set(self.answers), "a cancel without its confirmation"


def test_every_request_is_settled_exactly_once_whatever_happens() -> None:
    run_state_machine_as_test(Worker, settings=settings(max_examples=250, stateful_step_count=40))
