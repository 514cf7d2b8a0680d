"""Config: slices of the resolved configuration (S1 2, 7.1). No slice holds a secret, only the path of its file."""

from __future__ import annotations

from typing import ClassVar

from common.addresses import U64, Role
from common.codec import Message

_RESOLVER = frozenset({Role.RESOLVER})


class ConfigGet(Message, frozen=True, kw_only=True, tag=50):
    """Any service → config_resolver, repeated each 500 ms until answered by ConfigSlice or ConfigFailed.

    part: the role of the asking service.
    """

    part: str


class ConfigSlice(Message, frozen=True, kw_only=True, tag=51):
    """Config_resolver → the asking service: JSON of that service's slice dataclass (`common/config_slices.py`).

    digest: of the whole configuration; a service refuses a slice with another digest within one run.
    """

    FROM: ClassVar[frozenset[Role]] = _RESOLVER
    part: str
    digest: str
    slice_json: bytes


class ConfigFailed(Message, frozen=True, kw_only=True, tag=52):
    """Config_resolver → the asking service: the configuration is wrong, in one sentence (S1 10.2)."""

    FROM: ClassVar[frozenset[Role]] = _RESOLVER
    error: str


class ConfigResolved(Message, frozen=True, kw_only=True, tag=53):
    """Config_resolver → launcher, on the inherited pipe before any bus exists: what the launcher itself needs.

    run_dir: "" for the default place; relay: whether the relay service is started; relay_url: "", or of the relay
    elsewhere; relay_bind, relay_advertise: host:port, "" for the provider's default.
    dashboard_addr, metrics_addr, http_addr: host:port, "" = that process is not wanted; model_id: for its answers.
    """

    FROM: ClassVar[frozenset[Role]] = _RESOLVER
    digest: str
    run_dir: str = ""
    relay: bool = False
    run_id: U64 = 1
    node_id: U64 = 1
    provider: str = "process"
    relay_used: bool = False
    relay_url: str = ""
    relay_bind: str = ""
    relay_advertise: str = ""
    dashboard_addr: str = ""
    metrics_addr: str = ""
    http_addr: str = ""
    http_token_file: str = ""
    model_id: str = ""
