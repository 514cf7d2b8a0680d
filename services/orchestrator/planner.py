"""The run planner: model facts in, a checked RunPlan out, or one rejection sentence (S1 4.4, 5.3, 7.4, 10.4).

Pure. Fixed linear placement: stage i of N serves layers floor(L·i/N) to floor(L·(i+1)/N) on node `node_id + 1 + i`;
edges: token-in 1, activations 2..N, token-out N + 1 (design.md 6 rows 18, 19). A plan is projected to
StageProvisionWires once the workers' endpoints are known. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from common.edge_records import HEADER_BYTES
from common.messages.node_agent import (
    GgufSource,
    ObjectSpec,
    RingSpec,
    StageInboundEdgeWire,
    StageOutboundEdgeWire,
    StageProvisionWire,
    TokenizerSource,
)
from common.messages.orchestrator import EndpointWire
from common.messages.provision import NodeProvisionSpec, ProviderMount

U32_MAX, U64_MAX = 2**32 - 1, 2**64 - 1
TOKEN_BYTES = 4  # u32 little-endian ids
TOKEN_RING_ALIGNMENT, ACTIVATION_RING_ALIGNMENT = 8, 64
DTYPE_BYTES = {"f32": 4, "f16": 2}
DTYPES = {"float32": "f32", "float16": "f16"}
"""[pipeline] activation_dtype → the name in an ObjectSpec."""


class PlanRejectionKind(StrEnum):
    """Why the planner refuses (rust-swactor.md 5)."""

    UNKNOWN_NODE = "UnknownNode"
    DUPLICATE_STAGE_ASSIGNMENT = "DuplicateStageAssignment"
    MISSING_STAGE = "MissingStage"
    INVALID_STAGE_COUNT = "InvalidStageCount"
    EDGE_ENDPOINT_MISMATCH = "EdgeEndpointMismatch"
    MODEL_STAGE_LAYOUT_MISMATCH = "ModelStageLayoutMismatch"
    INVALID_OBJECT_SPEC = "InvalidObjectSpec"
    UNSUPPORTED_SHAPE_OR_LAYOUT = "UnsupportedShapeOrLayout"
    INVALID_RING_SPEC = "InvalidRingSpec"
    UNKNOWN_STAGE = "UnknownStage"
    MISSING_EDGE = "MissingEdge"


class PlanError(ValueError):
    """The run cannot be planned; one sentence with the numbers and the way out."""


class PlanRejection(PlanError):
    """The planner's own refusal: "plan pipeline run: <kind>: <why>"."""

    def __init__(self, kind: PlanRejectionKind, why: str) -> None:
        super().__init__(f"plan pipeline run: {kind}: {why}")
        self.kind = kind


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the planner knows of a model. max_seq_len: tokens; dtype: of activation rows, "f32" | "f16"."""

    model_id: str
    gguf_source: GgufSource
    tokenizer: TokenizerSource
    num_layers: int
    hidden_dim: int
    max_seq_len: int
    vocab_size: int
    dtype: str = "f32"
    eos_token_ids: tuple[int, ...] = ()
    layer_bytes: tuple[int, ...] = ()
    """Of each layer's tensors in the file; empty where nobody asked."""
    layer_memory_bytes: tuple[int, ...] = ()
    """Of each layer as a worker holds it: float16."""
    head_memory_bytes: int = 0
    embedding_bytes: int = 0
    head_bytes: int = 0
    kv_bytes_per_layer: int = 0
    file_bytes: int = 0
    """Of all tensors."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An end of an edge. stage_index None: the orchestrator's side (the prompt gateway)."""

    node_id: int
    stage_index: int | None = None


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """kind: TokenIn | Activation | TokenOut | TokenFeedback."""

    edge_id: int
    kind: str
    producer: Endpoint
    consumer: Endpoint
    object_spec: ObjectSpec
    ring_spec: RingSpec


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: its node, its layers [layer_start, layer_end_exclusive), its two edges."""

    stage_index: int
    node_id: int
    layer_start: int
    layer_end_exclusive: int
    inbound_edge_id: int
    outbound_edge_id: int

    @property
    def layers(self) -> int:
        """How many."""
        return self.layer_end_exclusive - self.layer_start


@dataclass(frozen=True, slots=True)
class RunPlan:
    """S1 5.3: everything that the run is, before any worker is started."""

    run_id: int
    node_id: int
    facts: ModelFacts
    stages: tuple[StagePlan, ...]
    edges: tuple[EdgePlan, ...]
    feedback: EdgePlan | None = None
    """From the last stage to the first, beside the way through the gateway."""

    @property
    def all_edges(self) -> tuple[EdgePlan, ...]:
        """With the feedback edge, if there is one."""
        return self.edges if self.feedback is None else (*self.edges, self.feedback)

    @property
    def token_in(self) -> EdgePlan:
        """The prompt's way to the first stage."""
        return self.edges[0]

    @property
    def token_out(self) -> EdgePlan:
        """The tokens' way back."""
        return self.edges[-1]

    def edge(self, edge_id: int) -> EdgePlan:
        """Raises PlanRejection MissingEdge."""
        for edge in self.edges:
            if edge.edge_id == edge_id:
                return edge
        raise PlanRejection(PlanRejectionKind.MISSING_EDGE, f"the plan has no edge {edge_id}")

    def stage(self, stage_index: int) -> StagePlan:
        """Raises PlanRejection UnknownStage."""
        for stage in self.stages:
            if stage.stage_index == stage_index:
                return stage
        raise PlanRejection(
            PlanRejectionKind.UNKNOWN_STAGE, f"stage {stage_index} is none of the plan's {len(self.stages)} stages"
        )


