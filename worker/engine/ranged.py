"""Only what a stage needs of a model on a hub: the header, and the byte ranges of its own tensors (S1 7.1, 7.4)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.gguf import GgufFile
from common.hub_file import HubModel, cached_whole
from common.messages.node_agent import HuggingFaceGguf
from common.sparse_file import Ranges, merged
from worker.engine.parts import Part, Progress

JOIN_BYTES = 1 << 20  # a smaller gap between two ranges is cheaper to fetch than another request

PartOf = Callable[[int], Part]


def tensor_ranges(file: GgufFile, part: Part) -> list[Ranges]:
    """Where the tensors lie that a stage with this part reads, in each file of the model."""
    own = tuple(f"blk.{layer}." for layer in range(part.layer_start, part.layer_end_exclusive))
    tied = "output.weight" not in file.tensors
    found: list[Ranges] = [[] for _ in file.paths]
    for name, info in file.tensors.items():
        if name.startswith("blk."):
            needed = name.startswith(own)
        elif name == "token_embd.weight":
            needed = part.with_embedding or (part.with_head and tied)
        else:
            needed = part.with_head or not name.startswith("output")
        if needed:
            found[info.part].append((info.offset, info.offset + info.nbytes))
    return [merged(ranges, JOIN_BYTES) for ranges in found]


def fetch_part(source: HuggingFaceGguf, part_of: PartOf, progress: Progress) -> Path:
    """The path of a model with at least the tensors of one part.

    Raises HubError, GgufError, OSError, or the library's errors.
    """
    model = HubModel(source)
    if whole := cached_whole(model.source):
        return whole
    model.fetch_header(progress)
    with GgufFile.open(model.path) as file:
        wanted = tensor_ranges(file, part_of(file.header().block_count))
    model.fetch(wanted, progress)
    return model.path
