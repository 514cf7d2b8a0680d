"""The program: arguments, the checks in their order, what is printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from common.addresses import Role
from common.config import resolve
from common.config_errors import ConfigError, Information
from common.config_model import Config, ProviderKind
from common.config_slices import OrchestratorSlice
from common.free_memory import free_memory
from services.config_resolver.slices import slice_for
from services.orchestrator.doctor import engine, machine
from services.orchestrator.doctor import run as needs
from services.orchestrator.doctor.findings import Check, Finding, Result, fail, ok, results, skip
from services.orchestrator.planner import PlanError, RunPlan

PROGRAM = "mvp-orchestrator doctor"
HELP = f"""\
usage: {PROGRAM} [--config FILE] [--json] [ARGUMENTS OF A RUN]

Checks whether this machine can do the configured run, and says what to do where it cannot. Starts nothing.

  --config FILE   the configuration file (as --runtime-config); without it .config/config.toml if it exists
  --json          one JSON object: {{"ok": …, "checks": [{{"name", "status", "says", "do", "elapsed_ms"}}]}}

Status of a check: ok; warn (works, but worse than it could); fail (the run cannot work); skip (not needed).
Exit status: 0 if no check failed, else 1.

example: {PROGRAM} --config config/process.toml
"""
ENGINE_LIMIT_S = 25.0  # the Docker engine's own calls end after 20
COMPILE_LIMIT_S = 60.0
READ_LIMIT_S = 30.0
DISK_SLOW = "a file system does not answer: see whether its server is up (mount, df)"
ENGINE_SLOW = "the Docker engine hangs: restart it, or set DOCKER_HOST"


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """The exit status."""
    args = list(argv)
    if "--help" in args or "-h" in args:
        sys.stdout.write(HELP)
        return 0
    as_json = "--json" in args
    args = ["--runtime-config" if word == "--config" else word for word in args if word != "--json"]
    args = [f"--runtime-config={word.partition('=')[2]}" if word.startswith("--config=") else word for word in args]
    well, rows = True, []
    for result in diagnose(args, environ):
        well = well and result.finding.status != "fail"
        if as_json:
            rows.append({"name": result.name, **asdict(result.finding), "elapsed_ms": result.elapsed_ms})
        else:
            sys.stdout.write(shown(result))
            sys.stdout.flush()
    if as_json:
        sys.stdout.write(json.dumps({"ok": well, "checks": rows}, indent=2) + "\n")
    else:
        sys.stdout.write("\nthis machine can do the configured run\n" if well else "\nsomething failed: see above\n")
    return 0 if well else 1


def shown(result: Result) -> str:
    """A finding as lines for people."""
    found = result.finding
    way = f"{'':15}→ {found.do}\n" if found.do else ""
    return f"{found.status:<5} {result.name:<8} {found.says}\n{way}"


def diagnose(argv: Sequence[str], environ: Mapping[str, str]) -> Iterable[Result]:
    """All checks: first the configuration, then whatever it needs."""
    known: list[Config] = []

    def configuration() -> Finding:
        try:
            known.append(resolve(list(argv), environ, Path.cwd(), executable=Path(sys.argv[0])))
        except (ConfigError, Information) as error:
            return fail(str(error), "correct it, or name another file with --config")
        config = known[0]
        name = config.config_file or "no file, only defaults"
        notes = f" ({'; '.join(config.notes)})" if config.notes else ""
        return ok(f"{name}: provider {config.provider}, {config.pipeline_stages} stage(s){notes}")

    yield from results([Check("config", configuration, READ_LIMIT_S, DISK_SLOW)])
    config = known[0] if known else None
    rented = config is not None and config.provider is ProviderKind.VASTAI
    identity = config.vastai.ssh_identity if config is not None and config.vastai is not None else None
    yield from results(
        [
            Check("python", machine.python),
            Check("device", machine.device, machine.PROBE_LIMIT_S + 5),
            Check("kernels", machine.kernels, COMPILE_LIMIT_S),
            Check("compiler", machine.compiler),
            Check("docker", lambda: engine.docker(config, environ), ENGINE_LIMIT_S, ENGINE_SLOW),
            Check("swarm", lambda: engine.swarm(config, environ), ENGINE_LIMIT_S, ENGINE_SLOW),
            Check("ssh", lambda: machine.ssh(needed=rented, identity=identity)),
            *_of_run(config, environ),
        ]
    )


def _of_run(config: Config | None, environ: Mapping[str, str]) -> list[Check]:
    if config is None:
        return [Check(name, lambda: skip("no configuration")) for name in ("ports", "model", "memory", "disk")]
    part = slice_for(config, Role.ORCHESTRATOR, Path("/nonexistent"))
    assert isinstance(part, OrchestratorSlice)
    planned = _Planned(part)
    return [
        Check("ports", lambda: needs.ports(config)),
        Check("model", lambda: needs.model(part, planned()), READ_LIMIT_S, DISK_SLOW),
        Check("memory", lambda: needs.memory(part, planned(), free_memory()), READ_LIMIT_S, DISK_SLOW),
        Check("disk", lambda: needs.disk(config, planned(), environ), READ_LIMIT_S, DISK_SLOW),
    ]


class _Planned:
    """The plan or why there is none; each check makes it for itself, since a hung file system may hold one for ever."""

    def __init__(self, part: OrchestratorSlice) -> None:
        self._part = part

    def __call__(self) -> RunPlan | PlanError | None:
        try:
            return needs.plan(self._part)
        except PlanError as error:
            return error
