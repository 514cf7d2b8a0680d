"""Gemma 3: five blocks with a sliding window and a low rotary base, then one that sees everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.gguf_arch import Architecture, LayerTraits

LOCAL_THETA = 10_000.0
WINDOW = 512
PERIOD = 6


def _traits(metadata: Mapping[str, Any], layer: int, theta: float, scale: float) -> LayerTraits:
    if layer % PERIOD == PERIOD - 1:
        return LayerTraits(0, theta, scale)
    local = metadata.get("gemma3.rope.freq_base_swa", metadata.get("gemma3.rope.local.freq_base", LOCAL_THETA))
    return LayerTraits(int(metadata.get("gemma3.attention.sliding_window", WINDOW)), float(local), 1.0)


ARCHITECTURE = Architecture(
    "gemma3", qk_norm=True, post_norms=True, activation="gelu", scaled_embedding=True, traits_of=_traits
)
