"""The object files of the C kernels in `cpu/`: which one this processor can run, and where it comes from.

An object is looked for in the package (a wheel ships one per instruction set, see build_kernels.py), then in
$XDG_CACHE_HOME/swactor-mq; else it is compiled with clang, gcc or the `ziglang` wheel, once, in about three seconds.
Where none of that works the portable backend does the work. Only the standard library and common/cache_files.py are
used here: the build hook of the wheel runs this file by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from common.cache_files import cache_folder, write_whole

SOURCES = Path(__file__).resolve().parent / "cpu"
SHIPPED = SOURCES / "objects"
CHOICE = "SMQ_ENGINE_KERNELS"  # "portable", or an instruction set's name: for tests and measurements
COMPILE_LIMIT_S = 120

# Best first: name, what /proc/cpuinfo must list, and the flags of gcc and clang, and of zig.
_SETS: dict[str, tuple[tuple[str, frozenset[str], list[str], str], ...]] = {
    "x86_64": (
        (
            "avx512vnni",
            frozenset(["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx2", "fma", "f16c", "bmi2"]),
            ["-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"],
            "x86_64_v4+avx512vnni",
        ),
        ("avx2", frozenset(["avx2", "fma", "f16c", "bmi2"]), ["-march=x86-64-v3"], "x86_64_v3"),
        ("base", frozenset(), ["-march=x86-64"], "x86_64"),
    ),
    "aarch64": (
        ("dotprod", frozenset(["asimddp"]), ["-march=armv8.2-a+dotprod"], "generic+v8_2a+dotprod"),
        ("base", frozenset(), ["-march=armv8-a"], "generic"),
    ),
}
_FLAGS = [
    "-c", "-x", "c", "-std=gnu11", "-O2", "-g0", "-fPIC", "-ffreestanding", "-fno-builtin", "-fno-math-errno",
    "-ffp-contract=off", "-fcf-protection=none", "-fno-asynchronous-unwind-tables", "-fno-stack-protector",
    "-fno-jump-tables", "-fvisibility=hidden", "-Wno-psabi",
]  # fmt: skip
_GCC_ONLY = ["-fno-toplevel-reorder", "-fno-reorder-functions", "-fno-tree-loop-distribute-patterns"]


class CompileError(OSError):
    """No compiler, or one that failed."""


def machine() -> str:
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


def _cpu_says(*names: str) -> str:
    """A value that Linux gives for the first processor; empty where it says nothing."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return ""


def cpu_features() -> frozenset[str]:
    return frozenset(_cpu_says("flags", "Features").split())


def cpu_vendor() -> str:
    """Such as GenuineIntel and AuthenticAMD; empty on other architectures."""
    return _cpu_says("vendor_id")


def instruction_sets(features: Iterable[str] | None = None, of: str | None = None) -> list[str]:
    """Names of the kernels that a processor can run, best first; empty for a machine without any."""
    has = cpu_features() if features is None else frozenset(features)
    return [name for name, needs, _, _ in _SETS.get(of or machine(), ()) if needs <= has]


def chosen() -> list[str]:
    """The instruction sets to try. SMQ_ENGINE_KERNELS narrows them; "portable" gives none."""
    able = instruction_sets() if os.uname().sysname == "Linux" else []
    wanted = os.environ.get(CHOICE, "")
    if not wanted:
        return able
    return [name for name in able if name == wanted]


def source_stamp() -> str:
    """Changes with every source file and flag."""
    sets = [(arch, [(name, *flags) for name, _, *flags in rows]) for arch, rows in _SETS.items()]
    digest = hashlib.sha256(repr((_FLAGS, _GCC_ONLY, sets)).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def zig() -> str | None:
    spec = importlib.util.find_spec("ziglang")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        program = Path(folder) / "zig"
        if os.access(program, os.X_OK):
            return str(program)
    return None


def compilers() -> list[str]:
    """The C compilers of this machine, best first: clang, gcc, zig."""
    found = [path for name in ("clang", "gcc", "cc") if (path := shutil.which(name))]
    return [*found[:1], *([path] if (path := zig()) else [])]


def compile_object(name: str, target: Path, of: str | None = None, source: Path = SOURCES / "step.c") -> None:
    """Compile for one instruction set. Raises CompileError."""
    arch = of or machine()
    _, _, march, mcpu = next(row for row in _SETS[arch] if row[0] == name)
    problem = "neither clang nor gcc is on the PATH, nor is the Python package ziglang installed"
    for program in compilers():
        is_zig = Path(program).name == "zig"
        if arch != machine() and not is_zig:
            continue
        if is_zig:
            command = [program, "cc", "-target", f"{arch}-linux-musl", f"-mcpu={mcpu}", "-fno-sanitize=undefined"]
        else:
            command = [program, *march, *(_GCC_ONLY if "clang" not in Path(program).name else [])]
        with tempfile.TemporaryDirectory(prefix="smq-kernels-") as folder:
            made = Path(folder) / "step.o"
            env = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
            try:
                result = subprocess.run(
                    [*command, *_FLAGS, str(source), "-o", str(made)],
                    env=env, capture_output=True, text=True, check=False, timeout=COMPILE_LIMIT_S, cwd=folder,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                problem = f"{program}: {error}"
                continue
            if result.returncode == 0 and made.is_file():
                write_whole(target, made.read_bytes())
                return
            lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
            problem = f"{program}: {next((line for line in lines if 'error:' in line), lines[-1])}"
    raise CompileError(f"the kernels for {name} cannot be compiled: {problem}")


def shipped_object(name: str, of: str | None = None) -> Path:
    return SHIPPED / f"{of or machine()}-{name}-{source_stamp()}.o"


def present_object(name: str) -> tuple[bytes, str] | None:
    """The object for one instruction set and where it came from, None where it would have to be compiled."""
    shipped = shipped_object(name)
    for path, origin in ((shipped, "shipped"), (cache_folder() / shipped.name, "cached")):
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            if data[:4] == b"\x7fELF":
                return data, origin
    return None


def find_object(name: str) -> tuple[bytes, str]:
    """The object for one instruction set and where it came from. Raises CompileError."""
    if (found := present_object(name)) is not None:
        return found
    cached = cache_folder() / shipped_object(name).name
    try:
        compile_object(name, cached)
        return cached.read_bytes(), "compiled"
    except CompileError:
        raise
    except OSError:  # a home that cannot be written
        with tempfile.TemporaryDirectory(prefix="smq-kernels-") as folder:
            compile_object(name, Path(folder) / "step.o")
            return (Path(folder) / "step.o").read_bytes(), "compiled"
