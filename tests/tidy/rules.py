"""The rules of the house as functions from source to complaints, so that each rule can be tested itself.

They read syntax trees and import nothing: a module that breaks a rule may also break when imported.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("common", "services", "worker", "tools", "tests", "bench")
FILE_LINES_MAX = 600

# The cores and what they are made of: whoever runs them brings clock, randomness and I/O (design.md 5), so
# that a simulated cluster runs the very same code.
PURE_COMMON = frozenset(
    {"addresses", "codec", "envelope", "effects", "actors", "session", "link", "broker", "views", "limits"}
    | {"redact", "backoff", "stopping", "datastream", "datastream_publisher", "records", "service_actor"}
    | {"node", "session_table", "held", "datagram", "broker_node", "config_slices", "edge_records"}
)
PURE_FOLDERS = ("common/swim/", "common/messages/")
IMPURE_MODULES = frozenset(
    {"socket", "zmq", "time", "random", "uuid", "threading", "subprocess", "asyncio", "secrets", "select"}
    | {"multiprocessing", "selectors", "signal", "ssl", "concurrent", "tempfile"}
    | {"common.bus", "common.loop", "common.security"}
)
IMPURE_NAMES = frozenset(
    {"os.environ", "os.getenv", "os.urandom", "os.getpid"}
    | {"datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
)

ZMQ_ALLOWED = ("common/bus.py", "common/bus_edges.py", "tools/tap.py", "tools/tap/", "tests/", "bench/")
PICKLES = frozenset({"pickle", "cPickle", "dill", "shelve", "marshal", "cloudpickle"})


def is_pure(name: str) -> bool:
    path = Path(name)
    if name.startswith(("tests/", "bench/")):
        return False
    if path.name == "core.py" or name.startswith(PURE_FOLDERS):
        return True
    return path.parent.as_posix() == "common" and path.stem in PURE_COMMON


def _is_type_checking(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "TYPE_CHECKING") or (
        isinstance(node, ast.Attribute) and node.attr == "TYPE_CHECKING"
    )


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of `if TYPE_CHECKING:`, which never run: a core may name the type of its rng."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for other in node.orelse:
                yield other
                yield from runtime_nodes(other)
            continue
        yield node
        yield from runtime_nodes(node)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of whatever is imported; `from a import b` counts as a.b."""
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def _within(name: str, modules: frozenset[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[: end + 1]) in modules for end in range(len(parts)))


def impure(name: str, source: str) -> list[str]:
    """What a pure module may not touch: I/O, clocks, randomness, the environment."""
    tree = ast.parse(source)
    found = [
        f"{name}:{line}: a pure module imports {module}"
        for line, module in imports(tree)
        if _within(module, IMPURE_MODULES)
    ]
    found += [
        f"{name}:{line}: a pure module imports {module}" for line, module in imports(tree) if module in IMPURE_NAMES
    ]
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if any(dotted == bad or dotted.endswith(f".{bad}") for bad in IMPURE_NAMES):
                found.append(f"{name}:{node.lineno}: a pure module uses {dotted}")
    return found


def imports_zmq(name: str, source: str) -> list[str]:
    """Only common/bus.py knows the transport; the tap listens beside it on purpose."""
    if name.startswith(ZMQ_ALLOWED):
        return []
    return [
        f"{name}:{line}: imports {module}; only common/bus.py may"
        for line, module in imports(ast.parse(source))
        if module == "zmq" or module.startswith("zmq.")
    ]


