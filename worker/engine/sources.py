"""Where a model file comes from: a path, or a Hugging Face repository that the worker fetches itself (S1 7.1).

huggingface_hub resumes, verifies and honours HF_TOKEN and HF_ENDPOINT; a token never appears in an error.
"""

from __future__ import annotations

import importlib
import io
import os
from pathlib import Path
from typing import Any

from common.messages.node_agent import GgufSource, HuggingFaceGguf, LocalPath
from worker.engine.errors import EngineError
from worker.engine.parts import Progress


def resolve_source(source: GgufSource, progress: Progress) -> Path:
    """The local path of a model. Raises EngineError with one sentence."""
    if isinstance(source, LocalPath):
        path = Path(source.path)
        if not path.is_file():
            raise EngineError(f"model file {path} does not exist on this worker")
        return path
    return _download(source, progress)


def _download(source: HuggingFaceGguf, progress: Progress) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import hf_hub_download  # 0.4 s that only this source needs

    name = f"{source.repo}/{source.file}@{source.revision or 'main'}"
    try:
        path = hf_hub_download(source.repo, source.file, revision=source.revision, tqdm_class=_bar_class(progress))
    except Exception as error:  # the library's and its HTTP client's errors share no base class
        token = os.environ.get("HF_TOKEN")
        text = " ".join(str(error).split())[:400] or type(error).__name__
        raise EngineError(f"cannot fetch {name}: {text.replace(token, '***') if token else text}") from error
    return Path(path)


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
