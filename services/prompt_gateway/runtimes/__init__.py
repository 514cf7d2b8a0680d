"""How prompts are executed: one file per mode of OpenPromptRpc, entered in `MODES` (S1 6.9; pipeline: S1 6.10)."""

from __future__ import annotations

from collections.abc import Callable

from common.messages.serve import OpenPromptRpc
from services.prompt_gateway.records import Records
from services.prompt_gateway.runtimes.base import PromptRuntime
from services.prompt_gateway.runtimes.direct import DirectPromptRuntime
from services.prompt_gateway.runtimes.pipeline import PipelinePromptRuntime

MODES: dict[str, Callable[[OpenPromptRpc, bytes, Records], PromptRuntime]] = {
    "direct": DirectPromptRuntime,
    "pipeline": PipelinePromptRuntime,
}
"""mode → runtime(run, reply_to, records): the serving actors of the run and the gateway's reply inbox: for prompt
events in direct mode, for tokenizer events in pipeline mode (S1 6.3)."""

__all__ = ["MODES", "DirectPromptRuntime", "PipelinePromptRuntime", "PromptRuntime"]