def dangerous(name: str, source: str) -> list[str]:
    """What runs foreign bytes or strings as code, and the second event loop."""
    tree = ast.parse(source)
    found = [
        f"{name}:{line}: imports {module}"
        for line, module in imports(tree)
        if _within(module, PICKLES) or _within(module, frozenset({"zmq.asyncio"}))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append(f"{name}:{node.lineno}: calls {node.func.id}()")
            if ast.unparse(node.func) == "os.system":
                found.append(f"{name}:{node.lineno}: calls os.system()")
            found += [
                f"{name}:{node.lineno}: shell=True"
                for keyword in node.keywords
                if keyword.arg == "shell" and isinstance(keyword.value, ast.Constant) and bool(keyword.value.value)
            ]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "zmq.asyncio":
            found.append(f"{name}:{node.lineno}: uses zmq.asyncio")
    return found


def prints(name: str, source: str) -> list[str]:
    """A service's stdout is captured and archived; what it has to say goes through the log or a record."""
    if not name.startswith(("services/", "common/")) or name.endswith("/__main__.py"):
        return []
    return [
        f"{name}:{node.lineno}: print() in a service"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def too_long(name: str, source: str) -> list[str]:
    lines = source.count("\n")
    return [f"{name}: {lines} lines; cut it below {FILE_LINES_MAX}"] if lines > FILE_LINES_MAX else []


# Put together at run time, so that this file does not find itself.
_LATER = re.compile(r"\b(" + "TO" + r"DO|FIX" + r"ME)\b")
_OWN_PATHS = re.compile(r"(?<![\w.$}\-])/(" + "wo" + r"rk|ro" + r"ot|home/\w+)/")


def left_for_later(name: str, source: str) -> list[str]:
    return [
        f"{name}:{number}: {found.group()}: do it or file an issue"
        for number, line in enumerate(source.splitlines(), 1)
        if (found := _LATER.search(line))
    ]


def own_paths(name: str, source: str) -> list[str]:
    """Paths of one machine work on no other."""
    return [
        f"{name}:{number}: a path of one machine: {found.group()}"
        for number, line in enumerate(source.splitlines(), 1)
        if (found := _OWN_PATHS.search(line))
    ]


def message_classes(source: str) -> Iterator[tuple[ast.ClassDef, int | None]]:
    """The message types of a catalogue file with their explicit tag, None where it has none."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        if not any(ast.unparse(base).rpartition(".")[2] == "Message" for base in node.bases):
            continue
        tag = next((keyword.value for keyword in node.keywords if keyword.arg == "tag"), None)
        yield node, tag.value if isinstance(tag, ast.Constant) and type(tag.value) is int else None


def undocumented_messages(name: str, source: str) -> list[str]:
    found = []
    for node, tag in message_classes(source):
        if not ast.get_docstring(node):
            found.append(f"{name}:{node.lineno}: {node.name} does not say who sends it and what answers it")
        if tag is None:
            found.append(f"{name}:{node.lineno}: {node.name} has no explicit tag=N")
    return found


def recorded_tags(text: str) -> dict[int, str]:
    """tests/golden/tags.toml in either direction: `Hello = 1` or `1 = "Hello"`, in tables or not."""
    tags: dict[int, str] = {}

    def read(table: dict[str, object]) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                read(value)
            elif isinstance(value, int):
                tags[value] = key
            elif isinstance(value, str) and key.isdigit():
                tags[int(key)] = value

    read(tomllib.loads(text))
    return tags


def tag_changes(recorded: dict[int, str], current: dict[int, str]) -> list[str]:
    """Tags are append-only: an old recording must be readable, and no peer may misread a newer one."""
    found = [
        f"tag {tag} was {was}, now {current.get(tag, 'nothing')}: tags are never reused or removed"
        for tag, was in recorded.items()
        if current.get(tag) != was
    ]
    found += [
        f"tag {tag} ({name}) is not in tests/golden/tags.toml: append it"
        for tag, name in current.items()
        if tag not in recorded
    ]
    return found


def python_files(root: Path = ROOT) -> list[tuple[str, str]]:
    """Name and source of all our Python files."""
    return [
        (path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for folder in CODE_FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
        if "__pycache__" not in path.parts
    ]


def text_files(root: Path = ROOT) -> list[tuple[str, str]]:
    """Name and text of all files that are, or are about to be, in the repository."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    found = []
    for name in sorted(filter(None, listed)):
        path = root / name
        if name == "uv.lock" or not path.is_file() or path.is_symlink():
            continue
        content = path.read_bytes()
        if b"\0" not in content[:8192]:
            found.append((name, content.decode("utf-8", "replace")))
    return found
