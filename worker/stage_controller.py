"""StageController: what one stage of a run may do next, as one pure table (S1 6.5, 6.6; rust-swactor.md 4.5).

Two instances of it live in a worker: the engine runs the step half (ObjectLoaded, StepCompleted), the agent the
lifecycle half (design.md 4). Facts go in as messages of NodeAgentMsg; commands and lifecycle events come out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import msgspec

from common.codec import Message
from common.messages.node_agent import (
    DeviceObjectsReleased,
    GgufSource,
    LocalEdgesStopped,
    MarkInboundEdgeReady,
    MarkOutboundEdgeReady,
    MarkWeightsReady,
    MarkWorkerReady,
    ObjectLoaded,
    ProvisionStage,
    StageFailed,
    StageInboundEdgeWire,
    StageOutboundEdgeWire,
    StageProvisionWire,
    StepCompleted,
    StopRun,
    TokenizerSource,
    WorkerCrashed,
    WorkerRingsQuiesced,
    WorkerRoleReset,
)


class StageState(StrEnum):
    """The logical states of S1 6.5."""

    UNPROVISIONED = "unprovisioned"
    PROVISIONING = "provisioning"
    WAITING = "waiting for stage readiness"
    READY_IDLE = "ready idle"
    BUSY = "busy executing step"
    FAULTED = "faulted"
    STOPPING = "stopping"
    STOPPED = "stopped"


class FaultReason(StrEnum):
    """Why a stage faults (rust-swactor.md 4.5)."""

    UNAUTHORIZED_PROVISION = "UnauthorizedProvision"
    SEQUENCE_VIOLATION = "SequenceViolation"
    WORKER_CRASHED = "WorkerCrashed"
    STEP_FAILED = "StepFailed"
    OBJECT_FAILED = "ObjectFailed"
    OUTPUT_FAULT = "OutputFault"
    EDGE_FAULT = "EdgeFault"


_REPORTED = frozenset(
    {FaultReason.STEP_FAILED, FaultReason.OBJECT_FAILED, FaultReason.OUTPUT_FAULT, FaultReason.EDGE_FAULT}
)
"""What StageFailed may name; the others have a cause of their own."""


EDGES = ("inbound_edge", "outbound_edge", "feedback_in", "feedback_out")
"""The fields of a provision that new edges change."""


class Command:
    """Base of what the controller wants done."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class EstablishInboundEdge(Command):
    """Accept the inbound edge; edge is None in direct mode. Answered by MarkInboundEdgeReady."""

    edge_id: int
    edge: StageInboundEdgeWire | None


@dataclass(frozen=True, slots=True)
class EstablishOutboundEdge(Command):
    """Connect the outbound edge; edge is None in direct mode. Answered by MarkOutboundEdgeReady."""

    edge_id: int
    edge: StageOutboundEdgeWire | None


@dataclass(frozen=True, slots=True)
class RenewEdges(Command):
    """Close all edges, forget their sequence, then establish this provision's. Answered as the two above."""

    provision: StageProvisionWire


@dataclass(frozen=True, slots=True)
class ConfigureWorkerRole(Command):
    """Tell the engine which part of the model it is."""

    run_id: int
    stage_index: int
    stage_count: int
    layer_start: int
    layer_end_exclusive: int | None


@dataclass(frozen=True, slots=True)
class LoadWeights(Command):
    """Load and warm up. Answered by MarkWeightsReady."""

    model_id: str
    gguf_source: GgufSource
    tokenizer: TokenizerSource
    layer_start: int
    layer_end_exclusive: int | None
    max_context: int | None


@dataclass(frozen=True, slots=True)
class ExecuteStep(Command):
    """Compute on one inbound object; step_id equals the sequence. Answered by StepCompleted or StageFailed."""

    step_id: int
    input_edge_id: int
    object_id: int
    sequence: int
    output_edge_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseInputHandle(Command):
    """The inbound object is no longer in use."""

    object_id: int
    handle_generation: int
    handle_id: int