def layer_range(layers: int, stages: int, index: int) -> tuple[int, int]:
    """[start, end) of stage `index` (design.md 6 row 19)."""
    return layers * index // stages, layers * (index + 1) // stages


def plan_run(facts: ModelFacts, stages: int, *, run_id: int, node_id: int, feedback: bool = False) -> RunPlan:
    """The plan of `stages` stages. feedback: of tokens, directly from the last to the first. Raises PlanError."""
    if stages < 1:
        raise PlanRejection(
            PlanRejectionKind.INVALID_STAGE_COUNT, f"{stages} stages were asked for; choose pipeline_stages >= 1"
        )
    if stages > facts.num_layers:
        count = facts.num_layers
        way_out = f"choose pipeline_stages <= {count}"
        raise PlanError(f"pipeline_stages = {stages} exceeds GGUF layer count {count}; {way_out}")
    _check_facts(facts)
    if node_id + stages > U64_MAX:
        raise PlanRejection(PlanRejectionKind.UNKNOWN_NODE, f"node id {node_id} leaves no room for {stages} workers")
    spans = [(node_id + 1 + index, *layer_range(facts.num_layers, stages, index)) for index in range(stages)]
    return plan_placed(facts, spans, run_id=run_id, node_id=node_id, feedback=feedback)


def plan_placed(
    facts: ModelFacts, spans: Sequence[tuple[int, int, int]], *, run_id: int, node_id: int, feedback: bool = False
) -> RunPlan:
    """The plan of stages with these (node id, first layer, end). Raises PlanError."""
    stages = len(spans)
    placed = [
        StagePlan(index, node, start, end, index + 1, index + 2) for index, (node, start, end) in enumerate(spans)
    ]
    edges = tuple(_edges(facts, node_id, placed))
    feedback_edge = _feedback_edge(facts, placed) if feedback and stages > 1 else None
    plan = RunPlan(run_id, node_id, facts, tuple(placed), edges, feedback_edge)
    check_plan(plan)
    return plan


def _check_facts(facts: ModelFacts) -> None:
    for name, value in (("hidden_dim", facts.hidden_dim), ("max_seq_len", facts.max_seq_len)):
        if not 1 <= value <= U32_MAX:
            raise PlanRejection(
                PlanRejectionKind.UNSUPPORTED_SHAPE_OR_LAYOUT, f"{name} is {value}, it must be 1 to {U32_MAX}"
            )
    if facts.dtype not in DTYPE_BYTES:
        known = ", ".join(sorted(DTYPES))
        raise PlanRejection(
            PlanRejectionKind.UNSUPPORTED_SHAPE_OR_LAYOUT,
            f"activation rows of dtype {facts.dtype!r}; set [pipeline] activation_dtype to one of {known}",
        )


def _sized(value: int, what: str) -> int:
    """S1 10.4's overflow errors: sizes travel as u64."""
    if value > U64_MAX:
        raise PlanError(f"{what} ({value} bytes do not fit 64 bits); set a smaller [model] max_context")
    return value


