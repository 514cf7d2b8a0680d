"""Correctness of the engine in the bench: against float32 numpy on the real model (issue 3)."""

from __future__ import annotations

import numpy as np

from common.gguf import GgufFile
from common.gguf_quants import dequantise
from tests.unit.engine.tiny_model import TinySpec, log_softmax, reference_logits
from worker.engine.engine import Engine

PROMPTS = (
    "Name three primary colors.",
    "Explain why the sky is blue.",
    "def fibonacci(n):",
    "Write a short poem about the sea.",
    "What is 12 times 12?",
)
TOKENS = 64
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters. My dear Mr. Bennet, said his lady to him one day, have you heard that "
    "Netherfield Park is let at last? Mr. Bennet replied that he had not. But it is, returned she; for Mrs. Long has "
    "just been here, and she told me all about it. Mr. Bennet made no answer. Do not you want to know who has taken "
    "it? cried his wife impatiently. You want to tell me, and I have no objection to hearing it. This was invitation."
)


def _spec(engine: Engine) -> TinySpec:
    h = engine.header
    return TinySpec(
        layers=h.block_count, width=h.embedding_length, ffn=h.feed_forward_length, heads=h.head_count,
        kv_heads=h.head_count_kv, eps=h.rms_eps, theta=h.rope_theta,
    )  # fmt: skip


def _through(engine: Engine, ids: list[int]) -> np.ndarray:
    """Logits after the last of `ids`, in chunks."""
    for at in range(0, len(ids), engine.chunk):
        logits = engine.logits(ids[at : at + engine.chunk], at)
    return logits


def correctness(engine: Engine) -> dict[str, object]:
    """rms_dlogprob_max, argmax_agreement_min (of 64), perplexity_ratio; llama models only."""
    spec = _spec(engine)
    with GgufFile.open(engine._file.path) as file:
        weights = {name: dequantise(file, name) for name in file.tensors}
    worst, agreed = 0.0, TOKENS
    for prompt in PROMPTS:
        ids = engine.prompt_ids(prompt)
        rows, logits = [], _through(engine, ids)
        sequence = list(ids)
        for _ in range(TOKENS):
            rows.append(logits)
            sequence.append(int(logits.argmax()))
            logits = engine.logits([sequence[-1]], len(sequence) - 1)
        expected = reference_logits(spec, weights, sequence[:-1])[len(ids) - 1 :]
        ours = np.stack(rows)
        top = np.argsort(-expected, axis=-1)[:, :5]
        gap = np.take_along_axis(log_softmax(ours), top, 1) - np.take_along_axis(log_softmax(expected), top, 1)
        worst = max(worst, float(np.sqrt((gap**2).mean())))
        agreed = min(agreed, int((ours.argmax(-1) == expected.argmax(-1)).sum()))
    ids = engine.encode(TEXT)
    expected = log_softmax(reference_logits(spec, weights, ids[:-1]))
    ours = log_softmax(np.stack([engine.logits([token], at) for at, token in enumerate(ids[:-1])]))
    seen = np.arange(len(ids) - 1), np.array(ids[1:])
    return {
        "rms_dlogprob_max": worst,
        "argmax_agreement_min": agreed,
        "perplexity_ratio": float(np.exp(expected[seen].mean() - ours[seen].mean())),
    }
