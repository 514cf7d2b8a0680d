"""The engine library: a loaded model part, its tokenizer and its chat template behind one class (S1 7.4, 7.8).

All methods that compute must be called from the thread that loaded the engine: tinygrad's compile cache is bound
to it. `encode`, `decode` and `render_chat` may run on one other thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.gguf import GgufFile, ModelHeader
from worker.engine import tinygrad_shim
from worker.engine.chat_template import ChatTemplate
from worker.engine.cpu_model import CpuPart
from worker.engine.cpu_native import default_threads, load_kernels
from worker.engine.cpu_plan import StagePlan
from worker.engine.errors import ChatTemplateError, EngineError
from worker.engine.generate import Generation
from worker.engine.parts import ModelPart, Part, Progress, check_part, whole
from worker.engine.sampler import Sampling
from worker.engine.tokenizer import EngineTokenizer

DEFAULT_CONTEXT_MAX = 4096  # design.md 6 row 29
F32 = npt.NDArray[np.float32]


def _ignore(_phase: str, _done: int, _total: int) -> None:
    """No one watches the progress."""


def context_size(header: ModelHeader, max_context: int | None) -> int:
    """S1 2.1 max_context: absent is min(model, 4096); 0 or more than the model was made for is an error."""
    if max_context is None:
        return min(header.context_length, DEFAULT_CONTEXT_MAX)
    if not 1 <= max_context <= header.context_length:
        raise EngineError(
            f"max_context is {max_context}, but the model's context is 1 to {header.context_length} tokens"
        )
    return max_context


def load_part(
    file: GgufFile, header: ModelHeader, part: Part, max_context: int, threads: int, progress: Progress
) -> ModelPart:
    """On the C kernels where they apply, else on the portable ones."""
    check_part(header, part)
    kernels = load_kernels()
    if kernels is not None:
        plan = StagePlan(file, header, part)
        if plan.reason is None:
            return CpuPart(plan, kernels, max_context, threads or default_threads(), progress)
    from worker.engine.portable_model import PortablePart

    return PortablePart(file, header, part, max_context, progress)


class Engine:
    """A model part ready to compute. Build it with `Engine.load`."""

    def __init__(self, file: GgufFile, header: ModelHeader, model: ModelPart, tokenizer: EngineTokenizer) -> None:
        self.header = header
        self.model = model
        self.tokenizer = tokenizer
        self.max_context = model.max_context
        self.chunk = model.chunk
        self._file = file
        self._template: ChatTemplate | ChatTemplateError | None = None
        if header.has_chat_template:
            try:
                source = str(file.metadata["tokenizer.chat_template"])
                self._template = ChatTemplate(source, tokenizer.bos_text, tokenizer.eos_text)
            except ChatTemplateError as error:
                self._template = error  # raw prompts still work; who wants the template is told

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        max_context: int | None = None,
        part_of: Callable[[int], Part] | None = None,
        tokenizer_path: str | Path | None = None,
        threads: int = 0,
        progress: Progress = _ignore,
    ) -> Engine:
        """Open, check and load; `progress("tensors", bytes done, bytes in all)` per tensor.

        `part_of(block_count)` says which part to load; without it the whole model is. `threads` 0: one per core.

        Raises GgufError, EngineError, or OSError where the file cannot be opened.
        """
        file = GgufFile.open(path)
        try:
            header = file.check_supported()
            context = context_size(header, max_context)
            if tokenizer_path is None:
                tokenizer = EngineTokenizer.from_gguf(file)
            else:
                tokenizer = EngineTokenizer.from_json(tokenizer_path, file)
            part = whole(header) if part_of is None else part_of(header.block_count)
            model = load_part(file, header, part, context, threads, progress)
        except BaseException:
            file.close()
            raise
        return cls(file, header, model, tokenizer)

    def warm_up(self, progress: Progress = _ignore) -> None:
        """Compile and capture every kernel; belongs to readiness (issue 2)."""
        self.model.warm_up(progress)

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        return self.tokenizer.encode(text, parse_special)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    @property
    def has_chat_template(self) -> bool:
        return self.header.has_chat_template

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template; send raw text instead of messages")
        if isinstance(self._template, ChatTemplateError):
            raise ChatTemplateError(str(self._template))
        return self._template.render(messages, add_generation_prompt)

    def prompt_ids(
        self, text: str | None, messages: Sequence[Mapping[str, str]] | None = None, raw: bool = False
    ) -> list[int]:
        """Ids of a prompt (design.md 6 row 25): messages, or a text as one user turn, or a raw text."""
        if messages is None and (raw or not self.has_chat_template):
            return self.encode(text or "")
        turns = messages if messages is not None else [{"role": "user", "content": text or ""}]
        return self.encode(self.render_chat(turns), parse_special=True)

    def logits(self, ids: Sequence[int], start: int, tick: Callable[[], None] | None = None) -> F32:
        """Run up to `chunk` tokens at positions start...; logits (vocabulary,) of the last. Whole models only."""
        return self.model.logits(list(ids), start, tick)

    def reusable(self, ids: Sequence[int]) -> int:
        """How many tokens at the start of `ids` the cache still holds from the last prompt (direct mode)."""
        return self.model.reusable(ids)

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        tick: Callable[[], None] | None = None,
    ) -> Generation:
        """A generation. One at a time: they share the key-value cache, and what of it a prompt can reuse is reused."""
        if not (self.model.part.with_embedding and self.model.part.with_head):
            raise EngineError("this engine holds a part of the model only and cannot generate by itself")
        return Generation(self, self.tokenizer, prompt_ids, max_tokens, sampling, stop, tick)

    def close(self) -> None:
        """Give the memory back; nothing of this engine may be used afterwards."""
        self.model.close()
        del self.model
        self._file.close()
        tinygrad_shim.release_memory()
