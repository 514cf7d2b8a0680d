"""Bytes as they come off a pipe → whole lines, within a bound. Pure."""

from __future__ import annotations


class LineBuffer:
    """S2 3.2's output_buffer: a line may come in pieces, pieces may hold lines, and some line may never end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = bytearray()
        self._skipping = False
        self.cut = 0
        """Lines that were longer than the limit: dropped, up to their newline."""

    def __len__(self) -> int:
        return len(self._held)

    def feed(self, data: bytes) -> list[bytes | None]:
        """The lines that are whole now, without their newline; None for one that was too long."""
        *whole, rest = data.split(b"\n")
        lines: list[bytes | None] = []
        for piece in whole:
            if self._skipping:
                self._skipping = False
                continue
            line = bytes(self._held) + piece
            self._held.clear()
            if len(line) > self._limit:
                self.cut += 1
                lines.append(None)
            else:
                lines.append(line)
        if not self._skipping:
            self._held += rest
            if len(self._held) > self._limit:
                self._held.clear()
                self._skipping = True
                self.cut += 1
                lines.append(None)
        return lines

    def take_rest(self) -> bytes:
        """What stands behind the last newline: the last words of who died in the middle of a line."""
        rest = bytes(self._held)
        self._held.clear()
        return rest


def printable(line: bytes, limit: int) -> str:
    """A line of somebody else's as text for a log: no control characters, no terminal sequences, not too long."""
    text = line.decode("utf-8", "replace").rstrip("\r")
    shown = "".join(
        char if char.isprintable() or char == "\t" else "\N{REPLACEMENT CHARACTER}" for char in text[:limit]
    )
    return shown + ("…" if len(text) > limit else "")
