"""What a GGUF file says of its model, and what is refused when the plan is made (S1 7.1, 10.8; issue 3)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from common.gguf_arch import names
from common.gguf_file import GgufFile
from common.gguf_metadata import (
    MalformedError,
    UnsupportedArchitectureError,
    UnsupportedTensorTypeError,
    UnsupportedTokenizerError,
)

SUPPORTED_TENSOR_TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS",
)  # fmt: skip
SENTENCEPIECE = "llama"  # tokenizer.ggml.model of Llama 2, Mistral and Gemma
SUPPORTED_PRE_TOKENIZERS = ("smollm", "llama-bpe", "qwen2", "gpt-2", "default")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """What the planner and the engine need to know of a model before any tensor is read."""

    name: str
    architecture: str
    block_count: int
    embedding_length: int
    context_length: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    head_dim: int
    rope_dim: int
    rms_eps: float
    rope_theta: float
    rope_scale: float
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    eot_token_id: int | None
    add_bos_token: bool
    has_chat_template: bool

    @property
    def query_width(self) -> int:
        return self.head_count * self.head_dim

    @property
    def key_value_width(self) -> int:
        return self.head_count_kv * self.head_dim


def _number(file: GgufFile, key: str, kind: type[_T], default: _T | None = None) -> _T:
    value = file.metadata.get(key, default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        what = "missing" if value is None else f"{type(value).__name__}, not {kind.__name__}"
        raise MalformedError(f"{file.path}: {key} is {what}")
    return value


def _token_id(file: GgufFile, key: str, vocab_size: int) -> int | None:
    if key not in file.metadata:
        return None
    value = _number(file, key, int)
    if not 0 <= value < vocab_size:
        raise MalformedError(f"{file.path}: {key} is {value}, outside the vocabulary of {vocab_size}")
    return value


def read_header(file: GgufFile) -> ModelHeader:
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise MalformedError(f"{file.path}: general.architecture is missing")
    if arch not in names():
        raise UnsupportedArchitectureError(
            f"{file.path}: architecture {arch!r} is not supported; supported are {', '.join(names())}"
        )
    if file.metadata.get(f"{arch}.expert_count", 0):
        raise UnsupportedArchitectureError(f"{file.path}: mixture-of-experts models are not supported")
    scaling = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise UnsupportedArchitectureError(f"{file.path}: rope scaling {scaling!r} is not supported")
    heads = _number(file, f"{arch}.attention.head_count", int)
    kv_heads = _number(file, f"{arch}.attention.head_count_kv", int, heads)
    width = _number(file, f"{arch}.embedding_length", int)
    if heads < 1 or kv_heads < 1 or heads % kv_heads or width < 1:
        raise MalformedError(f"{file.path}: {heads} heads, {kv_heads} key-value heads and width {width} do not fit")
    head_dim = _number(file, f"{arch}.attention.key_length", int, width // heads)
    rope_dim = _number(file, f"{arch}.rope.dimension_count", int, head_dim)
    if not 0 < rope_dim <= head_dim or rope_dim % 2:
        raise MalformedError(f"{file.path}: {rope_dim} rotary dimensions do not fit a head of {head_dim}")
    vocab = file.metadata.array_length("tokenizer.ggml.tokens") or file.tensor("token_embd.weight").shape[0]
    return ModelHeader(
        name=str(file.metadata.get("general.name", Path(file.path).stem)),
        architecture=arch,
        block_count=_number(file, f"{arch}.block_count", int),
        embedding_length=width,
        context_length=_number(file, f"{arch}.context_length", int),
        feed_forward_length=_number(file, f"{arch}.feed_forward_length", int),
        head_count=heads,
        head_count_kv=kv_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        rms_eps=_number(file, f"{arch}.attention.layer_norm_rms_epsilon", float),
        rope_theta=_number(file, f"{arch}.rope.freq_base", float, 10_000.0),
        rope_scale=_number(file, f"{arch}.rope.scaling.factor", float, 1.0) if scaling == "linear" else 1.0,
        vocab_size=vocab,
        bos_token_id=_token_id(file, "tokenizer.ggml.bos_token_id", vocab),
        eos_token_id=_token_id(file, "tokenizer.ggml.eos_token_id", vocab),
        eot_token_id=_token_id(file, "tokenizer.ggml.eot_token_id", vocab),
        add_bos_token=bool(file.metadata.get("tokenizer.ggml.add_bos_token", False)),
        has_chat_template="tokenizer.chat_template" in file.metadata,
    )


def check_tokenizer(file: GgufFile) -> str:
    """The pre-tokenizer preset of a byte-level BPE vocabulary, SENTENCEPIECE, or UnsupportedTokenizerError."""
    model = file.metadata.get("tokenizer.ggml.model")
    if model == SENTENCEPIECE:
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.scores"):
            if not file.metadata.array_length(key):
                raise UnsupportedTokenizerError(f"{file.path}: {key} is missing")
        return SENTENCEPIECE
    if model != "gpt2":
        raise UnsupportedTokenizerError(
            f"{file.path}: tokenizer {model!r} is not supported; 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece) are"
        )
    preset = file.metadata.get("tokenizer.ggml.pre", "default")
    if preset not in SUPPORTED_PRE_TOKENIZERS:
        raise UnsupportedTokenizerError(
            f"{file.path}: pre-tokenizer {preset!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_PRE_TOKENIZERS)}"
        )
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if not file.metadata.array_length(key):
            raise UnsupportedTokenizerError(f"{file.path}: {key} is missing")
    return str(preset)


def check_supported(file: GgufFile) -> ModelHeader:
    """Everything that can be refused before a worker is started: architecture, tokenizer, tensor types."""
    header = read_header(file)
    check_tokenizer(file)
    for info in file.tensors.values():
        if info.type_name not in SUPPORTED_TENSOR_TYPES:
            raise UnsupportedTensorTypeError(
                f"{file.path}: tensor {info.name} has type {info.type_name}, which is not supported; "
                f"supported are {', '.join(SUPPORTED_TENSOR_TYPES)}"
            )
    return header
