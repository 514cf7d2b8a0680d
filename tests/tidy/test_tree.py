"""The rules of the house hold for every file of the tree (design.md 5, 8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tidy import rules
from tools import spec

PYTHON = rules.python_files()
TEXT = rules.text_files()


def complaints(rule: Callable[[str, str], list[str]], files: list[tuple[str, str]]) -> str:
    return "\n".join(line for name, source in files for line in rule(name, source))


def test_pure_modules_touch_no_clock_socket_or_chance() -> None:
    assert complaints(rules.impure, [file for file in PYTHON if rules.is_pure(file[0])]) == ""


@pytest.mark.parametrize(
    "rule", [rules.imports_zmq, rules.dangerous, rules.prints, rules.too_long], ids=lambda rule: rule.__name__
)
def test_python_files(rule: Callable[[str, str], list[str]]) -> None:
    # test_rules.py holds the samples of what is forbidden, as strings: syntax trees do not see them.
    assert complaints(rule, PYTHON) == ""


@pytest.mark.parametrize("rule", [rules.left_for_later, rules.own_paths], ids=lambda rule: rule.__name__)
def test_text_files(rule: Callable[[str, str], list[str]]) -> None:
    assert complaints(rule, TEXT) == ""


CATALOGUE = [file for file in PYTHON if file[0].startswith("common/messages/")]


def test_messages_say_who_sends_them_and_carry_a_tag() -> None:
    assert complaints(rules.undocumented_messages, CATALOGUE) == ""


def test_message_tags_are_unique_and_append_only() -> None:
    tags: dict[int, str] = {}
    for name, source in CATALOGUE:
        for node, tag in rules.message_classes(source):
            if tag is not None:
                assert tag not in tags, f"{name}: {node.name} has the tag of {tags[tag]}"
                tags[tag] = node.name
    recorded = rules.ROOT / "tests" / "golden" / "tags.toml"
    if recorded.exists():
        assert rules.tag_changes(rules.recorded_tags(recorded.read_text()), tags) == []


def test_spec_markers_name_clauses_and_are_on_tests() -> None:
    assert spec.collect().errors == []


def test_the_clause_list_is_whole() -> None:
    clauses = spec.load_clauses(spec.ROOT / spec.CLAUSES_FILE)
    s1 = [name for name in clauses if name.startswith("S1 ")]
    # 11 chapters and their sections; 3.5 to 3.8 and 3.10 do not exist in the specification.
    assert len(s1) == 127
    assert {clause.id for clause in clauses.values() if clause.no_behaviour} == {"S1 1", "S1 3.3", "S1 11"}
    assert all(clause.title for clause in clauses.values())
    assert all(clause.reason for clause in clauses.values() if clause.no_behaviour)
    assert {"S2 3.1", "S2 3.6", "S2 4.5", "S2 7.1.1", "S2 7.3.5", "S2 7.5.4"} <= clauses.keys()
