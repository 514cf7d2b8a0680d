"""What a worker's machine is doing: cpu and memory each second, its GPUs each five (rust-swactor.md 7).

Channels of the worker's own datastream, one JSON text each:
  host.cpu     {schema: "host.cpu.v1", seq, sample_unix_ms, percent, cores, load1, worker_percent}
  host.memory  {schema: "host.memory.v1", seq, sample_unix_ms, total_bytes, available_bytes, agent_rss_bytes,
                engine_rss_bytes}
  host.gpu     {schema: "host.gpu.v1", seq, sample_unix_ms, query_elapsed_ms, gpus: [{index, uuid, name,
                memory_used_mib, memory_total_mib, utilization_gpu_percent, utilization_memory_percent,
                temperature_c, power_draw_w}], error?}; only where there is an nvidia-smi
percent: of all cores; worker_percent: agent and engine, of one core. What cannot be read is null.
"""

from __future__ import annotations

import csv
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from common.actors import Actor, Ctx
from common.effects import Effect, JobDone, RunJob

CPU, MEMORY, GPU = "host.cpu", "host.memory", "host.gpu"
SAMPLE_MS = 1000
GPU_SAMPLE_MS = 5000  # nvidia-smi costs up to half a second of a core
GPU_QUERY_LIMIT_MS = 10_000
GPU_JOB = "nvidia-smi"

_GPU_FIELDS = {
    "index": "index",
    "uuid": "uuid",
    "name": "name",
    "memory.used": "memory_used_mib",
    "memory.total": "memory_total_mib",
    "utilization.gpu": "utilization_gpu_percent",
    "utilization.memory": "utilization_memory_percent",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_draw_w",
}
_TEXT_FIELDS = frozenset({"uuid", "name"})


@dataclass(frozen=True, slots=True)
class ReadHost(Effect):
    """Read the machine's counters; answered by HostRead."""


@dataclass(frozen=True, slots=True)
class HostRead:
    """Event: raw counters. busy, total: jiffies of all cores; worker: jiffies of agent and engine; None: unreadable."""

    busy: int | None = None
    total: int | None = None
    worker: int | None = None
    cores: int = 1
    load1: float | None = None
    memory_total: int | None = None
    memory_available: int | None = None
    agent_rss: int | None = None
    engine_rss: int | None = None


class HostSampler(Actor):
    """Emits the channels above until its process ends. gpu: there is an nvidia-smi to ask."""

    Incoming = (HostRead, JobDone)

    def __init__(self, *, gpu: bool) -> None:
        self._gpu = gpu
        self._before: HostRead | None = None
        self._seq = {CPU: 0, MEMORY: 0, GPU: 0}

    def on_start(self, ctx: Ctx) -> None:
        """The first sample only sets the counters that the second one is compared with."""
        ctx.timer("sample", 0)
        if self._gpu:
            ctx.timer("gpu", 0)

    def on_timer(self, key: str, ctx: Ctx) -> None:
        """Ask; the answer is an event."""
        if key == "gpu":
            ctx.effect(RunJob(GPU_JOB, "gpu", limit_ms=GPU_QUERY_LIMIT_MS))
        else:
            ctx.effect(ReadHost())
            ctx.timer("sample", SAMPLE_MS)

    def receive(self, msg: Any, ctx: Ctx) -> None:
        """Turn counters into records."""
        if isinstance(msg, JobDone):
            self._gpus(msg, ctx)
            return
        before, self._before = self._before, msg
        if before is not None:
            ticks = _minus(msg.total, before.total)
            cpu = {
                "percent": _share(_minus(msg.busy, before.busy), ticks),
                "cores": msg.cores,
                "load1": msg.load1,
                "worker_percent": _share(_minus(msg.worker, before.worker), ticks, msg.cores),
            }
            self._emit(CPU, cpu, ctx)
        memory = {
            "total_bytes": msg.memory_total,
            "available_bytes": msg.memory_available,
            "agent_rss_bytes": msg.agent_rss,
            "engine_rss_bytes": msg.engine_rss,
        }
        self._emit(MEMORY, memory, ctx)

    def _gpus(self, done: JobDone, ctx: Ctx) -> None:
        elapsed_ms, text = done.result if not done.error else (None, "")
        sample: dict[str, Any] = {"query_elapsed_ms": elapsed_ms, "gpus": parse_gpus(text)}
        if done.error:
            sample["error"] = done.error
        self._emit(GPU, sample, ctx)
        ctx.timer("gpu", GPU_SAMPLE_MS)

    def _emit(self, channel: str, sample: dict[str, Any], ctx: Ctx) -> None:
        head = {"schema": f"{channel}.v1", "seq": self._seq[channel], "sample_unix_ms": ctx.wall_ms}
        self._seq[channel] += 1
        ctx.observe(channel, msgspec.json.encode({**head, **sample}))


def _minus(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else max(0, now - before)


def _share(part: int | None, whole: int | None, cores: int = 1) -> float | None:
    return None if part is None or not whole else round(100 * cores * part / whole, 1)


# --- reading ------------------------------------------------------------------------------------------------------
def read_host(engine_pid: int, proc: Path = Path("/proc")) -> HostRead:
    """The counters now; files that are missing or strange are None. Some 100 µs, so it may run in the loop."""
    busy, total = _cpu_ticks(_text(proc / "stat"))
    memory = dict(_meminfo(_text(proc / "meminfo")))
    own_ticks, own_rss = _process(_text(proc / "self" / "stat"))
    engine_ticks, engine_rss = _process(_text(proc / str(engine_pid) / "stat")) if engine_pid else (0, 0)
    load = _text(proc / "loadavg").split()
    return HostRead(
        busy=busy,
        total=total,
        worker=None if own_ticks is None or engine_ticks is None else own_ticks + engine_ticks,
        cores=os.cpu_count() or 1,
        load1=float(load[0]) if load else None,
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        agent_rss=own_rss,
        engine_rss=engine_rss,
    )


def query_gpus() -> tuple[int, str]:
    """(milliseconds, CSV) of nvidia-smi. Raises OSError or subprocess.SubprocessError. Runs as a job."""
    begin = time.monotonic()
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GPU_QUERY_LIMIT_MS / 1000
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise OSError(lines[-1] if lines else f"nvidia-smi ended with status {done.returncode}")
    return int((time.monotonic() - begin) * 1000), done.stdout


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """One entry per CSV line; "[N/A]", "[Not Supported]" and other words for nothing are null."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(_GPU_FIELDS):
            found.append(
                {
                    key: value.strip() if key in _TEXT_FIELDS else _number(value)
                    for key, value in zip(_GPU_FIELDS.values(), row, strict=True)
                }
            )
    return found


def _number(text: str) -> float | int | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _cpu_ticks(stat: str) -> tuple[int | None, int | None]:
    first = stat.partition("\n")[0].split()
    if len(first) < 6 or first[0] != "cpu" or not all(item.isdigit() for item in first[1:9]):
        return None, None
    # guest times are counted in user already; idle and iowait are no work.
    ticks = [int(item) for item in first[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _meminfo(text: str) -> list[tuple[str, int]]:
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[1].isdigit() and words[2] == "kB":
            found.append((words[0].rstrip(":"), int(words[1]) * 1024))
    return found


def _process(stat: str) -> tuple[int | None, int | None]:
    """(jiffies, resident bytes) of /proc/PID/stat; the name in it may hold spaces and parentheses."""
    words = stat.rpartition(")")[2].split()
    if len(words) < 22:
        return None, None
    return int(words[11]) + int(words[12]), int(words[21]) * os.sysconf("SC_PAGE_SIZE")
