"""What each service gets of the resolved configuration (S1 7.1). No slice holds a secret, only the path of its file."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from common.messages.node_agent import GgufSource, LocalPath, TokenizerSource

S = TypeVar("S", bound=msgspec.Struct)


class CachedModelSlice(msgspec.Struct, frozen=True, kw_only=True):
    """S1 7.2: the file as the host sees it and as a container sees it."""

    host_path: str
    container_path: str


class OrchestratorSlice(msgspec.Struct, frozen=True, kw_only=True):
    """The run's facts. detail_json: the config record's detail (S1 8.4), secrets shown only as presence.

    relay_mode: "unset" | "default" | "disabled"; relay: workers dial a relay. on_worker_loss: "fail" | "restart".
    pipeline_feedback: "gateway" | "direct"; pipeline_edges: "auto" | "relay"; activation_dtype: "float32" | "float16";
    pipeline_placement: "even" | "measured".
    hf_token_file: path of the 0600 file, "" when HF_TOKEN is not set or no plan needs it (S1 2.2).
    notes: sentences for the user about choices that were made for him.
    """

    provider: str
    image: str
    run_id: int = 1
    node_id: int = 1
    stage_index: int = 0
    layer_end_exclusive: int | None = None
    pipeline_stages: int = 1
    model_id: str
    gguf_source: GgufSource
    tokenizer: TokenizerSource
    max_context: int | None = None
    cached_model: CachedModelSlice | None = None
    relay_mode: str = "unset"
    relay: bool = False
    rpc_bind: str = "127.0.0.1:19777"
    on_worker_loss: str = "fail"
    pipeline_feedback: str = "gateway"
    pipeline_edges: str = "auto"
    pipeline_placement: str = "even"
    activation_dtype: str = "float32"
    docker_gpus: str = "all"
    hf_token_file: str = ""
    notes: list[str] = []
    detail_json: str = "{}"


class VastAiSlice(msgspec.Struct, frozen=True, kw_only=True):
    """S1 7.3. *_file: 0600 files whose content travels in no envelope; onstart_file "" when there is none.

    Money in US dollars; None: no limit. ssh_identity: path of the private key.
    """

    api_key_file: str
    bootstrap_command_file: str
    onstart_file: str = ""
    ssh_identity: str
    ssh_public_key: str = ""
    ssh_public_fingerprint: str = ""
    disk_gb: int
    ssh_user: str
    confirm_lease: bool
    gpu_name: str | None = None
    min_gpu_ram_mb: int | None = None
    min_down_mbps: float
    min_up_mbps: float | None = None
    min_reliability: float
    require_verified: bool
    poll_interval_secs: int
    max_dph_total: float | None = None
    max_hours: float | None = None
    max_spend: float | None = None
    excluded_hosts: list[int] = []


class ProvisionerSlice(msgspec.Struct, frozen=True, kw_only=True):
    """provider: "process" | "docker" | "swarm" | "vastai" | "external". worker_bin: resolved, existing path (process).

    hf_token_file: path of the 0600 file, "" when HF_TOKEN is not set or not needed; it reaches a worker only in its
    launch file. relay: workers dial a relay. docker_pull: "missing" | "always" | "never".
    secrets_files: files whose content must never be emitted (S1 8.14).
    """

    provider: str
    image: str = ""
    worker_bin: str = ""
    docker_gpus: str = "all"
    docker_pull: str = "missing"
    swarm_constraints: list[str] = []
    hf_token_file: str = ""
    relay: bool = False
    node_id: int = 1
    run_id: int = 1
    vastai: VastAiSlice | None = None
    secrets_files: list[str] = []


class GatewaySlice(msgspec.Struct, frozen=True, kw_only=True):
    """rpc_bind: host:port, checked. max_tokens: default cap, 0 = none (design.md 6 row 1).

    http_addr: "" = no HTTP front. http_token_file: "" = none; it exists whenever http_addr is not loopback.
    """

    rpc_bind: str
    max_tokens: int = 0
    allow_remote: bool = False
    http_addr: str = ""
    http_token_file: str = ""
    model_id: str = ""
    secrets_files: list[str] = []


class CollectorSlice(msgspec.Struct, frozen=True, kw_only=True):
    """frame_log: "" = no archive. archive_max_bytes: 0 = no limit. dashboard_addr, metrics_addr: "" = off.

    secrets_files: files whose content must never be emitted (S1 8.14).
    """

    frame_log: str = ""
    archive_max_bytes: int = 0
    run_id: int = 1
    dashboard_addr: str = ""
    metrics_addr: str = ""
    http_token_file: str = ""
    secrets_files: list[str] = []


class MembershipSlice(msgspec.Struct, frozen=True, kw_only=True):
    """profile: `common.limits.network_profile` of the provider."""

    profile: str = "lan"


class RelaySlice(msgspec.Struct, frozen=True, kw_only=True):
    """For router and relay. local: this run starts the relay; url: "" or curve://<hex key>@host:port of another one.

    bind_addr, advertise_addr: host:port, the first of four ports; "" = the provider's default (design.md 3).
    """

    used: bool = False
    local: bool = False
    url: str = ""
    bind_addr: str = ""
    advertise_addr: str = ""
    provider: str = "process"


def encode_slice(value: msgspec.Struct) -> bytes:
    """JSON, as ConfigSlice carries it."""
    return msgspec.json.encode(value)


def decode_slice(data: bytes, kind: type[S]) -> S:
    """The typed slice. Raises msgspec.DecodeError for anything else."""
    return msgspec.json.decode(data, type=kind)


def gguf_path(source: GgufSource) -> str:
    """The local path of a source, "" for a remote one."""
    return source.path if isinstance(source, LocalPath) else ""
