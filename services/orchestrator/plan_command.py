"""`mvp-orchestrator plan`: what a planned run would be, without starting anything (S1 4.4; issue 4).

Takes the five arguments of a run. Resolves the configuration, reads the GGUF's index and prints layers, bytes and edges
per stage, what does not fit and why, and the speed that a stated formula predicts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.addresses import Role
from common.config import resolve
from common.config_errors import ConfigError, Information
from common.config_slices import OrchestratorSlice
from services.config_resolver.slices import slice_for
from services.orchestrator.planner import DTYPE_BYTES, PlanError, RunPlan, StagePlan
from services.orchestrator.planner_facts import make_plan

BANDWIDTH_BYTES_S = 6e9  # what one worker thread reads of memory a second on a common server; measured ones are higher
HOP_S = 0.0005  # one record over a local edge and two thread switches
FORMULA = (
    "tokens/s = 1 / (sum over stages of bytes read per token / {bandwidth:.0f} GB/s + hops x {hop:.1f} ms); "
    "add the one-way delay of each hop between machines"
)


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """The exit status: 0 when the run can be planned, 1 with one sentence on stderr when not."""
    try:
        config = resolve(argv, environ, Path.cwd(), executable=Path(sys.argv[0]))
        part = slice_for(config, Role.ORCHESTRATOR, Path("/nonexistent"))
        assert isinstance(part, OrchestratorSlice)
        plan = make_plan(part)
    except Information as text:
        sys.stdout.write(str(text))
        return 0
    except (ConfigError, PlanError) as error:
        sys.stderr.write(f"mvp-orchestrator plan: {error}\n")
        return 1
    sys.stdout.write(report(plan, part, memory_available()))
    return 0


def memory_available() -> int:
    """MemAvailable of this machine in bytes; 0 where nobody says."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def stage_bytes(plan: RunPlan, stage: StagePlan) -> tuple[int, int, int]:
    """(weights in the file, weights in memory, key-value cache) of a stage."""
    facts = plan.facts
    is_last = stage.stage_index == len(plan.stages) - 1
    span = slice(stage.layer_start, stage.layer_end_exclusive)
    in_file = sum(facts.layer_bytes[span]) + (facts.head_bytes if is_last else 0)
    in_memory = sum(facts.layer_memory_bytes[span]) + (facts.head_memory_bytes if is_last else 0)
    return in_file, in_memory, stage.layers * facts.kv_bytes_per_layer


def tokens_per_second(plan: RunPlan) -> float:
    """By FORMULA, on one host."""
    read = sum(stage_bytes(plan, stage)[1] for stage in plan.stages)
    return 1 / (read / BANDWIDTH_BYTES_S + hops(plan) * HOP_S)


def hops(plan: RunPlan) -> int:
    """Edges that a token crosses until the next one begins: fed back directly, it does not wait for the gateway."""
    return len(plan.stages) if plan.feedback is not None else len(plan.edges)


def report(plan: RunPlan, config: OrchestratorSlice, available: int) -> str:
    """The whole text. available: bytes of memory of this machine, 0 if unknown."""
    facts = plan.facts
    row = facts.hidden_dim * DTYPE_BYTES[facts.dtype]
    lines = [
        f"model {facts.model_id}: {facts.num_layers} layers, width {facts.hidden_dim}, context {facts.max_seq_len}, "
        f"vocabulary {facts.vocab_size}",
        f"{len(plan.stages)} stage(s) on {config.provider}, activation rows {facts.dtype}: {row} bytes a token",
        "",
        "stage  node  layers    file       memory     kv cache",
    ]
    total = 0
    for stage in plan.stages:
        in_file, in_memory, cache = stage_bytes(plan, stage)
        total += in_memory + cache
        span = f"{stage.layer_start}..{stage.layer_end_exclusive - 1}"
        sizes = f"{_mib(in_file):<10} {_mib(in_memory):<10} {_mib(cache)}"
        lines.append(f"{stage.stage_index:<6} {stage.node_id:<5} {span:<9} {sizes}")
    lines += ["", "edge  kind        from     to       window"]
    for edge in plan.all_edges:
        ends = [
            "gateway" if end.stage_index is None else f"stage {end.stage_index}"
            for end in (edge.producer, edge.consumer)
        ]
        lines.append(
            f"{edge.edge_id:<5} {edge.kind:<11} {ends[0]:<8} {ends[1]:<8} {_mib(edge.ring_spec.data_capacity)}"
        )
    lines += ["", f"predicted {tokens_per_second(plan):.0f} tokens/s on one host"]
    lines.append(FORMULA.format(bandwidth=BANDWIDTH_BYTES_S / 1e9, hop=HOP_S * 1000))
    if config.provider == "process" and available and total > available:
        lines.append(
            f"does not fit: the stages need {_mib(total)} together, this machine has {_mib(available)} available; "
            "use more machines ([provider] kind = docker, swarm or external) or a smaller [model] max_context"
        )
    if len(plan.stages) > 1:
        whole = 1 / (sum(stage_bytes(plan, s)[1] for s in plan.stages) / BANDWIDTH_BYTES_S + 2 * HOP_S)
        lines.append(
            f"one stage is faster where the model fits one machine ({_mib(total)}): about {whole:.0f} tokens/s, "
            "since a token passes the stages one after the other; set pipeline_stages = 1"
        )
    return "\n".join(lines) + "\n"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
