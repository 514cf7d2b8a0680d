"""Show which clause of the specifications is proven by which test.

The tests say it themselves with `@pytest.mark.spec("S1 4.6")`. This reads their source instead of importing
them, so that it answers at once and also where a test cannot be imported. A marker that pytest would never
run, or that names no clause of tests/spec_clauses.toml, is an error: it would be a proof that does not exist.
"""

from __future__ import annotations

import argparse
import ast
import signal
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLAUSES_FILE = Path("tests/spec_clauses.toml")


@dataclass(frozen=True)
class Clause:
    id: str
    title: str
    no_behaviour: bool = False
    reason: str = ""


@dataclass
class Report:
    """Clauses in the order of their file, the tests that prove each, and what is wrong with the markers."""

    clauses: dict[str, Clause]
    tests: dict[str, list[str]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def provable(self) -> list[Clause]:
        return [clause for clause in self.clauses.values() if not clause.no_behaviour]

    @property
    def proven(self) -> list[Clause]:
        return [clause for clause in self.provable if self.tests.get(clause.id)]


@dataclass(frozen=True)
class Marker:
    """One spec marker in a source file; test is None where pytest would not find anything to run."""

    line: int
    test: str | None
    args: tuple[str | None, ...]


def load_clauses(file: Path) -> dict[str, Clause]:
    with open(file, "rb") as source:
        table = tomllib.load(source)
    return {
        name: Clause(name, row["title"], row.get("no_behaviour", False), row.get("reason", ""))
        for name, row in table.items()
    }


def normalise(clause: str) -> str:
    """S1 may be left out: `4.6` is `S1 4.6`."""
    text = " ".join(clause.split())
    return text if text.startswith(("S1 ", "S2 ")) else f"S1 {text}"


def _is_spec_mark(node: ast.expr, aliases: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in aliases
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "spec"
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "mark"
    )


def _collected(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name.startswith("test")
    if isinstance(node, ast.ClassDef):
        return node.name.startswith("Test") and any(_collected(inner) for inner in node.body)
    return False


def find_markers(tree: ast.Module) -> Iterator[Marker]:
    """Every spec marker with what it is put on: a function, a class, or by pytestmark the whole module."""
    aliases = {
        target.id
        for statement in tree.body
        if isinstance(statement, ast.Assign) and _is_spec_mark(statement.value, set())
        for target in statement.targets
        if isinstance(target, ast.Name)
    }

    def calls(node: ast.AST) -> Iterator[ast.Call]:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and _is_spec_mark(inner.func, aliases):
                yield inner

    def marker(call: ast.Call, test: str | None) -> Marker:
        args = tuple(
            arg.value if isinstance(arg, ast.Constant) and isinstance(arg.value, str) else None for arg in call.args
        )
        return Marker(call.lineno, test, args)

    def visit(body: list[ast.stmt], prefix: tuple[str, ...], runs: bool) -> Iterator[Marker]:
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = (*prefix, statement.name)
                collected = runs and _collected(statement)
                for decorator in statement.decorator_list:
                    for call in calls(decorator):
                        yield marker(call, "::".join(name) if collected else None)
                if isinstance(statement, ast.ClassDef):
                    yield from visit(statement.body, name, collected)
                else:
                    for inner in statement.body:
                        yield from (marker(call, None) for call in calls(inner))
            else:
                owner = _pytestmark_owner(statement, prefix)
                # A module's or class's mark proves something only if there is a test in it. The owner of
                # `TestX.pytestmark` is mostly a state machine's TestCase, which the source does not show.
                found = runs and (owner != prefix or any(_collected(inner) for inner in body))
                test = "::".join(owner) if owner is not None and found else None
                yield from (marker(call, test) for call in calls(statement))

    yield from visit(tree.body, (), True)


def _pytestmark_owner(statement: ast.stmt, prefix: tuple[str, ...]) -> tuple[str, ...] | None:
    """Whose pytestmark a statement sets: the scope's own, or that of the class it names."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    for target in targets:
        if isinstance(target, ast.Name) and target.id == "pytestmark":
            return prefix
        if isinstance(target, ast.Attribute) and target.attr == "pytestmark" and isinstance(target.value, ast.Name):
            return (*prefix, target.value.id)
    return None


def collect(root: Path = ROOT) -> Report:
    """Read all test files below root/tests and match their markers with the clauses."""
    report = Report(load_clauses(root / CLAUSES_FILE))
    for file in sorted((root / "tests").rglob("*.py")):
        name = file.relative_to(root).as_posix()
        try:
            tree = ast.parse(file.read_bytes(), filename=name)
        except SyntaxError as error:
            report.errors.append(f"{name}:{error.lineno}: {error.msg}")
            continue
        is_test_file = file.name.startswith("test_") or file.name.endswith("_test.py")
        for found in find_markers(tree):
            where = f"{name}:{found.line}"
            if found.test is None or not is_test_file:
                report.errors.append(f"{where}: a spec marker that is on no test")
                continue
            if not found.args:
                report.errors.append(f"{where}: a spec marker without a clause")
            for arg in found.args:
                _add(report, where, f"{name}::{found.test}" if found.test else name, arg)
    return report


def _add(report: Report, where: str, test: str, arg: str | None) -> None:
    if arg is None:
        report.errors.append(f"{where}: a spec marker takes literal strings, so that ./dev spec can read it")
        return
    clause = report.clauses.get(normalise(arg))
    if clause is None:
        report.errors.append(f"{where}: '{arg}' is no clause of {CLAUSES_FILE}")
    elif clause.no_behaviour:
        report.errors.append(f"{where}: '{arg}' demands no behaviour ({clause.reason})")
    elif test not in (tests := report.tests.setdefault(clause.id, [])):
        tests.append(test)


def table(report: Report, *, missing: bool) -> Iterator[str]:
    width = max((len(clause.id) for clause in report.clauses.values()), default=0)
    for clause in report.clauses.values():
        tests = report.tests.get(clause.id, [])
        if missing and (tests or clause.no_behaviour):
            continue
        mark = "no behaviour" if clause.no_behaviour else "" if tests else "NO TEST"
        yield f"{clause.id:<{width}}  {clause.title}{f'  [{mark}]' if mark and not missing else ''}"
        yield from (f"{'':<{width}}    {test}" for test in tests)
    yield f"{len(report.proven)} of {len(report.provable)} clauses proven"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./dev spec", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--missing", action="store_true", help="only the clauses that no test proves")
    arguments = parser.parse_args(argv)
    report = collect()
    for error in report.errors:
        print(f"spec: {error}", file=sys.stderr)
    for line in table(report, missing=arguments.missing):
        print(line)
    return 1 if report.errors else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `./dev spec | head` is no error
    sys.exit(main())
