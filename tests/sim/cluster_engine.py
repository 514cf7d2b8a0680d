"""A simulated worker: the real agent actors on a host, and an engine that answers as worker/engine does.

The engine's answer to a prompt follows from the prompt's text alone, so that a client can tell what it must get.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable
from functools import cache

from common.codec import Message
from common.datastream_publisher import DatastreamPublisherActor, StreamProducer
from common.messages import engine as wire
from common.messages.provision import NodeProvisionSpec
from common.messages.stream import StreamId
from common.redact import Redactor
from common.swim.actor import SwimActor
from common.swim.config import PROFILES
from tests.sim.cluster_stage import SimStage, Vocabulary, edge_bind, spawn_carrier
from tests.sim.cluster_world import PROMPT_MARK, SECRET, SimHost
from tests.sim.edge_net import EdgeNet
from worker.agent.core import NodeAgentActor
from worker.agent.events import (
    EngineEvent,
    EngineExited,
    EngineHungUp,
    EngineSend,
    KillEngine,
    PageRead,
    ReadPage,
    StartEngine,
    StopAsked,
    WorkerIdentity,
)
from worker.agent.records import BOOTSTRAP, CHANNELS, node_event
from worker.engine.stage_port import EdgeObject

_PROMPT = re.compile(rf"{PROMPT_MARK} (\w+) tokens=(\d+) size=(\d+)")
LONG_ANSWER = 1000
SYLLABLES = ("ä", "b", "汉", "d ")


def prompt_text(tag: str, tokens: int, size: int = 1) -> str:
    return f"{PROMPT_MARK} {tag} tokens={tokens} size={size}"


@cache
def answer(prompt: str) -> list[str]:
    """The texts of the tokens of the answer."""
    found = _PROMPT.search(prompt)
    assert found is not None, prompt
    tag, tokens, size = found[1], int(found[2]), int(found[3])
    return [f"{tag}.{at}{SYLLABLES[at % 4] * size}" for at in range(tokens)]


class SimEngine:
    """The engine process and its link. Times of its own; the agent may be frozen meanwhile."""

    def __init__(self, host: SimHost, seed: int, net: EdgeNet, vocabulary: Vocabulary) -> None:
        self.host = host
        self._net, self._vocabulary = net, vocabulary
        self.stage: SimStage | None = None
        """In planned mode."""
        self.agent = b""
        self.rng = random.Random(seed)
        self.running = False
        self.loaded = False
        """Whether the weights were ever loaded: what WeightsReady has to mean."""
        self.fault_next = ""
        self.hang = False
        """From now on it says nothing any more."""
        self._work: deque[object] = deque()
        self._busy = False
        self._link_ms = 0
        self._cancelled: set[int] = set()
        self._waiting: set[int] = set()
        self._steps = 0
        self._life = 0
        self._paused_until = 0
        self._is_first = True

    # --- the agent's effects --------------------------------------------------------------------------------------
    def start(self) -> None:
        self.running = True

    def send(self, message: Message) -> None:
        """Over the socketpair: first in, first out."""
        now = self.host.world.now
        self._link_ms = max(self._link_ms, now + self.rng.randint(0, 2))
        self.later(self._link_ms - now, lambda: self._receive(message))

    def kill(self) -> None:
        self.die("the engine was killed by SIGKILL", -9)

    def read_page(self) -> None:
        self.host.deliver(self.agent, PageRead("decode", self._steps, self.host.world.now * 1_000_000))

    def pause(self, ms: int) -> None:
        """SIGSTOP, and SIGCONT after `ms`: what was due meanwhile comes then."""
        self._paused_until = self.host.world.now + ms

    # --- life -----------------------------------------------------------------------------------------------------
    def die(self, reason: str, status: int) -> None:
        """The link closes first, the exit status comes a moment later; after the agent's end nobody hears."""
        if not self.running:
            return
        self.gone()
        self.host.later(self.rng.randint(0, 2), lambda: self.host.deliver(self.agent, EngineHungUp()))
        self.host.later(self.rng.randint(3, 20), lambda: self.host.deliver(self.agent, EngineExited(reason, status)))

    def gone(self) -> None:
        """The process is no more."""
        self.running = False
        self._life += 1
        if self.stage is not None:
            self.stage.gone()

    @property
    def computes(self) -> bool:
        """A stage's sequence is under way."""
        steps = self.stage.role._steps if self.stage is not None else None
        return steps is not None and steps.request_id is not None

    def later(self, ms: int, call: Callable[[], None]) -> None:
        """In this process, unless it is dead or hangs by then; while it is stopped, after that."""
        life = self._life

        def due() -> None:
            if not self.running or self._life != life or self.hang:
                return
            if self.host.world.now < self._paused_until:
                self.host.world.at(self._paused_until, due)
            else:
                call()

        self.host.world.at(self.host.world.now + ms, due)

    def tell(self, message: Message) -> None:
        """To the agent."""
        self.host.deliver(self.agent, EngineEvent(message))

    def bump(self) -> None:
        """The progress page."""
        self._steps += 1

    # --- work -----------------------------------------------------------------------------------------------------
    def _receive(self, message: Message) -> None:
        if isinstance(message, wire.Initialize) and message.edge is not None:
            self.stage = SimStage(self, self._net, self._vocabulary)
        if self.stage is not None:
            is_done = self.stage.port.receive(message)
            self.stage.pump_soon()
            if is_done:
                return
        if isinstance(message, wire.Shutdown):
            self.later(self.rng.randint(1, 60), lambda: self.die("the engine ended with status 0", 0))
        elif isinstance(message, wire.Cancel):
            if message.request_id in self._waiting:
                self._cancelled.add(message.request_id)
            else:
                self.tell(wire.Cancelled(request_id=message.request_id, known=False))
        elif isinstance(message, wire.EngineEncode | wire.EngineDecode) and self.stage is not None:
            if isinstance(message, wire.EngineEncode) and self.fault_next:
                error, self.fault_next = self.fault_next, ""
                self.tell(wire.EngineFault(request_id=message.request_id, error=error))
            else:
                self.tell(self.stage.tokenize(message))
        else:
            if isinstance(message, wire.EngineInfer):
                self._waiting.add(message.request_id)
            if isinstance(message, wire.ReleaseRun | wire.ResetRole):
                self._cancelled |= self._waiting
            self.queue(message)

    def queue(self, message: object) -> None:
        """For the main thread."""
        self._work.append(message)
        self._next()

    def _next(self) -> None:
        if not self._busy and self._work:
            self._busy = True
            self._do(self._work.popleft())

    def _done(self) -> None:
        self._busy = False
        self._next()

    def _reply(self, message: Message, ms: int) -> None:
        def due() -> None:
            self.tell(message)
            self._done()

        self.later(ms, due)

    def _do(self, message: object) -> None:
        if self.stage is not None and type(message) in self.stage.role.handlers:
            self.later(self._step_ms() if isinstance(message, EdgeObject) else 0, lambda: self._stage_turn(message))
            return
        match message:
            case wire.Initialize():
                candidates = self.stage.port.candidates if self.stage else []
                ready = wire.EngineReady(pid=1, backend="sim", elapsed_ms=1, edge_candidates=candidates)
                self._reply(ready, self.rng.randint(50, 800))
            case wire.ConfigureRole():
                self._is_first = message.stage_index == 0
                self._reply(wire.RoleConfigured(), 1)
            case wire.LoadWeights():
                self._load(0, self.rng.randint(1, 8))
            case wire.EngineInfer():
                self._infer(message)
            case wire.ReleaseRun():
                self._reply(wire.Released(), self.rng.randint(1, 30))
            case wire.ResetRole():
                self._reply(wire.RoleReset(), self.rng.randint(1, 10))
            case _:
                self._done()

    def _step_ms(self) -> int:
        return self.rng.choice((0, 1, 3, 20))

    def _stage_turn(self, message: object) -> None:
        assert self.stage is not None
        self.stage.role.handlers[type(message)](message)
        self._done()

    def _load(self, step: int, steps: int) -> None:
        if step < steps:
            self.tell(wire.Progress(phase="tensors", done=step, total=steps))
            self.later(self.rng.randint(20, 300), lambda: self._load(step + 1, steps))
            return
        self.loaded = True
        if self.stage is not None:
            self.stage.loaded(self._is_first)
        self.tell(wire.WeightsLoaded(weights_bytes=1, kv_bytes=1, layers=2, max_context=512, elapsed_ms=1))
        self._done()

    def _infer(self, ask: wire.EngineInfer) -> None:
        texts = answer(ask.prompt)[: ask.max_tokens or None]
        # A very long answer comes fast enough to fill a window while a link stalls.
        step_ms = self.rng.choice((2, 10, 40, 150)) if len(texts) <= LONG_ANSWER else 1
        fails_at = self.rng.randrange(len(texts)) if self.fault_next else -1

        def end(message: Message) -> None:
            self._waiting.discard(ask.request_id)
            if ask.request_id in self._cancelled:
                self._cancelled.discard(ask.request_id)
                message = wire.Cancelled(request_id=ask.request_id)
            self.tell(message)
            self._done()

        def step(at: int) -> None:
            self._steps += 1
            if ask.request_id in self._cancelled:
                end(wire.Cancelled(request_id=ask.request_id))
            elif at == fails_at:
                error, self.fault_next = self.fault_next, ""
                end(wire.EngineFault(request_id=ask.request_id, error=error))
            elif at >= len(texts):
                final = "".join(texts)
                done = wire.EngineDone(
                    request_id=ask.request_id,
                    final_text=final,
                    tokens_generated=len(texts),
                    elapsed_ms=at * step_ms,
                    prompt_tokens=3,
                    finish_reason="length" if ask.max_tokens and len(texts) == ask.max_tokens else "stop",
                )
                end(done)
            else:
                count = min(self.rng.randint(1, 3), len(texts) - at)
                text = "".join(texts[at : at + count])
                self.tell(wire.TokenDelta(request_id=ask.request_id, text=text, tokens=count))
                self.later(step_ms * count, lambda: step(at + count))

        self.later(step_ms, lambda: step(0))


