"""`./dev spec` must neither miss a proof nor count one that pytest would never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import spec

CLAUSES = """
["S1 1"]
title = "Purpose"
no_behaviour = true
reason = "only words"

["S1 4.6"]
title = "Readiness"

["S2 7.1.2"]
title = "Second row"
"""


def collect(tmp_path: Path, source: str, name: str = "test_x.py") -> spec.Report:
    tests = tmp_path / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "spec_clauses.toml").write_text(CLAUSES)
    (tests / name).write_text("import pytest\n" + source)
    return spec.collect(tmp_path)


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("@pytest.mark.spec('S1 4.6')\ndef test_a(): pass", "test_a"),
        ("@pytest.mark.spec('4.6')\nasync def test_a(): pass", "test_a"),
        ("@pytest.mark.spec('S2 7.1.2', 'S1 4.6')\ndef test_a(): pass", "test_a"),
        ("class TestA:\n  @pytest.mark.spec('S1 4.6')\n  def test_b(self): pass", "TestA::test_b"),
        ("@pytest.mark.spec('S1 4.6')\nclass TestA:\n  def test_b(self): pass", "TestA"),
        ("spec = pytest.mark.spec\n@spec('S1 4.6')\ndef test_a(): pass", "test_a"),
        (
            "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.spec('S1 4.6'))])\ndef test_a(x): pass",
            "test_a",
        ),
        ("TestM = Machine.TestCase\nTestM.pytestmark = [pytest.mark.spec('S1 4.6')]", "TestM"),
    ],
)
def test_finds_the_test_that_a_marker_is_on(tmp_path: Path, source: str, test: str) -> None:
    report = collect(tmp_path, source)
    assert report.errors == []
    assert report.tests["S1 4.6"] == [f"tests/test_x.py::{test}"]


def test_a_module_mark_counts_for_the_file(tmp_path: Path) -> None:
    report = collect(tmp_path, "pytestmark = [pytest.mark.spec('S1 4.6')]\ndef test_a(): pass")
    assert (report.errors, report.tests) == ([], {"S1 4.6": ["tests/test_x.py"]})


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("@pytest.mark.spec('S1 99')\ndef test_a(): pass", "'S1 99' is no clause"),
        ("@pytest.mark.spec('S1 1')\ndef test_a(): pass", "demands no behaviour (only words)"),
        ("@pytest.mark.spec()\ndef test_a(): pass", "without a clause"),
        ("X = 'S1 4.6'\n@pytest.mark.spec(X)\ndef test_a(): pass", "literal strings"),
        ("@pytest.mark.spec('S1 4.6')\ndef helper(): pass", "on no test"),
        ("@pytest.mark.spec('S1 4.6')\nclass TestA:\n  x = 1", "on no test"),
        ("class Helper:\n  @pytest.mark.spec('S1 4.6')\n  def test_b(self): pass", "on no test"),
        ("pytestmark = pytest.mark.spec('S1 4.6')\ndef helper(): pass", "on no test"),
        ("def test_a():\n  pytest.mark.spec('S1 4.6')", "on no test"),
        ("def broken(:", "test_x.py:2"),
    ],
)
def test_a_marker_that_proves_nothing_is_an_error(tmp_path: Path, source: str, error: str) -> None:
    report = collect(tmp_path, source)
    assert len(report.errors) == 1
    assert error in report.errors[0]
    assert report.proven == []


def test_a_marker_in_a_file_that_pytest_does_not_collect_is_an_error(tmp_path: Path) -> None:
    report = collect(tmp_path, "@pytest.mark.spec('S1 4.6')\ndef test_a(): pass", name="helpers.py")
    assert "on no test" in report.errors[0]


def test_the_table_ends_with_the_count_and_missing_leaves_only_what_lacks_a_test(tmp_path: Path) -> None:
    report = collect(tmp_path, "@pytest.mark.spec('S1 4.6')\ndef test_a(): pass")
    whole = list(spec.table(report, missing=False))
    assert whole == [
        "S1 1      Purpose  [no behaviour]",
        "S1 4.6    Readiness",
        "            tests/test_x.py::test_a",
        "S2 7.1.2  Second row  [NO TEST]",
        "1 of 2 clauses proven",
    ]
    assert list(spec.table(report, missing=True)) == ["S2 7.1.2  Second row", "1 of 2 clauses proven"]


def test_the_exit_status_tells_an_unknown_clause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = collect(tmp_path, "@pytest.mark.spec('S1 99')\ndef test_a(): pass")
    monkeypatch.setattr(spec, "collect", lambda: report)
    assert spec.main([]) == 1
    captured = capsys.readouterr()
    assert "tests/test_x.py:2: 'S1 99' is no clause of tests/spec_clauses.toml" in captured.err
    assert captured.out.endswith("0 of 2 clauses proven\n")
    monkeypatch.setattr(spec, "collect", lambda: spec.Report(report.clauses))
    assert spec.main(["--missing"]) == 0
