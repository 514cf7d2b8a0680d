"""`mvp-orchestrator workers` and `mvp-orchestrator reconcile`: what this user owns, and the end of what nobody needs.

Both read the ledgers and the providers' own listings; they need no configuration and no running orchestrator.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.config import vastai_key
from common.config_args import PROGRAM, parse
from common.config_environment import API_KEY
from common.config_errors import ConfigError, Information
from services.orchestrator.run_dir import remove_stale, stale
from services.provisioner.inventory import Cleared, Owned, Providers, Stock, clear, take_stock
from services.provisioner.ledger import LedgerError
from services.provisioner.registry import provider_names

WORKERS_HELP = f"""\
usage: {PROGRAM} workers [--json] [--provider NAME] [--runtime-config PATH]

Lists every worker that you own: from the ledgers of all orchestrators of this user on this machine, and from the
listings of Docker, Docker Swarm, vast.ai and this machine's processes. Changes nothing.

  --json                 one JSON list: id, provider, node_id, run, where, state, since_unix_ms, dph, owner
  --provider NAME        only this provider
  --runtime-config PATH  where [vastai] api_key is looked for when the variable VASTAI_API_KEY is not set

OWNER is "run" for a worker of an orchestrator that runs, "left" for one of an orchestrator that died, and "lost" for
one that bears your mark and is in no ledger. The last two are stopped by `{PROGRAM} reconcile`.
Exit status: 0, or 1 if something cannot be known (a listing or a ledger that cannot be read).

  $ {PROGRAM} workers
  NODE  PROVIDER  WHERE             STATE    SINCE               $/HOUR  OWNER
  1     vastai    instance 7835610  running  2026-11-30 09:12   0.310   run
"""
RECONCILE_HELP = f"""\
usage: {PROGRAM} reconcile [--dry-run] [--provider NAME] [--runtime-config PATH]

Stops the workers that an orchestrator which died has left: those in its ledger, and those that bear your mark in the
listings of Docker, Docker Swarm, vast.ai and this machine's processes and are in no ledger. Removes their keys, tunnels
and launch files, too. What a running orchestrator owns, and what is somebody else's, is left alone. Each start does the same for
its own provider.

  --dry-run              only say what would be stopped
  --provider NAME        only this provider's listing; entries of ledgers are settled whatever their provider
  --runtime-config PATH  where [vastai] api_key is looked for when the variable VASTAI_API_KEY is not set

Exit status: 0 when nothing that should be stopped is left (with --dry-run: always, unless something cannot be known),
1 when something could not be stopped or cannot be known.

  $ {PROGRAM} reconcile
  vastai: instance 7835610 (node 1): stopped
  vastai: 2 instances of others: left alone
  docker was not looked at: cannot reach the Docker engine: no engine answers at the local socket; start Docker or set DOCKER_HOST
  1 stopped, 0 left
