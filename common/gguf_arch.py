"""What distinguishes one model architecture from another, as data (issue 3: adding one touches one file).

Each module `common/gguf_arch_NAME.py` holds one ARCHITECTURE; it is found by its name, which is
`general.architecture` of the file. Both backends of the engine and the planner's refusals read it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import common

_PREFIX = "gguf_arch_"


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """One block's attention: `window` positions seen (0: all), base and divisor of its rotary frequencies."""

    window: int
    rope_theta: float
    rope_scale: float


# (metadata, block number, rope_theta, rope_scale) -> traits; theta and scale are those of the file's header.
TraitsOf = Callable[[Mapping[str, Any], int, float, float], LayerTraits]


def same_everywhere(_metadata: Mapping[str, Any], _layer: int, theta: float, scale: float) -> LayerTraits:
    return LayerTraits(0, theta, scale)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A llama-like block: norm, attention, norm, gated feed-forward, with these differences."""

    name: str
    interleaved_rope: bool = False  # neighbours turn together; else the two halves of a head do
    qkv_bias: bool = False
    qk_norm: bool = False  # a norm of each head's query and key before the rotation
    post_norms: bool = False  # a norm of what attention and feed-forward give, before it is added
    activation: Literal["silu", "gelu"] = "silu"
    scaled_embedding: bool = False  # rows of the embedding times the square root of their width
    traits_of: TraitsOf = same_everywhere


@cache
def names() -> tuple[str, ...]:
    """The supported values of general.architecture."""
    found = (module.name for module in pkgutil.iter_modules(common.__path__))
    return tuple(sorted(name.removeprefix(_PREFIX) for name in found if name.startswith(_PREFIX)))


@cache
def architecture(name: str) -> Architecture:
    """Raises KeyError for one that is not supported."""
    if name not in names():
        raise KeyError(name)
    found = importlib.import_module(f"common.{_PREFIX}{name}").ARCHITECTURE
    assert isinstance(found, Architecture) and found.name == name
    return found
