"""`mvp-orchestrator plan`: what a planned run would be, without starting anything (S1 4.4; issue 4).

Takes the five arguments of a run. Resolves the configuration, reads the GGUF's index and prints layers, bytes and edges
per stage, what does not fit and why, and the speed that a stated formula predicts. One machine's memory is known: this.
The only side effect is for a model on a hub: its header, a few megabytes, comes into the cache.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.addresses import Role
from common.config import resolve
from common.config_errors import ConfigError, Information
from common.config_slices import OrchestratorSlice
from common.free_memory import free_memory
from services.config_resolver.slices import slice_for
from services.orchestrator.planner import DTYPE_BYTES, TOKEN_BYTES, PlanError, RunPlan, StagePlan
from services.orchestrator.planner_facts import make_plan

CPU_BYTES_S = 6e9  # weights that one thread reads and multiplies a second on a common server; more threads read more
GPU_BYTES_S = 300e9  # of a small card's memory
HOP_S = 0.0005  # one record over a local edge and two thread switches
FORMULA = (
    "tokens/s = 1 / (sum over stages of weight bytes read per token / bytes a second + hops x {hop:.1f} ms): "
    "{cpu:.0f} GB/s and the file's bytes for a CPU thread, {gpu:.0f} GB/s and float16 for a GPU; "
    "add the one-way delay of each hop between machines"
)
ROWS = 64  # of a prompt in one activation record


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """The exit status: 0 when the run can be planned, 1 with one sentence on stderr when not."""
    try:
        config = resolve(argv, environ, Path.cwd(), executable=Path(sys.argv[0]))
        part = slice_for(config, Role.ORCHESTRATOR, Path("/nonexistent"))
        assert isinstance(part, OrchestratorSlice)
        plan = make_plan(part, config.hf_token.reveal() if config.hf_token is not None else None)
    except Information as text:
        sys.stdout.write(str(text))
        return 0
    except KeyboardInterrupt:
        return 130  # as a shell says it
    except (ConfigError, PlanError) as error:
        sys.stderr.write(f"mvp-orchestrator plan: {error}\n")
        return 1
    sys.stdout.write(report(plan, part, free_memory()))
    return 0


@dataclass(frozen=True, slots=True)
class StageSize:
    """Bytes of a stage. packed: its weights as the C kernels hold and read them, which is as the file does; float16: as
    a GPU and the portable kernels do; out: what leaves it for each token."""

    packed: int
    float16: int
    cache: int
    out: int


def stage_size(plan: RunPlan, stage: StagePlan) -> StageSize:
    """Of one stage. The first one reads its few rows of the embedding in the file."""
    facts = plan.facts
    is_last = stage.stage_index == len(plan.stages) - 1
    span = slice(stage.layer_start, stage.layer_end_exclusive)
    return StageSize(
        packed=sum(facts.layer_bytes[span]) + (facts.head_bytes if is_last else 0),
        float16=sum(facts.layer_memory_bytes[span]) + (facts.head_memory_bytes if is_last else 0),
        cache=stage.layers * facts.kv_bytes_per_layer,
        out=TOKEN_BYTES if is_last else row_bytes(plan),
    )


def row_bytes(plan: RunPlan) -> int:
    """Of one token between two stages."""
    return plan.facts.hidden_dim * DTYPE_BYTES[plan.facts.dtype]


def hops(plan: RunPlan) -> int:
    """Edges that a token crosses until the next one begins: fed back directly, it does not wait for the gateway."""
    return len(plan.stages) if plan.feedback is not None else len(plan.edges)


def tokens_per_second(plan: RunPlan, *, gpu: bool = False, hop_count: int | None = None) -> float:
    """By FORMULA, on one host. hop_count: of the plan, if not said."""
    sizes = [stage_size(plan, stage) for stage in plan.stages]
    packed_s = sum(size.packed for size in sizes) / CPU_BYTES_S
    read_s = sum(size.float16 for size in sizes) / GPU_BYTES_S if gpu else packed_s
    return 1 / (read_s + (hops(plan) if hop_count is None else hop_count) * HOP_S)


def report(plan: RunPlan, config: OrchestratorSlice, available: int) -> str:
    """The whole text. available: of free_memory."""
    facts = plan.facts
    lines = [
        f"model {facts.model_id}: {facts.num_layers} layers, width {facts.hidden_dim}, context {facts.max_seq_len}, "
        f"vocabulary {facts.vocab_size}",
        f"{len(plan.stages)} stage(s) on {config.provider}, activation rows {facts.dtype}: {row_bytes(plan)} bytes a "
        f"token, {_mib(ROWS * row_bytes(plan), 2)} for {ROWS} tokens of a prompt",
    ]
    if config.pipeline_placement == "measured":
        lines.append("these are even layers; the run places them by what its workers measure, and leaves slow ones out")
    lines += ["", "stage  node  layers    packed (CPU) float16 (GPU) kv cache    out a token"]
    for stage in plan.stages:
        size = stage_size(plan, stage)
        span = f"{stage.layer_start}..{stage.layer_end_exclusive - 1}"
        sizes = f"{_mib(size.packed):<12} {_mib(size.float16):<13} {_mib(size.cache):<11} {size.out} B"
        lines.append(f"{stage.stage_index:<6} {stage.node_id:<5} {span:<9} {sizes}")
    lines += ["", "edge  kind           from     to       window"]
    for edge in plan.all_edges:
        ends = [
            "gateway" if end.stage_index is None else f"stage {end.stage_index}"
            for end in (edge.producer, edge.consumer)
        ]
        window = _mib(edge.ring_spec.data_capacity, 2)
        lines.append(f"{edge.edge_id:<5} {edge.kind:<14} {ends[0]:<8} {ends[1]:<8} {window}")
    lines += [
        "",
        f"predicted {tokens_per_second(plan):.0f} tokens/s with one CPU thread a worker, "
        f"{tokens_per_second(plan, gpu=True):.0f} on GPUs, {hops(plan)} hops a token on one host",
        FORMULA.format(cpu=CPU_BYTES_S / 1e9, gpu=GPU_BYTES_S / 1e9, hop=HOP_S * 1000),
        *_verdicts(plan, config, available),
    ]
    return "\n".join(lines) + "\n"


def _verdicts(plan: RunPlan, config: OrchestratorSlice, available: int) -> list[str]:
    """What does not fit and why, and whether one stage would do."""
    sizes = [stage_size(plan, stage) for stage in plan.stages]
    weights, cache = sum(size.packed for size in sizes), sum(size.cache for size in sizes)
    total = weights + cache
    need = f"{_mib(total)} together, {_mib(weights)} of weights and {_mib(cache)} of cache"
    found = []
    fits_here = not available or total <= available
    if config.provider == "process" and not fits_here:
        found.append(
            f"does not fit: the stages need {need}; this machine has {_mib(available)} available; "
            "use more machines ([provider] kind = docker, swarm or external) or a smaller [model] max_context"
        )
    elif config.provider != "process":
        largest = max(size.packed + size.cache for size in sizes)
        on_gpu = max(size.float16 + size.cache for size in sizes)
        found.append(
            f"the stages need {need}; the largest {_mib(largest)} on a CPU, {_mib(on_gpu)} on a GPU: "
            "each worker's machine must have as much"
        )
    if len(plan.stages) > 1 and fits_here:
        whole = tokens_per_second(plan, hop_count=0)
        found.append(
            f"one stage is faster where the model fits one machine ({_mib(total)}): about {whole:.0f} tokens/s, "
            "since a token passes the stages one after the other; set pipeline_stages = 1"
        )
    return found


def _mib(size: int, digits: int = 1) -> str:
    return f"{size / 2**20:.{digits}f} MiB"
