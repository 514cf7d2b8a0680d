"""The program: arguments, the checks in their order, what is printed."""

from __future__ import annotations

import json
import os
import sys
import threading
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
from services.orchestrator.planner_facts import is_on_hub, make_plan

PROGRAM = "mvp-orchestrator doctor"
HELP = f"""\
usage: {PROGRAM} [--config FILE] [--json] [ARGUMENTS OF A RUN]

Checks whether this machine can do the configured run, and says what to do where it cannot. Starts nothing; the header
of a model on Hugging Face, a few megabytes, is fetched into the cache, where a start finds it.

  --config FILE   the configuration file (as --runtime-config); without it .config/config.toml if it exists
  --json          one JSON object: {{"ok": …, "checks": [{{"name", "status", "says", "do", "elapsed_ms"}}]}}

Status of a check: ok; warn (works, but worse than it could); fail (the run cannot work); skip (not needed).
Exit status: 0 if no check failed, else 1.

example: {PROGRAM} --config config/process.toml
"""
ENGINE_LIMIT_S = 25.0  # the Docker engine's own calls end after 20
COMPILE_LIMIT_S = 60.0
READ_LIMIT_S = 30.0
HUB_LIMIT_S = 60.0  # a header over a slow line; what has come is kept for the next try
HUB_SLOW = "the hub does not answer: see whether this machine reaches it (HF_ENDPOINT, a proxy)"
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
    planned = _Planned(part, config.hf_token.reveal() if config.hf_token is not None else None)
    # The plan may wait for the hub a little less, so that its own word is heard.
    limit_s, slow = (HUB_LIMIT_S + 10, HUB_SLOW) if is_on_hub(part) else (READ_LIMIT_S, DISK_SLOW)
    return [
        Check("ports", lambda: needs.ports(config)),
        Check("model", lambda: needs.model(part, planned()), limit_s, slow),
        Check("memory", lambda: needs.memory(part, planned(), free_memory()), limit_s, slow),
        Check("disk", lambda: needs.disk(config, part, planned(), environ), limit_s, slow),
    ]


class _Planned:
    """The plan or why there is none, made once for all checks. token: for the hub, None for the user's own."""

    def __init__(self, part: OrchestratorSlice, token: str | None) -> None:
        self._part, self._token = part, token
        self._lock = threading.Lock()
        self._made: RunPlan | PlanError | None = None

    def __call__(self) -> RunPlan | PlanError:
        with self._lock:
            if self._made is None:
                try:
                    self._made = make_plan(self._part, self._token, limit_ms=int(HUB_LIMIT_S * 1000))
                except PlanError as error:
                    self._made = error
            return self._made
