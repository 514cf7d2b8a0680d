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
    """The run's facts. detail_json: the config record's detail (S1 8.4), secrets shown only as presence."""

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
    rpc_bind: str = "127.0.0.1:19777"
    on_worker_loss: str = "stop"
    detail_json: str = "{}"


class ProvisionerSlice(msgspec.Struct, frozen=True, kw_only=True):
    """provider: "process" | "docker" | "swarm" | "vastai" | "external". worker_bin: resolved, existing path (process).

    hf_token_file: path of the 0600 file, "" when HF_TOKEN is not set; it reaches a worker only in its launch file.
    """

    provider: str
    worker_bin: str = ""
    docker_gpus: str = "all"
    hf_token_file: str = ""
    relay: bool = False
    node_id: int = 1
    run_id: int = 1


class GatewaySlice(msgspec.Struct, frozen=True, kw_only=True):
    """rpc_bind: host:port, checked. max_tokens: default cap, 0 = none (design.md 6 row 1)."""

    rpc_bind: str
    max_tokens: int = 0
    allow_remote: bool = False


class CollectorSlice(msgspec.Struct, frozen=True, kw_only=True):
    """frame_log: "" = no archive. secrets_files: files whose content must never be emitted (S1 8.14)."""

    frame_log: str = ""
    archive_max_bytes: int = 0
    run_id: int = 1


class MembershipSlice(msgspec.Struct, frozen=True, kw_only=True):
    """profile: "lan" | "wan" (anchors.md C7); wan for vastai."""

    profile: str = "lan"


def encode_slice(value: msgspec.Struct) -> bytes:
    """JSON, as ConfigSlice carries it."""
    return msgspec.json.encode(value)


def decode_slice(data: bytes, kind: type[S]) -> S:
    """The typed slice. Raises msgspec.DecodeError for anything else."""
    return msgspec.json.decode(data, type=kind)


def gguf_path(source: GgufSource) -> str:
    """The local path of a source, "" for a remote one."""
    return source.path if isinstance(source, LocalPath) else ""
