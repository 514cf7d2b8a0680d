"""What a person can ask of mvp-chat itself: /help, /reset, /save, /stats, /plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from services.prompt_gateway.wire import DoneLine
from tools.chat_run import OrchestratorRun

HELP = """\
/help            this text
/reset (or /new) forget the conversation
/save FILE       write the conversation (.json, else Markdown)
/stats           tokens and speed of this chat
/plan            the workers and what each holds
Enter sends, Alt-Enter makes a new line. Ctrl-C stops an answer; twice at the prompt, or Ctrl-D, leaves.
"""


@dataclass(frozen=True, slots=True)
class TurnStats:
    """One answer; times in monotonic seconds."""

    done: DoneLine
    begin: float
    first: float
    end: float

    @property
    def rate(self) -> float:
        """Tokens a second after the first."""
        return (self.done.tokens_generated - 1) / max(1e-9, self.end - self.first)


class Conversation(Protocol):
    """What the commands need of a chat."""

    history: list[dict[str, str]]
    turns: list[TurnStats]

    def forget(self) -> None:
        """Start over."""


def command(chat: Conversation, text: str, run: OrchestratorRun | None, log: TextIO) -> bool:
    """Whether it was one; a turn may begin with a slash, too."""
    name, _, rest = text.partition(" ")
    match name:
        case "/help":
            log.write(HELP)
        case "/new" | "/reset":
            chat.forget()
        case "/save":
            log.write(f"{save(chat.history, rest.strip())}\n")
        case "/stats":
            log.write(stats(chat.turns))
        case "/plan":
            log.write(plan(run))
        case _:
            return False
    log.flush()
    return True


def save(history: list[dict[str, str]], name: str) -> str:
    """Write the conversation; returns what to say about it."""
    if not name:
        return "/save needs the name of a file"
    path = Path(name).expanduser()
    if path.suffix == ".json":
        text = json.dumps(history, ensure_ascii=False, indent=2) + "\n"
    else:
        text = "".join(f"## {turn['role']}\n\n{turn['content']}\n\n" for turn in history)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    return f"{len(history)} turns are in {path}"


def stats(turns: list[TurnStats]) -> str:
    """Of the last answer and of all."""
    if not turns:
        return "no answer yet\n"
    last, tokens = turns[-1], sum(turn.done.tokens_generated for turn in turns)
    seconds = sum(turn.end - turn.begin for turn in turns)
    return (
        f"last answer: {last.done.tokens_generated} tokens after {last.done.prompt_tokens} of the prompt, "
        f"first after {last.first - last.begin:.2f} s, then {last.rate:.1f} a second ({last.done.finish_reason})\n"
        f"this chat: {len(turns)} answers, {tokens} tokens in {seconds:.1f} s\n"
    )


def plan(run: OrchestratorRun | None) -> str:
    """Who holds what."""
    if run is None:
        return "the stack was started by somebody else; its dashboard or mvp-archive shows the plan\n"
    lines = []
    for stage in run.stages:
        layers = stage.get("layer_range") or {}
        end = layers.get("end_exclusive")
        held = f"layers {layers.get('start')} to {end - 1}" if isinstance(end, int) else "all layers"
        price = run.workers.get(stage.get("node_id", 0), "")
        lines.append(
            f"worker {stage.get('node_id')}: stage {stage.get('stage_index')}, {held}{', ' * bool(price)}{price}\n"
        )
    return "".join(lines) or "no plan yet\n"