"""  # noqa: E501 - as it is printed


class _Look:
    """Arguments of both commands, and the providers to look with. Raises ConfigError, Information, LedgerError."""

    def __init__(self, command: str, flag: str, text: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        if "--help" in argv or "-h" in argv:
            raise Information(text)
        self.flag = flag in argv
        rest = [word for word in argv if word != flag]
        key = vastai_key(rest, environ, Path.cwd())
        chosen = parse(rest).provider
        if chosen is not None and chosen not in provider_names():
            raise ConfigError(f"--provider {chosen} is not known: choose one of {', '.join(provider_names())}")
        self.names = None if chosen is None else [chosen]
        self.providers = Providers({**environ, API_KEY: key} if key else environ)


def workers(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """The exit status."""
    try:
        look = _Look("workers", "--json", WORKERS_HELP, argv, environ)
        stock = take_stock(look.providers, look.names)
        if look.names is not None:
            stock.owned = [item for item in stock.owned if item.provider in look.names]
    except Information as text:
        sys.stdout.write(str(text))
        return 0
    except (ConfigError, LedgerError) as error:
        sys.stderr.write(f"{PROGRAM} workers: {error}\n")
        return 1
    if look.flag:
        sys.stdout.write(json.dumps([_facts(item) for item in stock.owned], indent=2) + "\n")
    else:
        sys.stdout.write(_table(stock))
    for problem in stock.problems:
        sys.stderr.write(f"{PROGRAM} workers: {problem}\n")
    return 1 if stock.problems else 0


def reconcile(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """The exit status."""
    try:
        look = _Look("reconcile", "--dry-run", RECONCILE_HELP, argv, environ)
        if look.flag:
            lines, problems = _would(take_stock(look.providers, look.names), stale(environ))
        else:
            lines, problems = _did(clear(look.providers, look.names), remove_stale(environ))
    except Information as text:
        sys.stdout.write(str(text))
        return 0
    except (ConfigError, LedgerError) as error:
        sys.stderr.write(f"{PROGRAM} reconcile: {error}\n")
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    for problem in problems:
        sys.stderr.write(f"{PROGRAM} reconcile: {problem}\n")
    return 1 if problems else 0


# --- what is said -----------------------------------------------------------------------------------------------------
def _owner(item: Owned) -> str:
    if item.in_use:
        return "run"
    return "left" if item.entry is not None else "lost"


def _facts(item: Owned) -> dict[str, object]:
    intent = item.entry.intent if item.entry is not None else None
    return {
        "id": item.id,
        "provider": item.provider,
        "node_id": None if intent is None else intent.node_id,
        "run": None if intent is None else intent.run,
        "where": item.where,
        "state": item.state,
        "since_unix_ms": item.since_unix_ms or None,
        "dph": item.price,
        "owner": _owner(item),
    }


def _table(stock: Stock) -> str:
    if not stock.owned:
        return "no workers\n" if not stock.problems else ""
    rows = [("NODE", "PROVIDER", "WHERE", "STATE", "SINCE", "$/HOUR", "OWNER")]
    for item in stock.owned:
        node = "?" if item.entry is None else str(item.entry.intent.node_id)
        since = (
            time.strftime("%Y-%m-%d %H:%M", time.localtime(item.since_unix_ms / 1000)) if item.since_unix_ms else "?"
        )
        price = "-" if item.price is None else f"{item.price:.3f}"
        rows.append((node, item.provider, item.where or "?", item.state, since, price, _owner(item)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def _named(item: Owned) -> str:
    where = item.where or "a worker whose start was cut short"
    return f"{item.provider}: {where}" + ("" if item.entry is None else f" (node {item.entry.intent.node_id})")


def _left_alone(stock: Stock) -> list[str]:
    lines = [f"{_named(item)}: left alone, its orchestrator runs" for item in stock.owned if item.in_use]
    lines += [
        f"{name}: {count} {'worker' if count == 1 else 'workers'} of others: left alone"
        for name, count in stock.foreign.items()
        if count
    ]
    return lines + stock.notes


def _would(stock: Stock, folders: list[Path]) -> tuple[list[str], list[str]]:
    mine = [item for item in stock.owned if not item.in_use]
    lines = [
        f"{_named(item)}: "
        + ("would be stopped" if item.listed is not None or not item.asked else "is gone; its entry would be closed")
        for item in mine
    ]
    lines += _left_alone(stock)
    lines += [f"{path}: the run directory of a killed orchestrator would be removed" for path in folders]
    return [*lines, f"{len(mine)} would be stopped or closed"], stock.problems


def _did(cleared: Cleared, folders: list[Path]) -> tuple[list[str], list[str]]:
    known = {item.id: item for item in cleared.stock.owned}
    lines = []
    for settled in cleared.done.settled:
        item = known.get(settled.entry.id)
        named = _named(item) if item is not None else f"{settled.entry.provider}: node {settled.entry.node_id}"
        lines.append(f"{named}: {'stopped' if settled.stopped else 'was gone already'}")
    lines += [f"{_named(item)}: stopped, it was in no ledger" for item in cleared.orphans]
    lines += _left_alone(cleared.stock)
    lines += [f"{path}: the run directory of a killed orchestrator is removed" for path in folders]
    problems = [*cleared.stock.problems, *cleared.done.problems]
    stopped = cleared.done.stopped + len(cleared.orphans)
    return [*lines, f"{stopped} stopped, {len(cleared.done.problems)} left"], problems
