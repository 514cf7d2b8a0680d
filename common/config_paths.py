"""Paths and addresses of the configuration: raw strings in, checked values or one sentence out (S1 2.4)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from common.config_errors import ConfigError, show
from common.config_model import RelayUrl, SocketAddr
from common.config_schema import Settings, expectation

RELAY_PORTS = 4
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where values came from, for error texts, and where relative paths start.

    file: the configuration file as the user knows it; given: which keys an argument or variable set.
    """

    settings: Settings
    file: Path
    given: Mapping[tuple[str, str], str]
    cwd: Path
    home: str

    def where(self, table: str, key: str) -> str:
        """The layer that decides this key."""
        if source := self.given.get((table, key)):
            return source
        if key in getattr(self.settings, table).model_fields_set:
            return f"{self.file}: [{table}].{key}"
        return f"default of [{table}].{key}"

    def invalid(self, table: str, key: str, value: str) -> ConfigError:
        """The standard sentence for a value of the wrong form."""
        return ConfigError(
            f"{self.where(table, key)} = {show(value)} is not valid: it must be {expectation(table, key)}"
        )

    def absolute(self, table: str, key: str, raw: str) -> Path:
        """`~/` is the home directory, relative is relative to the working directory; nothing has to exist."""
        return absolute(raw, self.cwd, self.home, f"{self.where(table, key)} = {show(raw)}")

    def file_path(self, table: str, key: str, raw: str, way_out: str) -> Path:
        """The canonical path of an existing, readable, regular file."""
        what = f"{self.where(table, key)} = {show(raw)}"
        return existing_file(absolute(raw, self.cwd, self.home, what), what, way_out)

    def socket_addr(self, table: str, key: str, raw: str) -> SocketAddr:
        """IP:port. Names are refused: what a name resolves to can change between check and bind."""
        host, port = _host_port(raw)
        try:
            address = str(ip_address(host))
        except ValueError:
            raise self.invalid(table, key, raw) from None
        if port is None:
            raise self.invalid(table, key, raw)
        return SocketAddr(address, port)

    def advertised(self, table: str, key: str, raw: str) -> str:
        """host:port, a name or an IP, with a port that leaves room for four."""
        host, port = _host_port(raw)
        if not _is_host(host) or port is None or not 1 <= port <= 65536 - RELAY_PORTS:
            raise self.invalid(table, key, raw)
        return raw

    def relay_url(self, table: str, key: str, raw: str) -> RelayUrl:
        """curve://<64 hex>@host:port."""
        matched = re.fullmatch(r"curve://([0-9a-fA-F]{64})@(.+)", raw)
        host, port = _host_port(matched.group(2)) if matched else ("", None)
        if not matched or not _is_host(host) or port is None or not 1 <= port <= 65536 - RELAY_PORTS:
            raise self.invalid(table, key, raw)
        return RelayUrl(matched.group(1).lower(), host, port)


def absolute(raw: str, cwd: Path, home: str, what: str) -> Path:
    """As Origin.absolute. what: names layer and value."""
    if raw == "~" or raw.startswith("~/"):
        if not home:
            raise ConfigError(f"{what} needs the variable HOME, which is not set: set it or write the whole path")
        raw = os.path.join(home, raw[2:])
    return Path(os.path.normpath(cwd / raw))


def existing_file(path: Path, what: str, way_out: str) -> Path:
    """The canonical path of an existing, readable, regular file; else ConfigError with the way out."""
    if problem := file_problem(path):
        raise ConfigError(f"{what} names {path}, which {problem}: {way_out}")
    return path.resolve()


def file_problem(path: Path) -> str:
    """Completes "which ..."; "" for an existing, readable, regular file."""
    try:
        if path.is_dir():
            return "is a directory"
        if path.is_file():
            return "" if os.access(path, os.R_OK) else "cannot be read"
        return "is not a regular file" if path.exists() else "does not exist"
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "the path is malformed"
        return f"cannot be looked at ({reason.lower()})"


def _host_port(raw: str) -> tuple[str, int | None]:
    host, colon, port = raw.rpartition(":")
    if host.startswith("[") and host.endswith("]") and ":" in host:
        host = host[1:-1]
    elif ":" in host:
        return "", None
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        return host, None
    return host, int(port)


def _is_host(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return bool(_HOST_NAME.fullmatch(host))