def token_specs(facts: ModelFacts) -> tuple[ObjectSpec, RingSpec]:
    """Of token-in and token-out: one record holds a whole prompt."""
    extent = _sized(facts.max_seq_len * TOKEN_BYTES, "token ring size overflow while planning pipeline")
    capacity = _sized(HEADER_BYTES + extent, "token ring data capacity overflow while planning pipeline")
    return (
        ObjectSpec(max_extent=extent, alignment=TOKEN_BYTES, dtype="u32"),
        RingSpec(data_capacity=capacity, alignment=TOKEN_RING_ALIGNMENT),
    )


def activation_specs(facts: ModelFacts) -> tuple[ObjectSpec, RingSpec]:
    """Of an activation edge: the rows of a whole context fit the window."""
    width = DTYPE_BYTES[facts.dtype]
    what = "activation ring size overflow while planning pipeline"
    extent = _sized(_sized(facts.max_seq_len * facts.hidden_dim, what) * width, what)
    capacity = _sized(HEADER_BYTES + extent, "activation ring data capacity overflow while planning pipeline")
    return (
        ObjectSpec(max_extent=extent, alignment=width, dtype=facts.dtype),
        RingSpec(data_capacity=capacity, alignment=ACTIVATION_RING_ALIGNMENT),
    )


def _edges(facts: ModelFacts, node_id: int, stages: Sequence[StagePlan]) -> list[EdgePlan]:
    gateway = Endpoint(node_id)
    ends = [gateway, *(Endpoint(stage.node_id, stage.stage_index) for stage in stages), gateway]
    token, activation = token_specs(facts), activation_specs(facts)
    edges = []
    for index, (producer, consumer) in enumerate(pairwise(ends)):
        kind = "TokenIn" if index == 0 else "TokenOut" if index == len(stages) else "Activation"
        spec, ring = activation if kind == "Activation" else token
        edges.append(EdgePlan(index + 1, kind, producer, consumer, spec, ring))
    return edges


def _feedback_edge(facts: ModelFacts, stages: Sequence[StagePlan]) -> EdgePlan:
    """Its id follows token-out's."""
    ends = [Endpoint(stage.node_id, stage.stage_index) for stage in (stages[-1], stages[0])]
    spec, ring = token_specs(facts)
    return EdgePlan(len(stages) + 2, "TokenFeedback", ends[0], ends[1], spec, ring)


def check_plan(plan: RunPlan) -> None:
    """Every rule of a plan. Raises PlanRejection with its kind; a plan of `plan_run` passes."""
    kind = PlanRejectionKind
    count = len(plan.stages)
    if not count:
        raise PlanRejection(kind.INVALID_STAGE_COUNT, "the plan has no stage")
    indexes = [stage.stage_index for stage in plan.stages]
    if len(set(indexes)) != count or len({stage.node_id for stage in plan.stages}) != count:
        raise PlanRejection(kind.DUPLICATE_STAGE_ASSIGNMENT, "a stage or a node is assigned twice")
    if sorted(indexes) != list(range(count)):
        missing = min(set(range(count)) - set(indexes))
        raise PlanRejection(kind.MISSING_STAGE, f"stage {missing} of {count} is not assigned to a node")
    at = 0
    for stage in sorted(plan.stages, key=lambda stage: stage.stage_index):
        if stage.layer_start != at or stage.layers < 1:
            raise PlanRejection(
                kind.MODEL_STAGE_LAYOUT_MISMATCH,
                f"stage {stage.stage_index} has layers {stage.layer_start}..{stage.layer_end_exclusive}, "
                f"it must begin at layer {at} and hold at least one",
            )
        at = stage.layer_end_exclusive
    if at != plan.facts.num_layers:
        raise PlanRejection(
            kind.MODEL_STAGE_LAYOUT_MISMATCH, f"the stages end at layer {at} of {plan.facts.num_layers}"
        )
    _check_edges(plan)


