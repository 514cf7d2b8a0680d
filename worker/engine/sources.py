"""Where a model file comes from: a path, or a Hugging Face repository that the worker fetches itself (S1 7.1).

huggingface_hub resumes, verifies and honours HF_TOKEN and HF_ENDPOINT; a token never appears in an error. A stage
that needs a part of a model fetches that part (ranged.py) where the server sends ranges, else the whole.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from pathlib import Path
from typing import Any

from common.gguf import part_names
from common.hub_file import RangesRefused, full_name, reason
from common.messages.node_agent import GgufSource, HuggingFaceGguf, LocalPath
from worker.engine.errors import EngineError
from worker.engine.parts import Progress
from worker.engine.ranged import PartOf, fetch_part


def resolve_source(source: GgufSource, progress: Progress, part_of: PartOf | None = None) -> Path:
    """The local path of a model, or of what `part_of` (its number of blocks) says of it; EngineError in a sentence."""
    if isinstance(source, LocalPath):
        path = Path(source.path)
        if not path.is_file():
            raise EngineError(f"model file {path} does not exist on this worker")
        return path
    names = part_names(source.file)
    try:
        if part_of is not None:
            with contextlib.suppress(RangesRefused):
                return fetch_part(source, part_of, progress)
        paths = [_download(source, name, progress) for name in names]
    except Exception as error:  # the library's and its HTTP client's errors share no base class
        raise EngineError(f"cannot fetch {full_name(source)}: {reason(error, source)}") from error
    return paths[names.index(source.file)]


def _download(source: HuggingFaceGguf, name: str, progress: Progress) -> Path:
    from huggingface_hub import hf_hub_download  # 0.4 s that only this source needs

    return Path(hf_hub_download(source.repo, name, revision=source.revision, tqdm_class=_bar_class(progress)))


def _bar_class(progress: Progress) -> Any:
    """A tqdm that reports bytes instead of drawing."""
    base: Any = importlib.import_module("tqdm.auto").tqdm  # huggingface_hub's own dependency, untyped

    class Bar(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            result: bool | None = super().update(n)
            progress("download", int(self.n), int(self.total or 0))
            return result

    return Bar
