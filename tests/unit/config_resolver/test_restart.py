"""A resolver that comes back in the middle of a run must not bring another configuration (design.md 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from services.config_resolver.service import Outcome, same_as_before


@dataclass
class Resolved:
    digest: str


def outcome(digest: str) -> Outcome:
    return Outcome(config=cast(Any, Resolved(digest)))


def test_the_same_configuration_is_served_again() -> None:
    first = outcome("aa")
    assert same_as_before(first, "aa") is first
    assert same_as_before(first, "") is first, "there was no earlier life"


def test_another_one_is_refused_with_a_sentence() -> None:
    changed = same_as_before(outcome("bb"), "aa")
    assert changed.config is None
    assert changed.error == "the configuration was changed while the run was starting; start it again"


def test_an_error_stays_what_it_is() -> None:
    wrong = Outcome(error="config.toml: [model].id: unknown key")
    assert same_as_before(wrong, "aa") is wrong
