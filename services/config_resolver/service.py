"""Wiring of the config resolver: resolve first and alone, report, then join the bus and serve (design.md 2).

Embedded: `python -P -m services.config_resolver --report-fd N --owner-fd M -- ARGUMENTS`. What came out goes to fd N as
one length-prefixed (u32, little-endian) ConfigResolved or ConfigFailed; then fd M says in one line where the bus file
is, and its EOF is the launcher's death.
Hosted: `python -m services.config_resolver --bus FILE ARGUMENTS`. A wrong configuration is served as ConfigFailed.
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.codec import encode_body
from common.config import Config, ConfigError, Information, resolve
from common.messages.config import ConfigFailed, ConfigResolved
from common.redact import Redactor
from services.config_resolver.core import ConfigResolverActor
from services.config_resolver.identity import prepare_identity
from services.config_resolver.secret_files import write_secrets
from services.config_resolver.slices import all_slices, secrets_of

BUS_FILE_PATH_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Outcome:
    """Either a configuration or the one sentence that says why there is none."""

    config: Config | None = None
    error: str = ""
    secrets: tuple[str, ...] = field(default=(), repr=False)


def resolve_process(argv: Sequence[str]) -> Outcome:
    """Resolve for this process's environment and working directory, identity included. Raises Information."""
    try:
        config = prepare_identity(resolve(argv, os.environ, Path.cwd(), executable=Path(sys.executable)))
    except ConfigError as error:
        return Outcome(error=str(error))
    return Outcome(config, secrets=tuple(secret.reveal() for secret in secrets_of(config).values()))


def same_as_before(outcome: Outcome, digest: str) -> Outcome:
    """Services of one run must not work with two configurations (design.md 2). digest: "" = there was none before."""
    if outcome.config is None or not digest or outcome.config.digest == digest:
        return outcome
    return Outcome(error="the configuration was changed while the run was starting; start it again")


def report(outcome: Outcome) -> bytes:
    """What the launcher reads from the report pipe."""
    config = outcome.config
    message: ConfigResolved | ConfigFailed
    if config is None:
        message = ConfigFailed(error=outcome.error)
    else:
        message = ConfigResolved(
            digest=config.digest,
            run_dir=str(config.run_dir or ""),
            relay=config.relay.local,
            run_id=config.run_id,
            node_id=config.node_id,
            provider=config.provider,
            relay_used=config.relay.used,
            relay_url=str(config.relay.url or ""),
            relay_bind=str(config.relay.bind_addr or ""),
            relay_advertise=config.relay.advertise_addr or "",
            dashboard_addr=str(config.dashboard_addr or ""),
            metrics_addr=str(config.metrics_addr or ""),
            http_addr=str(config.http_addr or ""),
            http_token_file=str(config.http_token_file or ""),
            model_id=config.model_id,
        )
    body = encode_body(message)
    return struct.pack("<I", len(body)) + body


def actor_for(outcome: Outcome, secrets_dir: Path, *, mid_run: bool = False) -> ConfigResolverActor:
    """The actor that serves the outcome; the secrets are on the disk when this returns."""
    if outcome.config is None:
        return ConfigResolverActor(error=outcome.error, mid_run=mid_run)
    try:
        write_secrets(secrets_of(outcome.config), secrets_dir)
    except ConfigError as error:
        return ConfigResolverActor(error=str(error))
    config = outcome.config
    return ConfigResolverActor(digest=config.digest, slices=all_slices(config, secrets_dir), notes=config.notes)


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 1 for a wrong configuration (embedded) or a bus that cannot be joined."""
    own, arguments = _split(argv)
    try:
        if own.report_fd is not None:
            return _embedded(own.report_fd, own.owner_fd, arguments)
        outcome = same_as_before(resolve_process(arguments), own.expect_digest)
        return _serve(outcome, own.bus.absolute(), own.owner_fd, mid_run=bool(own.expect_digest))
    except Information as text:
        sys.stdout.write(str(text))
        return 0
    except KeyboardInterrupt:
        return 0


def _split(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This service's own options, and the five arguments."""
    parser = argparse.ArgumentParser(prog="python -m services.config_resolver", add_help=False, allow_abbrev=False)
    parser.add_argument("--bus", type=Path, metavar="FILE", help="the service's bus file")
    parser.add_argument("--report-fd", type=int, metavar="N", help="where to write what was resolved")
    parser.add_argument("--owner-fd", type=int, metavar="M", help="read end of the launcher's pipe")
    parser.add_argument("--expect-digest", default="", metavar="HEX", help="what an earlier life of this run resolved")
    mine, rest = list(argv), []
    if "--" in mine:
        cut = mine.index("--")
        mine, rest = mine[:cut], mine[cut + 1 :]
        own = parser.parse_args(mine)
    else:
        own, rest = parser.parse_known_args(mine)
    if own.report_fd is not None and own.owner_fd is None:
        parser.error("--report-fd needs --owner-fd")
    if own.report_fd is None and own.bus is None and not {"--help", "-h", "--version"} & set(rest):
        parser.error("give --bus FILE, or --report-fd N and --owner-fd M")
    return own, rest


def _embedded(report_fd: int, owner_fd: int, arguments: Sequence[str]) -> int:
    outcome = resolve_process(arguments)
    try:
        with open(report_fd, "wb") as pipe:
            pipe.write(report(outcome))
    except BrokenPipeError:
        return 0
    if outcome.config is None:
        return 1
    bus = read_line(owner_fd)
    return _serve(outcome, Path(bus), owner_fd) if bus else 0


def read_line(fd: int) -> str:
    """The bus file's path from the owner's pipe, or "" at EOF. Bytewise: what follows belongs to the host's watch."""
    line = bytearray()
    while len(line) < BUS_FILE_PATH_BYTES_MAX:
        byte = os.read(fd, 1)
        if not byte:
            return ""
        if byte == b"\n":
            break
        line += byte
    return os.fsdecode(bytes(line))


def _serve(outcome: Outcome, bus: Path, owner_fd: int | None, *, mid_run: bool = False) -> int:
    # Imported only now: the launcher waits for the report, and a wrong configuration needs no bus.
    from common.addresses import Role
    from common.host import Host
    from common.security import SecurityError

    try:
        host = Host.from_bus_file(bus, owner_fd=owner_fd)
        if host.identity.role is not Role.RESOLVER:
            raise SecurityError(f"{bus} is the bus file of {host.identity.role}, not of {Role.RESOLVER}")
    except SecurityError as error:
        sys.stderr.write(f"{Role.RESOLVER}: {error}\n")
        return 1
    host.redactor = Redactor(outcome.secrets)
    host.spawn(actor_for(outcome, host.bus_file.secrets_dir, mid_run=mid_run), name=Role.RESOLVER)
    return host.run()