class SimWorker:
    """One worker process: agent host and engine."""

    def __init__(
        self,
        host: SimHost,
        run: bytes,
        spec: NodeProvisionSpec,
        orchestrator: bytes,
        *,
        net: EdgeNet,
        vocabulary: Vocabulary,
        is_stage: bool,
    ) -> None:
        run_id, node_id, stage = spec.run_id, spec.node_id, spec.stage_index
        self.host, self.run_id, self.node_id, self.stage = host, run_id, node_id, stage
        host.node.run = run
        redactor = Redactor([SECRET])
        producer = StreamProducer(StreamId(node=str(node_id), life=run_id), redact=redactor.redact)
        for channel in CHANNELS:
            producer.channel(channel)
        self.publisher = host.emit_to = host.node.spawn(DatastreamPublisherActor(producer))
        self.swim = SwimActor(logical_id=host.name, config=PROFILES["lan"])
        swim = host.node.spawn(self.swim)
        edge = edge_bind(host.name, run, host.node.identity.key) if is_stage else None
        self.identity = WorkerIdentity(run_id, node_id, stage, orchestrator, edge=edge)
        self.engine = SimEngine(host, host.world.rng.getrandbits(32), net, vocabulary)
        host.perform(StartEngine, lambda _, __: self.engine.start())
        host.perform(EngineSend, lambda _, effect: self.engine.send(effect.message))
        host.perform(ReadPage, lambda _, __: self.engine.read_page())
        host.perform(KillEngine, lambda _, __: self.engine.kill())
        self.actor = NodeAgentActor(self.identity, self.publisher, swim)
        self.agent = self.engine.agent = host.node.spawn(self.actor)
        spawn_carrier(host, self.agent)
        host.on_exit.append(self._gone)
        host.wake(host.world.now)

    def _gone(self, _: SimHost) -> None:
        self.engine.gone()

    def stop(self, why: str) -> None:
        """A line or the end of its standard input."""
        self.host.deliver(self.agent, StopAsked(why))

    def leak(self) -> None:
        """A record that quotes the secret: it must leave redacted."""
        self.host.node.system.effects.append((self.agent, _leak(self)))
        self.host.wake(self.host.world.now)


def _leak(worker: SimWorker) -> object:
    from common.effects import Observed

    return Observed(BOOTSTRAP, f'{{"phase":"env","detail":"HF_TOKEN={SECRET}"}}'.encode())


__all__ = ["SimEngine", "SimWorker", "answer", "node_event", "prompt_text"]
