"""The five process arguments of mvp-orchestrator, --help and --version (S1 2.3).

Cheap to import: the launcher asks `information(argv)` before it starts anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from common.config_errors import ConfigError, Information, listed, nearest, show

PROGRAM = "mvp-orchestrator"
DISTRIBUTION = "swactor-mq"

ARGUMENTS = {
    "--runtime-config": "PATH",
    "--provider": "NAME",
    "--worker-bin": "PATH",
    "--pipeline-stages": "COUNT",
    "--vastai-ssh-identity": "PATH",
}
HELP = f"""\
usage: {PROGRAM} [ARGUMENTS]
       {PROGRAM} plan [ARGUMENTS]         layers, bytes and speed of such a run, without starting it; of a model on
                                          Hugging Face it fetches the header into the cache
       {PROGRAM} doctor [ARGUMENTS]       what this machine lacks for it, and what to do
       {PROGRAM} workers [--json]         what you own now, where, since when, at what price
       {PROGRAM} reconcile [--dry-run]    stop what an orchestrator that died has left
       {PROGRAM} cache [--remove]         models, weights and kernels that are kept for the next start

Starts the workers, serves prompts to them, and stops them again. Everything not listed here is set in the
configuration file; config/ holds a commented example for each provider.

  --runtime-config PATH        the configuration file; without it .config/config.toml is read if it exists
  --provider NAME              where workers run: process, docker, swarm, vastai or external
  --worker-bin PATH            the worker program of the process provider
  --pipeline-stages COUNT      over how many workers the model is cut
  --vastai-ssh-identity PATH   the private ssh key for rented machines
  --help                       this text
  --version                    the version

Secrets come from the environment: VASTAI_API_KEY, HF_TOKEN.
To stop: Ctrl-C, SIGTERM, SIGHUP, the line "stop" on stdin, or {{"type":"shutdown"}} on the prompt RPC.

example: {PROGRAM} --runtime-config config/process.toml
"""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was given; None where it was not. Raw strings: only config.py interprets them."""

    runtime_config: str | None = None
    provider: str | None = None
    worker_bin: str | None = None
    pipeline_stages: str | None = None
    vastai_ssh_identity: str | None = None


def parse(argv: Sequence[str], toml_keys: Sequence[tuple[str, str]] = ()) -> Arguments:
    """The arguments after the program name; of a repeated one the last counts, `--name=value` is accepted.

    toml_keys: (table, key) of the configuration file, to name the key that an unknown argument seems to mean.
    Raises ConfigError for an unknown argument or a missing value, Information for --help and --version.
    """
    given: dict[str, str] = {}
    pending = list(argv)
    while pending:
        word = pending.pop(0)
        name, equals, value = word.partition("=")
        if word in ("--help", "-h"):
            raise Information(HELP)
        if word == "--version":
            raise Information(f"{PROGRAM} {_version()}\n")
        if name not in ARGUMENTS:
            raise ConfigError(f"argument {show(name)} is unknown: {_way_out(name, toml_keys)}")
        if not equals:
            # A following argument is no value: `--provider --worker-bin x` has forgotten one.
            value = pending.pop(0) if pending and not pending[0].startswith("--") else ""
        if not value:
            raise ConfigError(f"argument {name} has no value: write {name} {ARGUMENTS[name]}")
        given[name.removeprefix("--").replace("-", "_")] = value
    return Arguments(**given)


def information(argv: Sequence[str]) -> str | None:
    """What --help or --version prints, or None when argv asks for neither or is wrong before it."""
    try:
        parse(argv)
    except Information as text:
        return str(text)
    except ConfigError:
        return None
    return None


def _way_out(name: str, toml_keys: Sequence[tuple[str, str]]) -> str:
    if near := nearest(name, ARGUMENTS):
        return f"did you mean {near}?"
    named = {f"--{table}-{key}".replace("_", "-"): (table, key) for table, key in toml_keys}
    named |= {f"--{key}".replace("_", "-"): (table, key) for table, key in toml_keys}
    if near := nearest(name, named):
        table, key = named[near]
        return f"set [{table}].{key} in the configuration file instead"
    return f"{PROGRAM} takes only {listed(ARGUMENTS)}"


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "(not installed)"
