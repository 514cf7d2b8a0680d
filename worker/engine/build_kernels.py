"""Hatchling's build hook: compiles the C kernels, so that whoever installs the wheel needs no compiler.

A wheel gets one object per instruction set, of every architecture that the compilers at hand can make (zig makes
all); an editable install, the one of this machine's processor. Objects are data: the wheel stays `py3-none-any`, and
on a machine without an object of its own the engine compiles one or uses the portable backend. A build without any
compiler warns and goes on.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _load(root: str) -> ModuleType:
    """cpu_objects.py by itself: the project's dependencies are not there while it is built. What it imports of common/
    has none either."""
    spec = importlib.util.spec_from_file_location("_cpu_objects", Path(root) / "worker" / "engine" / "cpu_objects.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, root)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(root)
    return module


class KernelsHook(BuildHookInterface):  # type: ignore[misc]
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return [] if any(map(shutil.which, ("clang", "gcc", "cc"))) else ["ziglang>=0.13"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        objects = _load(self.root)
        if version == "editable":
            wanted = [(objects.machine(), name) for name in objects.instruction_sets()[:1]]
        else:
            wanted = [(arch, row[0]) for arch, rows in objects._SETS.items() for row in rows]
        for old in objects.SHIPPED.glob("*.o"):
            if objects.source_stamp() not in old.name:
                old.unlink()
        missing = [pair for pair in wanted if not objects.shipped_object(pair[1], pair[0]).is_file()]

        def build(pair: tuple[str, str]) -> str | None:
            try:
                objects.compile_object(pair[1], objects.shipped_object(pair[1], pair[0]), pair[0])
            except OSError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(4) as pool:
            for problem in filter(None, pool.map(build, missing)):
                self.app.display_warning(problem)
        build_data["artifacts"].append("worker/engine/cpu/objects/*.o")