@dataclass(frozen=True, slots=True)
class StopLocalEdges(Command):
    """First step of the teardown. Answered by LocalEdgesStopped and WorkerRingsQuiesced."""

    run_id: int


@dataclass(frozen=True, slots=True)
class ReleaseRunDeviceObjects(Command):
    """Second step: free weights and caches. Answered by DeviceObjectsReleased."""

    run_id: int


@dataclass(frozen=True, slots=True)
class ResetRole(Command):
    """Third step: forget the stage. Answered by WorkerRoleReset."""

    run_id: int


class Lifecycle:
    """Base of what the controller reports."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class WeightsReady(Lifecycle):
    """The weights are loaded; again for each repeated provision."""


@dataclass(frozen=True, slots=True)
class StageReady(Lifecycle):
    """Worker, weights and both edges are ready; again for each repeated provision."""


@dataclass(frozen=True, slots=True)
class StepAccepted(Lifecycle):
    """The object of this sequence is being computed."""

    sequence: int


@dataclass(frozen=True, slots=True)
class StageFault(Lifecycle):
    """The stage takes no more work. detail: one sentence, or empty where the reason says it all."""

    reason: FaultReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StageStopped(Lifecycle):
    """The whole teardown was performed."""


Output = Command | Lifecycle
Rule = Callable[["StageController", "Message"], list[Output]]


class StageController:
    """One stage. `handle(fact)` changes the state and returns what follows from it, in order.

    A fact that the table of the present state does not name is dropped: it is stale, foreign or too early.
    """

    TABLE: ClassVar[dict[StageState, dict[type[Message], Rule]]] = {}

    def __init__(self, authorized_orchestrator: bytes, node_id: int) -> None:
        self.authorized_orchestrator = authorized_orchestrator
        self.node_id = node_id
        self.provision: StageProvisionWire | None = None
        self.worker_ready = False
        self.weights_ready = False
        self.inbound_ready = False
        self.outbound_ready = False
        self.stage_ready_emitted = False
        self.busy = False
        self.expected_sequence = 0
        self.active_input: ObjectLoaded | None = None
        self.fault: StageFault | None = None
        self.stopping_run: int | None = None
        self.local_edges_stopped = False
        self.worker_rings_quiesced = False
        self.release_reset_requested = False
        self.device_objects_released = False
        self.worker_role_reset = False
        self.stopped = False

    @property
    def state(self) -> StageState:
        """The logical state, derived from the facts so that it cannot contradict them."""
        if self.stopped:
            return StageState.STOPPED
        if self.stopping_run is not None:
            return StageState.STOPPING
        if self.fault:
            return StageState.FAULTED
        if self.provision is None:
            return StageState.UNPROVISIONED
        if self.stage_ready_emitted:
            return StageState.BUSY if self.busy else StageState.READY_IDLE
        if self.weights_ready or self.inbound_ready or self.outbound_ready:
            return StageState.WAITING
        return StageState.PROVISIONING

    def handle(self, fact: Message) -> list[Output]:
        """Apply one fact."""
        rule = self.TABLE[self.state].get(type(fact))
        return rule(self, fact) if rule else []

    def check(self) -> None:
        """Raise AssertionError where the facts contradict each other."""
        assert self.busy == (self.active_input is not None), "busy without an input, or an input without a step"
        assert not self.busy or self.stage_ready_emitted, "a step before the stage was ready"
        assert not self.weights_ready or self.provision is not None, "weights of no provision"
        if self.stage_ready_emitted:
            ready = (self.provision is not None, self.worker_ready, self.weights_ready)
            assert all((*ready, self.inbound_ready, self.outbound_ready)), "ready without every prerequisite"
        if self.local_edges_stopped or self.worker_rings_quiesced:
            assert self.stopping_run is not None, "teardown facts without a stop"
        quiet = self.local_edges_stopped and self.worker_rings_quiesced
        assert self.release_reset_requested == quiet, "released while an edge moves, or not released after it"
        if self.device_objects_released or self.worker_role_reset:
            assert self.release_reset_requested, "released before it was asked"
        released = self.device_objects_released and self.worker_role_reset
        assert self.stopped == released, "stopped before everything was released, or not after it"
        assert not (self.stopped and self.busy), "a step in a stopped stage"
        assert self.expected_sequence >= 0

    # --- provisioning -----------------------------------------------------------------------------------------
    def _refusal(self, wire: StageProvisionWire) -> str:
        """Why S1 6.6 does not allow this provision, or empty."""
        if wire.authorized_orchestrator != self.authorized_orchestrator:
            return "the provision names another orchestrator than this worker was started for"
        if wire.node_id != self.node_id:
            return f"the provision is for node {wire.node_id}, this worker is node {self.node_id}"
        return ""

    def _first_provision(self, fact: Message) -> list[Output]:
        assert isinstance(fact, ProvisionStage)
        wire = fact.provision
        if refusal := self._refusal(wire):
            return self._fault(FaultReason.UNAUTHORIZED_PROVISION, refusal)
        self.provision = wire
        span = (wire.layer_start, wire.layer_end_exclusive)
        return [
            EstablishInboundEdge(wire.inbound_edge_id, wire.inbound_edge),
            EstablishOutboundEdge(wire.outbound_edge_id, wire.outbound_edge),
            ConfigureWorkerRole(wire.run_id, wire.stage_index, wire.stage_count, *span),
            LoadWeights(wire.model_id, wire.gguf_source, wire.tokenizer, *span, wire.max_context),
        ]

    def _next_provision(self, fact: Message) -> list[Output]:
        """A repeat is not executed again but answered again; anything else is invalid and faults the stage."""
        assert isinstance(fact, ProvisionStage)
        if fact.provision == self.provision:
            return self._answers()
        if self._is_renewal(fact.provision):
            return self._renew(fact.provision)
        refusal = self._refusal(fact.provision) or "the stage already has another provision"
        return self._fault(FaultReason.UNAUTHORIZED_PROVISION, refusal)

    def _faulted_provision(self, fact: Message) -> list[Output]:
        """Nothing is executed any more, but for new edges where an edge was all that failed."""
        assert isinstance(fact, ProvisionStage) and self.fault is not None
        if self.fault.reason is FaultReason.EDGE_FAULT and self._is_renewal(fact.provision):
            return self._renew(fact.provision)
        return self._answers()

    def _repeat_answer(self, _fact: Message) -> list[Output]:
        """In a stopped stage nothing is executed any more; the sender learns how it stands."""
        return self._answers()

    def _is_renewal(self, wire: StageProvisionWire) -> bool:
        """A neighbour was replaced: the same stage, with other edges."""
        mine = self.provision
        if mine is None or wire.generation <= mine.generation or None in (wire.inbound_edge, wire.outbound_edge):
            return False
        same = {name: getattr(mine, name) for name in ("generation", *EDGES)}
        return msgspec.structs.replace(wire, **same) == mine

    def _renew(self, wire: StageProvisionWire) -> list[Output]:
        self.provision, self.fault = wire, None
        self.inbound_ready = self.outbound_ready = self.stage_ready_emitted = False
        self.busy, self.active_input, self.expected_sequence = False, None, 0
        return [RenewEdges(wire), *self._answers()]

    def _answers(self) -> list[Output]:
        if self.stopped:
            return [StageStopped()]
        if self.fault:
            return [self.fault]
        answers: list[Output] = [WeightsReady()] if self.weights_ready else []
        return [*answers, StageReady()] if self.stage_ready_emitted else answers

    # --- readiness --------------------------------------------------------------------------------------------
    def _worker_ready(self, _fact: Message) -> list[Output]:
        self.worker_ready = True
        return self._ready_if_complete()

    def _weights_ready(self, fact: Message) -> list[Output]:
        assert isinstance(fact, MarkWeightsReady) and self.provision is not None
        mine = (self.provision.run_id, self.provision.node_id, self.provision.stage_index)
        if self.weights_ready or (fact.run_id, fact.node_id, fact.stage_index) != mine:
            return []
        self.weights_ready = True
        return [WeightsReady(), *self._ready_if_complete()]

    def _inbound_ready(self, fact: Message) -> list[Output]:
        assert isinstance(fact, MarkInboundEdgeReady) and self.provision is not None
        self.inbound_ready |= fact.edge_id == self.provision.inbound_edge_id
        return self._ready_if_complete()

    def _outbound_ready(self, fact: Message) -> list[Output]:
        assert isinstance(fact, MarkOutboundEdgeReady) and self.provision is not None
        self.outbound_ready |= fact.edge_id == self.provision.outbound_edge_id
        return self._ready_if_complete()

    def _ready_if_complete(self) -> list[Output]:
        facts = (self.worker_ready, self.weights_ready, self.inbound_ready, self.outbound_ready)
        if self.provision is None or self.stage_ready_emitted or not all(facts):
            return []
        self.stage_ready_emitted = True
        return [StageReady()]

    # --- steps ------------------------------------------------------------------------------------------------
    def _object_loaded(self, fact: Message) -> list[Output]:
        assert isinstance(fact, ObjectLoaded) and self.provision is not None
        if fact.edge_id != self.provision.inbound_edge_id:
            return []
        if fact.sequence != self.expected_sequence:
            detail = f"object {fact.object_id} has sequence {fact.sequence}, expected was {self.expected_sequence}"
            return self._fault(FaultReason.SEQUENCE_VIOLATION, detail)
        self.busy, self.active_input = True, fact
        outputs = (self.provision.outbound_edge_id,)
        step = ExecuteStep(fact.sequence, fact.edge_id, fact.object_id, fact.sequence, outputs)
        return [step, StepAccepted(fact.sequence)]

    def _step_completed(self, fact: Message) -> list[Output]:
        assert isinstance(fact, StepCompleted)
        if self.active_input is None or fact.step_id != self.active_input.sequence:
            return []
        self.expected_sequence += 1
        return self._release_input()

    def _release_input(self) -> list[Output]:
        done, self.active_input, self.busy = self.active_input, None, False
        return [ReleaseInputHandle(done.object_id, done.handle_generation, done.handle_id)] if done else []

    # --- faults -----------------------------------------------------------------------------------------------
    def _crashed(self, fact: Message) -> list[Output]:
        assert isinstance(fact, WorkerCrashed)
        # Nobody is left who could use or release the input.
        self.active_input, self.busy = None, False
        return self._fault(FaultReason.WORKER_CRASHED, fact.reason)

    def _failed(self, fact: Message) -> list[Output]:
        assert isinstance(fact, StageFailed)
        reason = FaultReason(fact.reason) if fact.reason in _REPORTED else FaultReason.STEP_FAILED
        detail = fact.detail if fact.reason in _REPORTED else f"{fact.reason} {fact.detail}".strip()
        # These two end the running step. An edge or an object may fail beside a step that still reads its input:
        # that one is released by its StepCompleted or by the teardown.
        ended = reason in (FaultReason.STEP_FAILED, FaultReason.OUTPUT_FAULT)
        return [*(self._release_input() if ended else []), *self._fault(reason, detail)]

    def _fault(self, reason: FaultReason, detail: str) -> list[Output]:
        self.fault = StageFault(reason, detail)
        return [self.fault]

    # --- teardown ---------------------------------------------------------------------------------------------
    def _stop(self, fact: Message) -> list[Output]:
        assert isinstance(fact, StopRun)
        if self.provision is not None and fact.run_id != self.provision.run_id:
            return []
        self.stopping_run = fact.run_id
        return [StopLocalEdges(fact.run_id)]

    def _stop_again(self, fact: Message) -> list[Output]:
        assert isinstance(fact, StopRun)
        return [StageStopped()] if fact.run_id == self.stopping_run else []

    def _edges_stopped(self, fact: Message) -> list[Output]:
        assert isinstance(fact, LocalEdgesStopped)
        self.local_edges_stopped |= fact.run_id == self.stopping_run
        return self._release_when_quiet()

    def _rings_quiesced(self, fact: Message) -> list[Output]:
        assert isinstance(fact, WorkerRingsQuiesced)
        self.worker_rings_quiesced |= fact.run_id == self.stopping_run
        return self._release_when_quiet()

    def _release_when_quiet(self) -> list[Output]:
        quiet = self.local_edges_stopped and self.worker_rings_quiesced
        if not quiet or self.release_reset_requested or self.stopping_run is None:
            return []
        self.release_reset_requested = True
        return [ReleaseRunDeviceObjects(self.stopping_run), ResetRole(self.stopping_run)]

    def _objects_released(self, fact: Message) -> list[Output]:
        assert isinstance(fact, DeviceObjectsReleased)
        self.device_objects_released |= self.release_reset_requested and fact.run_id == self.stopping_run
        return self._stopped_when_released()

    def _role_reset(self, fact: Message) -> list[Output]:
        assert isinstance(fact, WorkerRoleReset)
        self.worker_role_reset |= self.release_reset_requested and fact.run_id == self.stopping_run
        return self._stopped_when_released()

    def _stopped_when_released(self) -> list[Output]:
        if not (self.device_objects_released and self.worker_role_reset):
            return []
        self.stopped = True
        self.active_input, self.busy = None, False
        return [StageStopped()]


def _table() -> dict[StageState, dict[type[Message], Rule]]:
    c = StageController
    faults: dict[type[Message], Rule] = {WorkerCrashed: c._crashed, StageFailed: c._failed}
    # An unprovisioned stage takes everything that can be true before it has work.
    unprovisioned: dict[type[Message], Rule] = {
        ProvisionStage: c._first_provision,
        MarkWorkerReady: c._worker_ready,
        StopRun: c._stop,
        **faults,
    }
    waiting: dict[type[Message], Rule] = {
        ProvisionStage: c._next_provision,
        MarkWorkerReady: c._worker_ready,
        MarkWeightsReady: c._weights_ready,
        MarkInboundEdgeReady: c._inbound_ready,
        MarkOutboundEdgeReady: c._outbound_ready,
        StopRun: c._stop,
        **faults,
    }
    # Readiness is complete: no fact can take it back. An object that comes while busy is dropped.
    busy: dict[type[Message], Rule] = {
        ProvisionStage: c._next_provision,
        StepCompleted: c._step_completed,
        StopRun: c._stop,
        **faults,
    }
    idle: dict[type[Message], Rule] = {**busy, ObjectLoaded: c._object_loaded}
    del idle[StepCompleted]
    return {
        StageState.UNPROVISIONED: unprovisioned,
        StageState.PROVISIONING: waiting,
        StageState.WAITING: waiting,
        StageState.READY_IDLE: idle,
        StageState.BUSY: busy,
        # The first fault stands; only the step that was running and the stop are still heard.
        StageState.FAULTED: {
            ProvisionStage: c._faulted_provision,
            StepCompleted: c._step_completed,
            StopRun: c._stop,
        },
        # Faults are ignored: the stage ends anyway.
        StageState.STOPPING: {
            StepCompleted: c._step_completed,
            LocalEdgesStopped: c._edges_stopped,
            WorkerRingsQuiesced: c._rings_quiesced,
            DeviceObjectsReleased: c._objects_released,
            WorkerRoleReset: c._role_reset,
        },
        StageState.STOPPED: {ProvisionStage: c._repeat_answer, StopRun: c._stop_again},
    }


StageController.TABLE = _table()
