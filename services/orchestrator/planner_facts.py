"""From a local GGUF to ModelFacts: the planner's only look at a file (S1 4.4, 9.3, 10.4).

Opens the file's index and reads no tensor. Runs as a job: a hung network file system must not hang the run's loop.
"""

from __future__ import annotations

from pathlib import Path

from common.config_slices import OrchestratorSlice
from common.gguf import GgufError, GgufFile, ModelHeader
from common.messages.node_agent import HuggingFaceGguf, LocalPath
from services.orchestrator.planner import DTYPES, ModelFacts, PlanError, RunPlan, plan_run

PLAN_JOB = "plan"
"""The kind of the RunJob that makes the plan."""
DEFAULT_CONTEXT_MAX = 4096  # design.md 6 row 29
KV_VALUE_BYTES = 2  # the cache is float16
WEIGHT_VALUE_BYTES = 2  # so are the matrices of a loaded stage


def planning_path(config: OrchestratorSlice) -> Path:
    """The file to inspect: the cached model, or a local GGUF. Raises PlanError for a remote source (S1 9.3)."""
    if config.cached_model is not None:
        return Path(config.cached_model.host_path)
    if isinstance(config.gguf_source, HuggingFaceGguf):
        source = config.gguf_source
        raise PlanError(
            f"planned execution needs a locally inspectable GGUF, but the model is {source.repo}/{source.file} on "
            "Hugging Face; fetch it with ./dev fetch-model and set [model] cached_path (or gguf_local_path)"
        )
    return Path(config.gguf_source.path)


def worker_source(config: OrchestratorSlice) -> LocalPath | HuggingFaceGguf:
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


def read_facts(config: OrchestratorSlice) -> ModelFacts:
    """Raises PlanError: no such file, not readable, not a GGUF, or not a model that can be planned."""
    path = planning_path(config)
    if not path.is_file():
        raise PlanError(f"the model {path} does not exist or is not a file; set [model] cached_path to a GGUF file")
    try:
        with GgufFile.open(path) as file:
            return _facts(file, file.header(), config)
    except GgufError as error:
        raise PlanError(f"GGUF metadata cannot be used for planning: {error}") from None
    except OSError as error:
        raise PlanError(f"GGUF metadata cannot be read: {path}: {error.strerror}") from None


def _facts(file: GgufFile, header: ModelHeader, config: OrchestratorSlice) -> ModelFacts:
    if header.block_count < 1:
        raise PlanError(f"{file.path}: the model has {header.block_count} layers; a pipeline needs at least 1")
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
        gguf_source=worker_source(config),
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
        kv_bytes_per_layer=2 * header.head_count_kv * header.head_dim * KV_VALUE_BYTES * context,
    )


def make_plan(config: OrchestratorSlice) -> RunPlan:
    """The whole planning phase (S1 4.4): inspect, check, place. Raises PlanError."""
    feedback = config.pipeline_feedback == "direct"
    facts = read_facts(config)
    return plan_run(facts, config.pipeline_stages, run_id=config.run_id, node_id=config.node_id, feedback=feedback)
