"""The resolved configuration as typed, frozen values (S1 7.1): what every later part works with instead of strings."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

import msgspec

from common.messages.node_agent import GgufSource, TokenizerSource


class RuntimeConfigProfile(StrEnum):
    """[runtime].profile: decides the default provider."""

    LOCAL = "local"
    DEPLOY = "deploy"


class ProviderKind(StrEnum):
    """Where workers run."""

    PROCESS = "process"
    DOCKER = "docker"
    SWARM = "swarm"
    VASTAI = "vastai"
    EXTERNAL = "external"


class Secret:
    """A value that shows itself only when asked by name; repr, str and format show `<secret>`."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The value, for the file or the request that needs it."""
        return self._value

    def sha256(self) -> str:
        """What stands for the secret in the digest."""
        return hashlib.sha256(self._value.encode("utf-8", "surrogatepass")).hexdigest()

    def __repr__(self) -> str:
        return "<secret>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


@dataclass(frozen=True, slots=True)
class SocketAddr:
    """An IP address and a port (0: any free one)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return ip_address(self.host).is_loopback


@dataclass(frozen=True, slots=True)
class RelayUrl:
    """curve://<server key>@host:port; port is the first of four (design.md 3)."""

    server_key: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"curve://{self.server_key}@{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RelayRuntimeConfig:
    """[relay]. used: workers dial a relay; local: it is one that this run starts (no url was given)."""

    mode: Literal["unset", "default", "disabled"] = "unset"
    url: RelayUrl | None = None
    bind_addr: SocketAddr | None = None
    advertise_addr: str | None = None
    used: bool = False

    @property
    def local(self) -> bool:
        """Whether the relay service is started here."""
        return self.used and self.url is None


@dataclass(frozen=True, slots=True)
class CachedModelConfig:
    """S1 7.2: one file as the host and as a container sees it."""

    host_path: Path
    container_path: str


@dataclass(frozen=True, slots=True)
class VastAiProvisioning:
    """What to rent and within which limits. Money in US dollars; None: no limit."""

    disk_gb: int
    ssh_user: str
    confirm_lease: bool
    onstart: Secret | None
    gpu_name: str | None
    min_gpu_ram_mb: int | None
    min_down_mbps: float
    min_up_mbps: float | None
    min_reliability: float
    require_verified: bool
    poll_interval_secs: int
    max_dph_total: float | None
    max_hours: float | None
    max_spend: float | None
    excluded_hosts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VastAiRuntimeConfig:
    """S1 7.3. The public key and its fingerprint are "" until the identity is prepared.

    bootstrap_command and onstart are handled as secrets: people put tokens into them.
    """

    api_key: Secret
    provisioning: VastAiProvisioning
    bootstrap_command: Secret
    ssh_identity: Path
    ssh_public_key: str = ""
    ssh_public_fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """S1 7.1, then the keys of design.md 6 row 6. default_max_tokens 0: no cap. hf_token: only if the run needs it.

    notes: sentences for the user about choices that were made for him; config_file: None when there is none.
    """

    config_profile: RuntimeConfigProfile
    provider: ProviderKind
    image: str
    docker_gpus: str
    rpc_bind: SocketAddr
    run_id: int
    node_id: int
    stage_index: int
    layer_end_exclusive: int | None
    pipeline_stages: int
    model_id: str
    gguf_source: GgufSource
    tokenizer: TokenizerSource
    default_max_tokens: int
    dashboard: bool
    max_context: int | None
    relay: RelayRuntimeConfig
    vastai: VastAiRuntimeConfig | None
    cached_model: CachedModelConfig | None
    worker_bin: Path | None
    datastream_frame_log: Path | None

    run_dir: Path | None
    on_worker_loss: Literal["fail", "restart"]
    allow_remote: bool
    http_addr: SocketAddr | None
    http_token_file: Path | None
    pipeline_feedback: Literal["gateway", "direct"]
    pipeline_edges: Literal["auto", "relay"]
    pipeline_placement: Literal["even", "measured"]
    activation_dtype: Literal["float32", "float16"]
    docker_pull: Literal["missing", "always", "never"]
    swarm_constraints: tuple[str, ...]
    dashboard_addr: SocketAddr | None
    metrics_addr: SocketAddr | None
    archive_max_bytes: int
    hf_token: Secret | None
    notes: tuple[str, ...]
    config_file: Path | None

    @property
    def planned(self) -> bool:
        """Whether execution is planned (S1 4.4): a cached model, or more than one stage."""
        return self.cached_model is not None or self.pipeline_stages > 1

    @property
    def digest(self) -> str:
        """Hex sha256 of what was resolved: equal for equal configurations, whatever layer said it."""
        return hashlib.sha256(digest_source(self)).hexdigest()


_NOT_DIGESTED = frozenset({"notes", "config_file"})


def digest_source(config: Config) -> bytes:
    """Canonical JSON (sorted keys, no spaces) of the configuration, each secret as its own sha256."""
    content = {field.name: _plain(getattr(config, field.name)) for field in fields(config)}
    content = {name: value for name, value in content.items() if name not in _NOT_DIGESTED}
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Secret):
        return {"sha256": value.sha256()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
