"""Small random models written with gguf's own writer, and a float32 numpy reference of what they compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "Ġ w")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TinySpec:
    """Dimensions of a test model; the vocabulary is not a multiple of any tile on purpose."""

    layers: int = 3
    width: int = 64
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 2
    context: int = 128
    eps: float = 1e-5
    theta: float = 10_000.0
    kind: str = "F32"
    tied: bool = False
    rope_freqs: bool = False
    seed: int = 1
    architecture: str = "llama"  # of those that common.gguf_arch knows
    head_size: int = 0  # 0: width / heads
    window: int = 12  # of gemma3's local blocks

    @property
    def head_dim(self) -> int:
        return self.head_size or self.width // self.heads

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim


def byte_alphabet() -> list[str]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + index) for index in range(len(others))]


def vocabulary() -> list[str]:
    return [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]


def add_tokenizer(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def weights(spec: TinySpec) -> dict[str, F32]:
    """Random matrices that survive their quantisation: what the file holds is exactly what the reference uses."""
    random = np.random.default_rng(spec.seed)
    vocab, kv = len(vocabulary()), spec.kv_heads * spec.head_dim

    def matrix(rows: int, columns: int) -> F32:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns) * 1.5).astype(np.float32)

    def norm() -> F32:
        return (1 + 0.1 * random.standard_normal(spec.width)).astype(np.float32)

    out = {"token_embd.weight": matrix(vocab, spec.width) * 4, "output_norm.weight": norm()}
    if not spec.tied:
        out["output.weight"] = matrix(vocab, spec.width)
    if spec.rope_freqs:
        out["rope_freqs.weight"] = np.linspace(1, 4, spec.head_dim // 2).astype(np.float32)
    for layer in range(spec.layers):
        p = f"blk.{layer}."
        out[f"{p}attn_norm.weight"], out[f"{p}ffn_norm.weight"] = norm(), norm()
        out[f"{p}attn_q.weight"] = matrix(spec.query_width, spec.width)
        out[f"{p}attn_k.weight"], out[f"{p}attn_v.weight"] = matrix(kv, spec.width), matrix(kv, spec.width)
        out[f"{p}attn_output.weight"] = matrix(spec.width, spec.query_width)
        out[f"{p}ffn_gate.weight"] = matrix(spec.ffn, spec.width)
        out[f"{p}ffn_up.weight"], out[f"{p}ffn_down.weight"] = (
            matrix(spec.ffn, spec.width),
            matrix(spec.width, spec.ffn),
        )
        if spec.architecture == "qwen2":
            for name, rows in (("q", spec.query_width), ("k", kv), ("v", kv)):
                out[f"{p}attn_{name}.bias"] = random.standard_normal(rows).astype(np.float32)
        if spec.architecture in ("qwen3", "gemma3"):
            for name in "qk":
                out[f"{p}attn_{name}_norm.weight"] = (1 + 0.1 * random.standard_normal(spec.head_dim)).astype(
                    np.float32
                )
        if spec.architecture == "gemma3":
            out[f"{p}post_attention_norm.weight"], out[f"{p}post_ffw_norm.weight"] = norm(), norm()
    return out


def write_model(path: Path, spec: TinySpec, architecture: str = "", pre: str = "smollm") -> dict[str, F32]:
    """Write the model; returns its weights as a reader must see them, dequantised by gguf.quants."""
    writer = gguf.GGUFWriter(str(path), architecture or spec.architecture)
    writer.add_name("tiny")
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.width)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_layer_norm_rms_eps(spec.eps)
    writer.add_rope_freq_base(spec.theta)
    if spec.head_size:
        writer.add_key_length(spec.head_size)
        writer.add_value_length(spec.head_size)
    if spec.architecture == "gemma3":
        writer.add_sliding_window(spec.window)
    add_tokenizer(writer, pre)
    kind = gguf.GGMLQuantizationType[spec.kind]
    seen: dict[str, F32] = {}
    for name, values in weights(spec).items():
        if values.ndim == 1 or spec.kind == "F32":
            writer.add_tensor(name, values)
            seen[name] = values
            continue
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        seen[name] = gguf.quants.dequantize(packed, kind).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return seen


def _rms(x: F32, weight: F32, eps: float) -> F32:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * weight


def _rotate(x: F32, spec: TinySpec, factors: F32 | None, theta: float) -> F32:
    """x (T, heads, d): neighbouring pairs (llama), or the two halves (others), turned by position."""
    d = spec.head_dim
    frequencies = theta ** (-np.arange(0, d, 2) / d)
    if factors is not None:
        frequencies = frequencies / factors
    angle = np.outer(np.arange(len(x)), frequencies)[:, None, :]
    out = np.empty_like(x)
    if spec.architecture != "llama":
        first, second = x[..., : d // 2], x[..., d // 2 :]
        out[..., : d // 2] = first * np.cos(angle) - second * np.sin(angle)
        out[..., d // 2 :] = second * np.cos(angle) + first * np.sin(angle)
        return out
    even, odd = x[..., 0::2], x[..., 1::2]
    out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


def reference_logits(spec: TinySpec, w: dict[str, F32], ids: list[int]) -> F32:
    """Logits (T, vocabulary) in plain float32 numpy."""
    x = w["token_embd.weight"][ids]
    gemma = spec.architecture == "gemma3"
    if gemma:
        x = x * np.float32(np.sqrt(spec.width))
    rows, d, groups = len(ids), spec.head_dim, spec.heads // spec.kv_heads
    mask = np.triu(np.full((rows, rows), -np.inf, np.float32), 1)
    for layer in range(spec.layers):

        def at(name: str, layer: int = layer) -> F32:
            return w[f"blk.{layer}.{name}.weight"]

        h = _rms(x, at("attn_norm"), spec.eps)
        factors = w.get("rope_freqs.weight")
        local = gemma and layer % 6 != 5
        seen = mask + np.tril(np.full((rows, rows), -np.inf, np.float32), -spec.window) if local else mask

        def projected(name: str, heads: int, h: F32 = h, layer: int = layer) -> F32:
            out: F32 = h @ w[f"blk.{layer}.attn_{name}.weight"].T + w.get(
                f"blk.{layer}.attn_{name}.bias", np.float32(0)
            )
            out = out.reshape(rows, heads, d)
            norm = w.get(f"blk.{layer}.attn_{name}_norm.weight")
            return out if norm is None else _rms(out, norm, spec.eps)

        theta = 10_000.0 if local else spec.theta
        q = _rotate(projected("q", spec.heads), spec, factors, theta)
        k = _rotate(projected("k", spec.kv_heads), spec, factors, theta)
        v = projected("v", spec.kv_heads)
        mixed = np.empty((rows, spec.heads, d), np.float32)
        for head in range(spec.heads):
            scores = q[:, head] @ k[:, head // groups].T / np.sqrt(d) + seen
            share = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, head] = share / share.sum(-1, keepdims=True) @ v[:, head // groups]
        added = mixed.reshape(rows, -1) @ at("attn_output").T
        x = x + (_rms(added, at("post_attention_norm"), spec.eps) if gemma else added)
        h = _rms(x, at("ffn_norm"), spec.eps)
        gate = h @ at("ffn_gate").T
        if gemma:
            opened = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            opened = gate / (1 + np.exp(-gate))
        added = (opened * (h @ at("ffn_up").T)) @ at("ffn_down").T
        x = x + (_rms(added, at("post_ffw_norm"), spec.eps) if gemma else added)
    head_matrix = w.get("output.weight", w["token_embd.weight"])
    logits: F32 = (_rms(x, w["output_norm.weight"], spec.eps) @ head_matrix.T).astype(np.float32)
    return logits


def log_softmax(logits: F32) -> F32:
    shifted = logits - logits.max(-1, keepdims=True)
    out: F32 = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return out
