"""A simulated pipeline stage: the engine's real StagePort, StageRole and StageSteps around a toy model.

The toy's tokens say which answer they belong to, so that a client can tell what it must get; its rows say where they
stand, so that a row that is lost, doubled or out of order gives another text. Each endpoint's secret key is the planted
secret.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from common.addresses import KEY_BYTES
from common.codec import Message
from common.edges.carrier import EdgeCarrierActor, carrier_address
from common.effects import JobDone, RunJob
from common.messages import engine as wire
from common.messages.node_agent import EmbeddedGguf, LocalPath
from services.orchestrator.planner import ModelFacts, plan_run
from services.prompt_gateway.token_edges import TokenEdgeShell
from tests.sim.cluster_world import SECRET, SimHost
from tests.sim.edge_net import EdgeNet, SimEdgeSockets
from worker.engine.mailbox import Mailbox
from worker.engine.parts import Inputs
from worker.engine.progress import ProgressPage
from worker.engine.stage_port import StagePort
from worker.engine.stage_role import StageRole

if TYPE_CHECKING:
    from tests.sim.cluster_engine import SimEngine

EOS = 0
WIDTH = 2  # a row: token and position
VOCABULARY = 4096
CONTEXT = 256
CHUNK = 4
LAYERS = 6
F32 = npt.NDArray[np.float32]


class Vocabulary:
    """Token ids of one world: a prompt's own one, then one for each text of its answer."""

    def __init__(self, answer: Callable[[str], list[str]]) -> None:
        self._answer = answer
        self._prompts: dict[str, int] = {}
        self._texts: list[str] = ["<end>"]
        self._next: list[int] = [EOS]

    def encode(self, prompt: str) -> list[int]:
        """Some tokens: the prompt's own id, again and again."""
        if prompt not in self._prompts:
            texts = self._answer(prompt)
            base = len(self._texts)
            assert base + len(texts) < VOCABULARY, "the simulated vocabulary is too small"
            self._prompts[prompt] = base
            self._texts += ["<prompt>", *texts]
            self._next += [*range(base + 1, base + 1 + len(texts)), EOS]
        return [self._prompts[prompt]] * (1 + len(prompt) % 11)

    def text(self, token: int) -> str:
        return self._texts[token]

    def after(self, token: int) -> int:
        return self._next[token] if 0 <= token < len(self._next) else EOS


class ToyModel:
    """A part of a model (StageModel): it keeps its place in the sequence as a key-value cache does."""

    max_context = CONTEXT

    def __init__(self, vocabulary: Vocabulary, is_first: bool, fault: Callable[[], str]) -> None:
        self.vocabulary, self.is_first, self.fault = vocabulary, is_first, fault
        self.length = 0

    def _embed(self, ids: list[int]) -> F32:
        return np.array([[token, 0] for token in ids], np.float32)

    def run_blocks(self, inputs: Inputs, start: int, tick: Callable[[], None] | None = None) -> F32:
        rows = self._embed(inputs) if isinstance(inputs, list) else inputs
        if error := self.fault():
            raise RuntimeError(error)
        if start == 0:
            self.length = 0
        where = np.arange(start, start + len(rows), dtype=np.float32)
        out = rows.copy()
        if self.is_first:
            out[:, 1] = where
        if start != self.length or not np.array_equal(out[:, 1], where):
            out[:, 0] = -1
        self.length = start + len(rows)
        return out

    def run_to_logits(self, inputs: Inputs, start: int, tick: Callable[[], None] | None = None) -> F32:
        row = self.run_blocks(inputs, start, tick)[-1]
        logits = np.zeros(VOCABULARY, np.float32)
        logits[self.vocabulary.after(int(row[0]))] = 1
        return logits


class SimMailbox(Mailbox):
    """Hands commands to the engine's simulated main thread."""

    def __init__(self, engine: SimEngine) -> None:
        super().__init__()
        self._engine = engine
        self.is_waiting = True

    def put(self, message: object) -> None:
        self._engine.queue(message)


