"""From a GGUF to ModelFacts: the planner's only look at a file (S1 4.4, 9.3, 10.4).

Opens the file's index and reads no tensor. Of a model on a hub it first fetches just that index into the cache, so
that it can be inspected locally. Runs as a job: neither a hub nor a network file system may hang the run's loop.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from common.config_slices import OrchestratorSlice
from common.gguf import GgufError, GgufFile, ModelHeader
from common.hub_file import HubModel, RangesRefused, cached_whole, full_name, not_there, reason
from common.limits import HUB_HEADER_MS
from common.messages.node_agent import GgufSource, HuggingFaceGguf, LocalPath
from common.security import read_secret_file
from services.orchestrator.planner import DTYPES, ModelFacts, PlanError, RunPlan, plan_run

PLAN_JOB = "plan"
"""The kind of the RunJob that makes the plan."""
DEFAULT_CONTEXT_MAX = 4096  # design.md 6 row 29
KV_VALUE_BYTES = 2  # the cache is float16
WEIGHT_VALUE_BYTES = 2  # so are the matrices of a loaded stage


class NoRangesError(PlanError):
    """The hub is there and does not let anybody look into the file: one worker can fetch it, a plan cannot be made."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """A file whose index is here; name: for messages; source: where a worker finds the very same file."""

    path: Path
    name: str
    source: GgufSource


def is_on_hub(config: OrchestratorSlice) -> bool:
    """Whether the planner has to fetch the index."""
    return config.cached_model is None and isinstance(config.gguf_source, HuggingFaceGguf)


def planning_path(config: OrchestratorSlice) -> Path:
    """The local file: the cached model, or a local GGUF."""
    if config.cached_model is not None:
        return Path(config.cached_model.host_path)
    assert isinstance(config.gguf_source, LocalPath)
    return Path(config.gguf_source.path)


def _inspected(config: OrchestratorSlice, token: str | None, limit_ms: int) -> Inspected:
    """Raises PlanError for what cannot be inspected here (S1 9.3)."""
    if isinstance(config.gguf_source, HuggingFaceGguf) and is_on_hub(config):
        return _from_hub(config.gguf_source, token, limit_ms)
    path = planning_path(config)
    if not path.is_file():
        raise PlanError(f"the model {path} does not exist or is not a file; set [model] cached_path to a GGUF file")
    return Inspected(path, str(path), worker_source(config))


def _from_hub(source: HuggingFaceGguf, token: str | None, limit_ms: int) -> Inspected:
    """With its header fetched; workers get the revision's commit, so that a file that changes meanwhile mixes nothing.

    Raises PlanError.
    """
    name = full_name(source)
    try:
        model = HubModel(source, token, time.monotonic() + limit_ms / 1000)
        model.fetch_header(lambda *_: None)
        return Inspected(model.path, name, model.source)
    except GgufError as error:
        raise PlanError(f"GGUF metadata cannot be used for planning: {name}: {reason(error, source)}") from None
    except Exception as error:  # the library's and its HTTP client's errors share no base class
        if isinstance(error, RangesRefused) and (path := cached_whole(source)):
            return Inspected(path, name, source)
        command = f"./dev fetch-model --repo {source.repo} --file {source.file}"
        way_out = f"{command} fetches it whole: then set [model] cached_path to that file"
        why = not_there(error, source) or f"{reason(error, source, token)}; {way_out}"
        kind = NoRangesError if isinstance(error, RangesRefused) else PlanError
        raise kind(f"planned execution needs to inspect the GGUF {name} before it starts: {why}") from None


def worker_source(config: OrchestratorSlice) -> GgufSource:
    """Where a worker finds the file: process workers on the host, others at the mounted path (rust-swactor.md 2.3)."""
    cached = config.cached_model
    if cached is None:
        return config.gguf_source
    return LocalPath(path=cached.host_path if config.provider == "process" else cached.container_path)


def context_of(header: ModelHeader, max_context: int | None) -> int:
    """Tokens of the context. Raises PlanError for more than the model was made for."""
    if max_context is None:
        return min(header.context_length, DEFAULT_CONTEXT_MAX)
    if not 1 <= max_context <= header.context_length:
        raise PlanError(
            f"max_context is {max_context}, but the model's context is 1 to {header.context_length} tokens; "
            "set a smaller [model] max_context"
        )
    return max_context


def read_facts(config: OrchestratorSlice, token: str | None = None, limit_ms: int | None = None) -> ModelFacts:
    """Raises PlanError: no such file, not readable, not a GGUF, or not a model that can be planned.

    token: for the hub, None for the user's own. limit_ms: of the hub, None for HUB_HEADER_MS.
    """
    found = _inspected(config, token, HUB_HEADER_MS if limit_ms is None else limit_ms)
    try:
        with GgufFile.open(found.path) as file:
            return _facts(file, found, config)
    except GgufError as error:
        text = str(error).replace(str(found.path), found.name)
        raise PlanError(f"GGUF metadata cannot be used for planning: {text}") from None
    except OSError as error:
        raise PlanError(f"GGUF metadata cannot be read: {found.name}: {error.strerror}") from None


def _facts(file: GgufFile, found: Inspected, config: OrchestratorSlice) -> ModelFacts:
    header = file.header()
    if header.block_count < 1:
        raise PlanError(f"{found.name}: the model has {header.block_count} layers; a pipeline needs at least 1")
    context = context_of(header, config.max_context)
    layers = [0] * header.block_count
    memory = [0] * header.block_count
    for name, info in file.tensors.items():
        prefix, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if prefix == "blk" and number.isdigit() and int(number) < header.block_count:
            layers[int(number)] += info.nbytes
            memory[int(number)] += info.elements * WEIGHT_VALUE_BYTES
    embedding = file.tensors.get("token_embd.weight")
    head = file.tensors.get("output.weight", embedding)
    ends = (header.eos_token_id, header.eot_token_id)
    return ModelFacts(
        model_id=config.model_id,
        gguf_source=found.source,
        tokenizer=config.tokenizer,
        num_layers=header.block_count,
        hidden_dim=header.embedding_length,
        max_seq_len=context,
        vocab_size=header.vocab_size,
        dtype=DTYPES.get(config.activation_dtype, config.activation_dtype),
        eos_token_ids=tuple(sorted({token for token in ends if token is not None})),
        layer_bytes=tuple(layers),
        layer_memory_bytes=tuple(memory),
        head_memory_bytes=head.elements * WEIGHT_VALUE_BYTES if head else 0,
        embedding_bytes=embedding.nbytes if embedding else 0,
        head_bytes=head.nbytes if head else 0,
        file_bytes=sum(info.nbytes for info in file.tensors.values()),
        kv_bytes_per_layer=2 * header.head_count_kv * header.head_dim * KV_VALUE_BYTES * context,
    )


def make_plan(config: OrchestratorSlice, token: str | None = None, limit_ms: int | None = None) -> RunPlan:
    """The whole planning phase (S1 4.4): inspect, check, place. Arguments: as of read_facts. Raises PlanError."""
    feedback = config.pipeline_feedback == "direct"
    facts = read_facts(config, token, limit_ms)
    return plan_run(facts, config.pipeline_stages, run_id=config.run_id, node_id=config.node_id, feedback=feedback)


def plan_job(config: OrchestratorSlice) -> RunPlan:
    """The PLAN_JOB. Raises PlanError, SecurityError."""
    path = config.hf_token_file
    return make_plan(config, read_secret_file(Path(path)).decode().strip() if path else None)
