"""The model's text on a terminal: nothing lost, nothing harmful, the emphasis where Markdown has it."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from tools.chat_text import BOLD, CYAN, DIM, RESET, MarkdownStream, PlainStream, harmless


def streamed(text: str, cuts: list[int]) -> str:
    stream = MarkdownStream()
    out, at = "", 0
    for cut in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        out += stream.feed(text[at:cut])
        at = cut
    return out + stream.end()


TEXT = st.text(st.sampled_from("ab `*#\n\t-é漢🔥\x1b\x07\u202e\r"), max_size=60)


@given(TEXT, st.lists(st.integers(0, 100), max_size=8))
@settings(max_examples=500)
def test_without_its_colours_it_is_the_text(text: str, cuts: list[int]) -> None:
    shown = streamed(text, cuts)
    assert re.sub(r"\x1b\[[0-9]*m", "", shown) == harmless(text)
    assert shown == streamed(text, []) or re.sub(RESET.replace("[", r"\["), "", shown), "cuts change no text"
    assert not shown.rstrip("\n").endswith((BOLD, CYAN, DIM)), "colours end"


def test_markdown_as_colours() -> None:
    assert streamed("# Title\nplain", []) == f"{BOLD}#{RESET}{BOLD} Title{RESET}{RESET}\nplain"
    assert f"{BOLD}**{RESET}{BOLD}bold{RESET}" in streamed("a **bold** b", [])
    assert f"{CYAN}code{RESET}" in streamed("a `code` b", [])
    fenced = streamed("```python\nx = `1` # *y*\n```\nafter", [])
    assert fenced.startswith(f"{DIM}```python{RESET}\n{CYAN}x") and fenced.endswith(f"{DIM}```{RESET}\nafter")


def test_a_plain_word_is_printed_at_once() -> None:
    stream = MarkdownStream()
    assert stream.feed("Hello") == "Hello"
    assert stream.feed(" wor") == " wor"
    assert stream.feed("ld") == "ld"


def test_a_pipe_gets_the_bytes_as_they_are() -> None:
    assert PlainStream(escape=False).feed("\x1b[31m") == "\x1b[31m"
    assert PlainStream(escape=True).feed("\x1b[31m\n") == "\\x1b[31m\n"
