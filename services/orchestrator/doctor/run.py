"""Checks of what the configured run needs of this machine: ports, the model file, memory, disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from common.cache_files import cache_folder
from common.config_model import Config, ProviderKind, SocketAddr
from common.config_slices import OrchestratorSlice
from common.door import PORTS
from common.hub_file import full_name
from common.messages.node_agent import HuggingFaceGguf
from common.security import SOCKET_PATH_BYTES_MAX, socket_path_bytes
from services.orchestrator.doctor.findings import Finding, fail, ok, skip, warn
from services.orchestrator.plan_command import stage_size
from services.orchestrator.planner import PlanError, RunPlan
from services.orchestrator.planner_facts import NoRangesError, is_on_hub, planning_path
from services.orchestrator.run_dir import default_path
from services.provisioner.ledger import LedgerError, ledger_folder

SERVICES_BYTES = 240 * 2**20  # six of 40 MiB
WORKER_BYTES = 150 * 2**20  # Python and tinygrad, of each stage
ARCHIVE_BYTES_MIN = 2**30
AWAY = (ProviderKind.VASTAI, ProviderKind.EXTERNAL, ProviderKind.SWARM)
"""Whose workers may reach what this machine does not."""


# --- ports ------------------------------------------------------------------------------------------------------
def ports(config: Config) -> Sequence[Finding]:
    """Each address that this run will bind, bound and let go."""
    wanted = [("[prompt] rpc_addr", config.rpc_bind, 1)]
    for key, addr in (
        ("[prompt] http_addr", config.http_addr),
        ("[observability] dashboard_addr", config.dashboard_addr),
        ("[observability] metrics_addr", config.metrics_addr),
    ):
        wanted += [(key, addr, 1)] if addr is not None else []
    if config.relay.local and config.relay.bind_addr is not None:
        wanted.append(("[relay] bind_addr", config.relay.bind_addr, PORTS))
    findings, free = [], []
    for key, addr, count in wanted:
        if addr.port == 0:
            free.append(f"{addr} (any)")
            continue
        bad = [
            one for port in range(addr.port, addr.port + count) if (one := port_problem(SocketAddr(addr.host, port)))
        ]
        if bad:
            way = f"stop what listens there, or set {key} to another address"
            findings.append(fail(f"{key}: {bad[0]}", way))
        else:
            free.append(str(addr))
    return [*findings, *([ok(f"free: {', '.join(free)}")] if free else [])]


def port_problem(addr: SocketAddr) -> str:
    """Why nobody can listen there now, "" if one can."""
    family = socket.AF_INET6 if ":" in addr.host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((addr.host, addr.port))
            sock.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                who = holder(addr.port)
                return f"{addr} is in use{f' by {who}' if who else ''}"
            if error.errno == errno.EADDRNOTAVAIL:
                return f"{addr.host} is no address of this machine"
            return f"{addr}: {error.strerror}"
        except OverflowError:
            return f"{addr} is above port 65535"
    return ""


def holder(port: int) -> str:
    """ "process 123 (name)" of who listens at this TCP port, "" when it cannot be seen (another user's)."""
    inodes = {row[9] for row in _tcp_rows() if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for link in folder.iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(link).removeprefix("socket:[").removesuffix("]") in inodes:
                        name = (folder.parent / "comm").read_text().strip()
                        return f"process {folder.parent.name} ({name})"
    return ""


def _tcp_rows() -> Iterator[list[str]]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            yield from (line.split() for line in Path(table).read_text().splitlines()[1:])


# --- the model --------------------------------------------------------------------------------------------------
def model(part: OrchestratorSlice, planned: RunPlan | PlanError) -> Finding:
    """Whether the model's file is there, whole, and one that the engine knows; on a hub, whether it can be had."""
    if is_on_hub(part):
        return _hub_model(part, planned)
    if isinstance(planned, PlanError):
        return fail(str(planned), "./dev fetch-model fetches the default model; [model] names another file")
    path = planning_path(part)
    return ok(f"{path} ({path.stat().st_size / 2**20:.0f} MiB): {_facts(planned)}")


def _hub_model(part: OrchestratorSlice, planned: RunPlan | PlanError) -> Finding:
    """As the planner sees it; without a plan the worker alone has to reach the hub."""
    assert isinstance(part.gguf_source, HuggingFaceGguf)
    name = full_name(part.gguf_source)
    if isinstance(planned, RunPlan):
        who = "each worker fetches its own layers" if len(planned.stages) > 1 else "the worker fetches it"
        return ok(f"{name} on Hugging Face: {_facts(planned)}; {who} ({_gib(planned.facts.file_bytes)} in all)")
    way = "see whether this machine reaches the hub (HF_ENDPOINT, HF_TOKEN, a proxy), or set [model] cached_path"
    if part.pipeline_stages > 1:
        return fail(str(planned), way)
    why = str(planned).partition(" before it starts: ")[2].partition("; ./dev fetch-model")[0] or str(planned)
    says = f"{name} on Hugging Face cannot be looked into from here: {why}"
    if isinstance(planned, NoRangesError):
        return ok(f"{says}; the worker fetches it whole")
    if part.provider in AWAY:
        return warn(f"{says}; its worker, elsewhere, has to fetch it", way)
    return fail(says, way)


def _facts(planned: RunPlan) -> str:
    stages = f"{len(planned.stages)} stage{'s'[: len(planned.stages) != 1]}"
    return f"{planned.facts.num_layers} layers, context {planned.facts.max_seq_len}, {stages}"


def memory(part: OrchestratorSlice, planned: RunPlan | PlanError, there: int) -> Finding:
    """Whether the stages fit this machine. there: of free_memory."""
    if part.provider not in (ProviderKind.PROCESS, ProviderKind.DOCKER):
        return skip(f"the workers of provider {part.provider} have their own")
    if not isinstance(planned, RunPlan):
        return skip("the model's size is not known here")
    if not there:
        return skip("this machine does not say how much memory is available")
    sizes = [stage_size(planned, stage) for stage in planned.stages]
    processes = SERVICES_BYTES + WORKER_BYTES * len(sizes)
    packed = sum(size.packed + size.cache for size in sizes) + processes
    unpacked = sum(size.float16 + size.cache for size in sizes) + processes
    says = f"{_gib(packed)} needed ({_gib(unpacked)} by the portable kernels), {_gib(there)} available"
    way = "use a smaller [model] max_context or model, or more machines ([provider] kind = docker, swarm, external)"
    if packed > there:
        return fail(says, way)
    return warn(says, way) if unpacked > there else ok(says)


# --- disk -------------------------------------------------------------------------------------------------------
def disk(
    config: Config, part: OrchestratorSlice, planned: RunPlan | PlanError, environ: Mapping[str, str]
) -> Sequence[Finding]:
    """Room and rights where a run writes."""
    cached, what = 0, "the cache of repacked weights"
    if isinstance(planned, RunPlan):
        cached = sum(stage_size(planned, stage).packed for stage in planned.stages)
        if is_on_hub(part) and part.provider == ProviderKind.PROCESS:
            cached, what = cached + planned.facts.file_bytes, "the cache of fetched models and repacked weights"
    findings = [
        _folder(what, cache_folder(), cached, "XDG_CACHE_HOME", worst="warn"),
        _ledger(environ),
        _run_directory(config.run_dir or default_path(environ)),
    ]
    if config.datastream_frame_log is not None:
        folder, key = config.datastream_frame_log.parent, "[observability] datastream_frame_log"
        needed = config.archive_max_bytes or ARCHIVE_BYTES_MIN
        findings.append(_folder("the frame archive", folder, needed, key, worst="warn"))
    return findings


def _ledger(environ: Mapping[str, str]) -> Finding:
    what = "the ledger of started workers"
    try:
        return _folder(what, ledger_folder(environ), 2**20, "XDG_STATE_HOME")
    except LedgerError:
        return fail(f"there is no place for {what}", "set HOME or XDG_STATE_HOME")


def _folder(what: str, path: Path, needed: int, key: str, *, worst: str = "fail") -> Finding:
    """worst: what too little room is; a folder that cannot be written is a failure where it is "fail"."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return fail(f"{what}: {there} is no folder", f"set {key} to another place")
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding("warn" if worst == "warn" else "fail", f"{what}: {there} cannot be written", f"set {key}")
    free = shutil.disk_usage(there).free
    says = f"{what}: {path}, {_gib(free)} free"
    if free < needed:
        finding = warn if worst == "warn" else fail
        return finding(f"{says}, {_gib(needed)} wanted", f"free some space, or set {key} to another disk")
    return ok(says)


def _run_directory(path: Path) -> Finding:
    if socket_path_bytes(path) > SOCKET_PATH_BYTES_MAX:
        return fail(f"the run directory {path} has too long a name for sockets", "set a shorter [runtime] run_dir")
    return _folder("the run directory", path, 2**20, "[runtime] run_dir")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