def _check_edges(plan: RunPlan) -> None:
    kind = PlanRejectionKind
    nodes = {plan.node_id, *(stage.node_id for stage in plan.stages)}
    for edge in plan.all_edges:
        for end in (edge.producer, edge.consumer):
            if end.node_id not in nodes:
                raise PlanRejection(kind.UNKNOWN_NODE, f"edge {edge.edge_id} ends at node {end.node_id}")
        spec, ring = edge.object_spec, edge.ring_spec
        if spec.max_extent < 1 or spec.alignment < 1 or spec.max_extent % spec.alignment:
            raise PlanRejection(
                kind.INVALID_OBJECT_SPEC,
                f"edge {edge.edge_id} allows {spec.max_extent} bytes, no multiple of its alignment {spec.alignment}",
            )
        if ring.data_capacity < 1 or ring.alignment < 1 or ring.alignment & (ring.alignment - 1):
            raise PlanRejection(
                kind.INVALID_RING_SPEC,
                f"edge {edge.edge_id} has capacity {ring.data_capacity} and alignment {ring.alignment}; "
                "the capacity must be positive and the alignment a power of two",
            )
        if ring.data_capacity < HEADER_BYTES + spec.max_extent:
            raise PlanRejection(
                kind.INVALID_RING_SPEC,
                f"edge {edge.edge_id} has capacity {ring.data_capacity}, one record needs "
                f"{HEADER_BYTES + spec.max_extent}",
            )
    for stage in plan.stages:
        inbound, outbound = plan.edge(stage.inbound_edge_id), plan.edge(stage.outbound_edge_id)
        here = Endpoint(stage.node_id, stage.stage_index)
        if inbound.consumer != here or outbound.producer != here:
            raise PlanRejection(
                kind.EDGE_ENDPOINT_MISMATCH, f"stage {stage.stage_index} is not the end of its own edges"
            )


# --- what the plan is used for ------------------------------------------------------------------------------------
def node_specs(
    plan: RunPlan, image: str, mounts: Sequence[ProviderMount] = (), *, measure: bool = False
) -> list[NodeProvisionSpec]:
    """The workers to start (S1 5.3: before provisioning). measure: they are placed once more by what they measure."""
    return [
        NodeProvisionSpec(
            run_id=plan.run_id,
            node_id=stage.node_id,
            stage_index=stage.stage_index,
            image=image,
            mounts=list(mounts),
            measure=measure,
        )
        for stage in plan.stages
    ]


def inbound_wire(edge: EdgePlan, token: bytes) -> StageInboundEdgeWire:
    """The consumer's view."""
    return StageInboundEdgeWire(
        edge_id=edge.edge_id, kind=edge.kind, object_spec=edge.object_spec, ring_spec=edge.ring_spec, edge_token=token
    )


def outbound_wire(edge: EdgePlan, token: bytes, endpoints: Mapping[int, EndpointWire]) -> StageOutboundEdgeWire:
    """The producer's view. endpoints: by node id. Raises PlanError while the consumer's is not known."""
    endpoint = endpoints.get(edge.consumer.node_id)
    if endpoint is None:
        raise PlanError(f"missing runtime-ready endpoint for consumer node {edge.consumer.node_id}")
    return StageOutboundEdgeWire(
        edge_id=edge.edge_id,
        kind=edge.kind,
        object_spec=edge.object_spec,
        ring_spec=edge.ring_spec,
        consumer_node_id=edge.consumer.node_id,
        consumer_endpoint=endpoint,
        edge_token=token,
    )


def stage_wire(
    plan: RunPlan,
    stage_index: int,
    *,
    orchestrator: bytes,
    tokens: Mapping[int, bytes],
    endpoints: Mapping[int, EndpointWire],
    generation: int = 0,
) -> StageProvisionWire:
    """S1 6.6 for one stage (after readiness). tokens: edge id → edge_token. Raises PlanError."""
    stage = plan.stage(stage_index)
    inbound, outbound, fed = plan.edge(stage.inbound_edge_id), plan.edge(stage.outbound_edge_id), plan.feedback
    takes = fed if fed is not None and fed.consumer.stage_index == stage_index else None
    feeds = fed if fed is not None and fed.producer.stage_index == stage_index else None
    return StageProvisionWire(
        run_id=plan.run_id,
        authorized_orchestrator=orchestrator,
        node_id=stage.node_id,
        stage_index=stage.stage_index,
        stage_count=len(plan.stages),
        layer_start=stage.layer_start,
        layer_end_exclusive=stage.layer_end_exclusive,
        inbound_edge_id=inbound.edge_id,
        outbound_edge_id=outbound.edge_id,
        inbound_edge=inbound_wire(inbound, tokens[inbound.edge_id]),
        outbound_edge=outbound_wire(outbound, tokens[outbound.edge_id], endpoints),
        model_id=plan.facts.model_id,
        gguf_source=plan.facts.gguf_source,
        tokenizer=plan.facts.tokenizer,
        max_context=plan.facts.max_seq_len,
        generation=generation,
        feedback_in=inbound_wire(takes, tokens[takes.edge_id]) if takes else None,
        feedback_out=outbound_wire(feeds, tokens[feeds.edge_id], endpoints) if feeds else None,
    )
