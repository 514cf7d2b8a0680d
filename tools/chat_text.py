"""Text of a model for a terminal: harmless, and with Markdown's emphasis as it streams. Pure.

What is printed is the text itself, only coloured: nothing is held back longer than the few characters that decide what
a line is, and copying from the terminal gives the Markdown that the model wrote.
"""

from __future__ import annotations

BOLD, DIM, CYAN, RESET = "\x1b[1m", "\x1b[2m", "\x1b[36m", "\x1b[0m"


def harmless(text: str) -> str:
    """Control, format and unassigned characters as escapes, but for newline and tab."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


class PlainStream:
    """For pipes and dumb terminals: the text as it comes."""

    def __init__(self, *, escape: bool) -> None:
        self._escape = escape

    def feed(self, text: str) -> str:
        """What to print of new text."""
        return harmless(text) if self._escape else text

    def end(self) -> str:
        """What is still to be printed."""
        return ""


class MarkdownStream:
    """Code fences, headings, `code` and **bold** as colours."""

    def __init__(self) -> None:
        self._held = ""
        self._line_start = True
        self._fence = False
        self._heading = False
        self._code = False
        self._bold = False

    def feed(self, text: str) -> str:
        """What to print of new text."""
        out = []
        self._held += harmless(text)
        while self._held:
            piece = self._next()
            if not piece:
                break
            out.append(piece)
        return "".join(out)

    def end(self) -> str:
        """What is still held, and the colours off."""
        rest, self._held = self._held, ""
        return self._styled(rest) + (RESET if self._styles() else "")

    # --- inner --------------------------------------------------------------------------------------------------
    def _next(self) -> str:
        """Take one decided piece off what is held; "" when it takes more to decide."""
        held = self._held
        if self._line_start:
            marks = held.lstrip(" ")[:3]
            if len(marks) < 3 and "\n" not in held and set(marks) <= set("`#"):
                return ""
            return self._begin_line(marks)
        if held[0] == "\n":
            return self._end_line()
        if not self._fence and held[0] == "`":
            return self._toggle("`", code=True)
        if not self._fence and not self._code and held[0] == "*":
            if held == "*":
                return ""
            if held.startswith("**"):
                return self._toggle("**", code=False)
        end = next((at for at, char in enumerate(held) if at and char in "\n`*"), len(held))
        self._held = held[end:]
        return self._styled(held[:end])

    def _begin_line(self, marks: str) -> str:
        self._line_start = False
        if marks == "```":
            line, newline, rest = self._held.partition("\n")
            if not newline:
                # The whole fence line has one colour; its end is near.
                self._line_start = True
                return ""
            self._fence, self._line_start, self._held = not self._fence, True, rest
            return f"{DIM}{line}{RESET}\n"
        self._heading = not self._fence and marks.startswith("#")
        if self._held[0] == "\n":
            return self._end_line()
        first, self._held = self._held[0], self._held[1:]
        if first in "`*":
            # It opens a line; what it means is decided as in the middle of one.
            self._held = first + self._held
            return self._next()
        return self._styled(first)

    def _end_line(self) -> str:
        self._held = self._held[1:]
        was = self._styles()
        self._line_start, self._heading, self._code, self._bold = True, False, False, False
        return f"{RESET}\n" if was and not self._fence else "\n"

    def _toggle(self, mark: str, *, code: bool) -> str:
        self._held = self._held[len(mark) :]
        opening = not (self._code if code else self._bold)
        shown = self._styled(mark) if not opening else ""
        if code:
            self._code = opening
        else:
            self._bold = opening
        return f"{self._styled(mark)}" if opening else f"{shown}{RESET}"

    def _styles(self) -> str:
        if self._fence or self._code:
            return CYAN
        return BOLD if self._heading or self._bold else ""

    def _styled(self, text: str) -> str:
        style = self._styles()
        return f"{style}{text}{RESET}" if style and text else text
