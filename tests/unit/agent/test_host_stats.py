"""Worker channels host.cpu, host.memory and host.gpu: right numbers, null for what cannot be read, never an error."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from common.effects import JobDone, RunJob
from tests.support.harness import Harness
from worker.agent.host_stats import (
    CPU,
    GPU,
    GPU_SAMPLE_MS,
    MEMORY,
    SAMPLE_MS,
    HostRead,
    HostSampler,
    ReadHost,
    parse_gpus,
    query_gpus,
    read_host,
)

SMI = """\
0, GPU-5e3c2f0a-1111-2222-3333-444455556666, NVIDIA GeForce RTX 4090, 512, 24564, 37, 12, 41, 55.20
1, GPU-7d, "Tesla, with a comma", 0, 81559, [N/A], [Not Supported], 33, [N/A]
"""


def samples(harness: Harness) -> list[tuple[str, dict[str, Any]]]:
    return [(effect.channel, json.loads(effect.payload)) for effect in harness.observed()]


def test_cpu_is_the_difference_of_two_samples() -> None:
    harness = Harness(HostSampler(gpu=False))
    harness.advance(0)
    assert harness.effects() == [ReadHost()]
    harness.tell(HostRead(busy=100, total=1000, worker=10, cores=4, memory_total=8, memory_available=4, agent_rss=1))
    ((channel, memory),) = samples(harness)
    assert (channel, memory["schema"], memory["total_bytes"], memory["engine_rss_bytes"]) == (
        MEMORY,
        "host.memory.v1",
        8,
        None,
    )
    harness.advance(SAMPLE_MS)
    assert harness.effects() == [ReadHost()]
    harness.tell(HostRead(busy=150, total=1400, worker=60, cores=4, load1=0.5))
    found = dict(samples(harness))
    assert (found[CPU]["percent"], found[CPU]["worker_percent"], found[CPU]["load1"]) == (12.5, 50.0, 0.5)
    assert (found[CPU]["seq"], found[MEMORY]["seq"]) == (0, 1)
    harness.advance(10 * SAMPLE_MS)
    assert not [effect for effect in harness.effects() if isinstance(effect, RunJob)], "there is no GPU to ask"


def test_a_machine_that_cannot_be_read_gives_nulls(tmp_path: Path) -> None:
    read = read_host(4242, tmp_path)
    assert (read.busy, read.total, read.worker, read.memory_total, read.agent_rss) == (None,) * 5
    harness = Harness(HostSampler(gpu=False))
    for _ in range(2):
        harness.tell(read)
    found = dict(samples(harness))
    assert found[CPU]["percent"] is None and found[MEMORY]["total_bytes"] is None


def test_this_machine_can_be_read() -> None:
    read = read_host(os.getpid())
    assert read.total and read.busy is not None and 0 < read.busy <= read.total
    assert read.memory_total and read.memory_available and read.memory_available <= read.memory_total
    assert read.agent_rss and read.engine_rss and read.agent_rss > 1 << 20


def test_strange_proc_files_are_no_error(tmp_path: Path) -> None:
    for name, text in {"stat": "cpu one two", "meminfo": "MemTotal: lots kB\n:", "loadavg": ""}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) b) S 1")
    assert read_host(7, tmp_path).total is None


def test_gpus_are_asked_every_five_seconds_one_query_at_a_time() -> None:
    harness = Harness(HostSampler(gpu=True))
    harness.advance(3 * GPU_SAMPLE_MS)
    jobs = [effect for effect in harness.effects() if isinstance(effect, RunJob)]
    assert len(jobs) == 1, "the first is not answered yet"
    harness.tell(JobDone("nvidia-smi", "gpu", (35, SMI)))
    ((first, second),) = [sample["gpus"] for channel, sample in samples(harness) if channel == GPU]
    assert first == {
        "index": 0,
        "uuid": "GPU-5e3c2f0a-1111-2222-3333-444455556666",
        "name": "NVIDIA GeForce RTX 4090",
        "memory_used_mib": 512,
        "memory_total_mib": 24564,
        "utilization_gpu_percent": 37,
        "utilization_memory_percent": 12,
        "temperature_c": 41,
        "power_draw_w": 55.2,
    }
    assert (second["name"], second["utilization_gpu_percent"], second["power_draw_w"]) == (
        "Tesla, with a comma",
        None,
        None,
    )
    harness.advance(GPU_SAMPLE_MS)
    assert [effect for effect in harness.effects() if isinstance(effect, RunJob)]
    harness.tell(JobDone("nvidia-smi", "gpu", None, "no devices were found"))
    ((_, sample),) = [item for item in samples(harness) if item[0] == GPU]
    assert (sample["gpus"], sample["error"], sample["query_elapsed_ms"]) == ([], "no devices were found", None)


def test_the_query_runs_the_program_and_its_failure_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'E'\n{SMI}E\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert len(parse_gpus(query_gpus()[1])) == 2
    program.write_text("#!/bin/sh\necho NVIDIA-SMI has failed >&2\nexit 9\n")
    with pytest.raises(OSError, match="has failed"):
        query_gpus()
