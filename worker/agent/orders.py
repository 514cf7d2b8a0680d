"""The stage controller's commands as the engine takes them (design.md 4, "StageController")."""

from __future__ import annotations

from common.codec import Message
from common.messages import engine as wire
from worker import stage_controller as stage


def order(command: stage.Command) -> Message | None:
    """The engine message of a command; None for what is not the engine's, or what its own controller does itself
    (ExecuteStep, ReleaseInputHandle)."""
    match command:
        case stage.ConfigureWorkerRole():
            return wire.ConfigureRole(
                run_id=command.run_id,
                stage_index=command.stage_index,
                stage_count=command.stage_count,
                layer_start=command.layer_start,
                layer_end_exclusive=command.layer_end_exclusive,
            )
        case stage.LoadWeights():
            return wire.LoadWeights(
                model_id=command.model_id,
                gguf_source=command.gguf_source,
                tokenizer=command.tokenizer,
                max_context=command.max_context,
            )
        case stage.ReleaseRunDeviceObjects():
            return wire.ReleaseRun()
        case stage.ResetRole():
            return wire.ResetRole()
        case _:
            return None
