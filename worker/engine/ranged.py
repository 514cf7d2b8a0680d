"""Only what a stage needs of a model on a hub: the header, and the byte ranges of its own tensors (S1 7.1, 7.4)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.gguf import GgufFile
from common.hub_file import HubFile, fetch_header, fetch_ranges
from common.messages.node_agent import HuggingFaceGguf
from common.sparse_file import Ranges, merged
from worker.engine.parts import Part, Progress

JOIN_BYTES = 1 << 20  # a smaller gap between two ranges is cheaper to fetch than another request

PartOf = Callable[[int], Part]


def tensor_ranges(file: GgufFile, part: Part) -> Ranges:
    """Where the tensors lie that a stage with this part reads."""
    own = tuple(f"blk.{layer}." for layer in range(part.layer_start, part.layer_end_exclusive))
    tied = "output.weight" not in file.tensors
    found = []
    for name, info in file.tensors.items():
        if name.startswith("blk."):
            needed = name.startswith(own)
        elif name == "token_embd.weight":
            needed = part.with_embedding or (part.with_head and tied)
        else:
            needed = part.with_head or not name.startswith("output")
        if needed:
            found.append((info.offset, info.offset + info.nbytes))
    return merged(found, JOIN_BYTES)


def fetch_part(source: HuggingFaceGguf, part_of: PartOf, progress: Progress) -> Path:
    """The path of a sparse file with the tensors of one part. Raises HubError, OSError, or the library's errors."""
    hub = HubFile(source)
    kept = hub.kept()
    fetch_header(hub, kept, progress)
    with GgufFile.open(kept.path) as file:
        wanted = tensor_ranges(file, part_of(file.header().block_count))
    fetch_ranges(hub, kept, wanted, progress)
    return kept.path
