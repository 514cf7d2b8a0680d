"""max_tokens and stop strings: the one function that engine and gateway share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.stopping import StopTracker


def feed(tracker: StopTracker, pieces: list[str]) -> tuple[str, str | None]:
    out = ""
    for piece in pieces:
        step = tracker.feed(piece)
        out += step.text
        if step.finish:
            return out, step.finish
    return out + tracker.flush(), None


@pytest.mark.spec("S1 2.5")
def test_max_tokens_counts_tokens_and_zero_is_no_cap() -> None:
    assert feed(StopTracker(3), list("abcdef")) == ("abc", "length")
    for none in (None, 0):
        assert feed(StopTracker(none), list("abcdef")) == ("abcdef", None)
    with pytest.raises(ValueError, match="-1"):
        StopTracker(-1)


def test_a_stop_string_is_cut_where_it_begins_even_across_tokens() -> None:
    assert feed(StopTracker(None, ["END"]), ["abE", "N", "D tail"]) == ("ab", "stop")
    assert feed(StopTracker(None, ["END"]), ["abE", "N", "F"]) == ("abENF", None)
    assert feed(StopTracker(None, ["xyz", "\n\n"]), ["a\n", "\nb"]) == ("a", "stop")


def test_only_what_may_still_become_a_stop_string_is_held_back() -> None:
    tracker = StopTracker(None, ["aab"])
    assert tracker.feed("xaa").text == "x"
    assert tracker.feed("a").text == "a"  # "aa" may still become "aab"
    assert tracker.feed("c").text == "aac"


def test_the_stop_string_wins_over_the_cap_and_nothing_comes_afterwards() -> None:
    tracker = StopTracker(2, ["b"])
    assert tracker.feed("a").text == "a"
    assert (tracker.feed("b").finish, tracker.tokens) == ("stop", 2)
    assert tracker.feed("c").text == "" and tracker.tokens == 2 and tracker.flush() == ""


def test_the_cap_releases_held_text() -> None:
    assert feed(StopTracker(1, ["ab"]), ["a"]) == ("a", "length")


def test_empty_text_counts_and_empty_stop_strings_do_not() -> None:
    assert feed(StopTracker(2, [""]), ["", "x", "y"]) == ("x", "length")


@given(
    st.text(alphabet="ab\n", max_size=30),
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_pieces_make_no_difference(text: str, stop: list[str], data: st.DataObject) -> None:
    """However the text is cut into tokens, the output is the text up to the first stop string that completes."""
    pieces, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    whole = feed(StopTracker(None, stop), list(text))
    cut = feed(StopTracker(None, stop), pieces)
    assert (whole[1], text.startswith(cut[0])) == (cut[1], True)
    assert not any(word in cut[0] for word in stop)
    if cut[1] is None:
        assert cut[0] == text