class SimStage:
    """The stage of one engine; made by Initialize."""

    def __init__(self, engine: SimEngine, net: EdgeNet, vocabulary: Vocabulary) -> None:
        self.engine, self.vocabulary = engine, vocabulary
        self.page = ProgressPage(None)
        self.mailbox = SimMailbox(engine)
        self.sockets: SimEdgeSockets | None = None
        self.port = StagePort(
            self.mailbox,
            engine.tell,
            self._wake,
            transport=lambda keys: self._opened(net.transport(engine.host.name)(keys)),
            clock_ns=lambda: engine.host.world.now * 1_000_000,
        )
        self.port.alive = engine.bump
        self.role = StageRole(self.mailbox, self.port, self.page, engine.tell, lambda _: None)
        self.step_fault = ""
        self.steps = 0
        self.model: ToyModel | None = None
        self._pump_due = -1

    def _opened(self, sockets: SimEdgeSockets) -> SimEdgeSockets:
        self.sockets = sockets
        sockets.on_ready = self._wake
        return sockets

    def _wake(self) -> None:
        self._pump_at(0)

    def _pump_at(self, ms: int) -> None:
        due = self.engine.host.world.now + ms
        if self._pump_due < 0 or due < self._pump_due:
            self._pump_due = due
            self.engine.later(ms, lambda: self._pump(due))

    def _pump(self, due: int) -> None:
        if due != self._pump_due:
            return
        self._pump_due = -1
        self.port.pump()
        self.port.check()
        if (ms := self.port.wait_ms()) is not None:
            self._pump_at(max(1, ms))

    def pump_soon(self) -> None:
        """A message of the agent may have set a deadline."""
        self._pump_at(0)

    def loaded(self, is_first: bool) -> None:
        """The weights are here."""
        self.model = ToyModel(self.vocabulary, is_first, self._fault)
        toy = SimpleNamespace(
            model=self.model,
            header=SimpleNamespace(embedding_length=WIDTH, vocab_size=VOCABULARY),
            tokenizer=SimpleNamespace(vocabulary=SimpleNamespace(end_ids={EOS})),
            chunk=CHUNK,
        )
        self.role.loaded(cast(Any, toy))

    def _fault(self) -> str:
        self.engine.bump()
        error, self.step_fault = self.step_fault, ""
        return error

    def tokenize(self, message: wire.EngineEncode | wire.EngineDecode) -> Message:
        """The port thread's own work."""
        if self.model is None:
            return wire.EngineFault(request_id=message.request_id, error="the engine has no weights loaded")
        if isinstance(message, wire.EngineDecode):
            texts = [self.vocabulary.text(token) for token in message.tokens]
            lengths = [len(text) for text in texts]
            return wire.EngineDecoded(request_id=message.request_id, text="".join(texts), lengths=lengths)
        tokens = self.vocabulary.encode(message.prompt)
        return wire.EngineEncoded(request_id=message.request_id, tokens=tokens)

    def gone(self) -> None:
        """The engine process is no more."""
        if self.sockets is not None:
            self.sockets.close()


def edge_bind(name: str, run: bytes, key: bytes) -> wire.EdgeBind:
    """What the launch file gives a pipeline worker's engine."""
    secret = SECRET.encode().ljust(KEY_BYTES, b"!")[:KEY_BYTES]
    return wire.EdgeBind(run=run, public_key=key, secret_key=secret, addresses=[f"sim://{name}"])


def spawn_carrier(host: SimHost, owner: bytes) -> None:
    """As worker/agent/service.py does."""
    key = host.node.identity.key
    host.node.spawn(EdgeCarrierActor(owner), address=carrier_address(key))


class GatewayEdges:
    """The gateway's TokenEdgeShell on a SimHost: what the shell asks of its host, and no more."""

    def __init__(self, host: SimHost, gateway: bytes, net: EdgeNet) -> None:
        self._host, self._net = host, net
        self.node, self.node_key, self.deliver = host.node, host.node.identity.key, host.deliver
        self.loop = SimpleNamespace(
            now_ms=lambda: host.world.now, add_fd=self._add_fd, remove_fd=lambda _: host.before_turn.clear()
        )
        self.bus_file = SimpleNamespace(keys=None, run_dir=_Nowhere())
        self.sockets: list[SimEdgeSockets] = []
        self.shell = TokenEdgeShell(cast(Any, self), gateway, self._open, clock_ns=lambda: host.world.now * 1_000_000)
        host.on_exit.append(lambda _: [sockets.close() for sockets in self.sockets])

    @property
    def were_open(self) -> bool:
        """Both token edges have been open."""
        port = self.shell._port
        if port is None:
            return False
        ends = [*(out.core for out in port._out.values()), *port._desk.consumers]
        return len(ends) == 2 and all(end._was_open for end in ends)

    def on_effect(self, kind: type, handler: Callable[[bytes, Any], None], *, at_once: bool = False) -> None:
        self._host.perform(kind, handler)

    def run_actors(self) -> None:
        """The simulated host handles what was delivered in the same turn anyway."""

    def _open(self, keys: Any) -> SimEdgeSockets:
        sockets = SimEdgeSockets(self._net, self._host.name)
        self.sockets.append(sockets)
        return sockets

    def _add_fd(self, fd: int, call: Callable[[], None]) -> None:
        self._net.sockets[fd].on_ready = lambda: self._host.wake(self._host.world.now)

        def turn() -> None:
            call()
            if self.shell._port is not None:
                self.shell._port.check()

        self._host.before_turn.append(turn)


class _Nowhere:
    """The run directory: only a prefix of names."""

    def __truediv__(self, name: str) -> str:
        return f"/sim/{name}"


def plan_job(host: SimHost, address: bytes, job: RunJob, stages: int, error: str) -> None:
    """The planner's job: it looks at a file that nobody has here."""
    facts = ModelFacts(
        model_id="sim",
        gguf_source=LocalPath(path="/m.gguf"),
        tokenizer=EmbeddedGguf(),
        num_layers=LAYERS,
        hidden_dim=WIDTH,
        max_seq_len=CONTEXT,
        vocab_size=VOCABULARY,
        eos_token_ids=(EOS,),
    )
    config = job.args["config"]
    feedback = config.pipeline_feedback == "direct"
    where = {"run_id": config.run_id, "node_id": config.node_id}
    plan = None if error else plan_run(facts, stages, **where, feedback=feedback)
    host.later(host.world.rng.randint(1, 40), lambda: host.deliver(address, JobDone(job.kind, job.key, plan, error)))


__all__ = ["GatewayEdges", "SimStage", "Vocabulary", "edge_bind", "plan_job", "spawn_carrier"]
