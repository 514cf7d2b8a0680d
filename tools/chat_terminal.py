"""Reading a person's turns: prompt_toolkit on a terminal (history, several lines), plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

PROMPT = "> "
AGAIN = "Ctrl-C again or Ctrl-D leaves"


class Leave(Exception):
    """The person wants to go."""


def is_dumb() -> bool:
    """A terminal that cannot move its cursor, as Emacs' shell."""
    return os.environ.get("TERM", "") in ("", "dumb")


def history_file() -> Path:
    """Where typed turns are kept."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "swactor-mq" / "chat_history"


class Turns:
    """The next turn each time it is called; None at the end of input. Ctrl-C twice in a row raises Leave."""

    def __init__(self, source: TextIO, log: TextIO) -> None:
        self._source, self._log = source, log
        self.interactive = source.isatty()
        self._read = self._reader()

    def _reader(self) -> Callable[[], str]:
        if not self.interactive:
            return lambda: self._source.readline()
        if self._source is sys.stdin and sys.stdout.isatty() and not is_dumb():
            return _prompt_toolkit()
        if self._source is sys.stdin:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # gives input() its line editing
        return lambda: input(PROMPT)

    def __call__(self) -> str | None:
        """The next turn."""
        if not self.interactive:
            return self._read() or None
        interrupts = 0
        while True:
            try:
                return self._read()
            except EOFError:
                return None
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts > 1:
                    raise Leave from None
                self._log.write(f"\n[{AGAIN}]\n")
                self._log.flush()


def _prompt_toolkit() -> Callable[[], str]:
    """Enter sends; Alt-Enter (or Esc, Enter) makes a new line; the arrows walk through earlier turns."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    history: History = InMemoryHistory()
    with contextlib.suppress(OSError):
        path = history_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        # What was asked is nobody else's business.
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        history = FileHistory(str(path))
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _newline(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def _send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    session: PromptSession[str] = PromptSession(
        PROMPT, multiline=True, history=history, key_bindings=keys, prompt_continuation="  ", enable_suspend=True
    )
    return lambda: session.prompt()
