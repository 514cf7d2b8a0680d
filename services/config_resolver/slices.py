"""The resolved configuration, cut for each service: no slice holds a secret, only its file's path (design.md 2)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.addresses import Role
from common.config_model import Config, Secret, SocketAddr, VastAiRuntimeConfig
from common.config_slices import (
    CachedModelSlice,
    CollectorSlice,
    GatewaySlice,
    MembershipSlice,
    OrchestratorSlice,
    ProvisionerSlice,
    RelaySlice,
    VastAiSlice,
    encode_slice,
)
from common.limits import network_profile
from common.messages.node_agent import HuggingFaceGguf

HF_TOKEN_FILE = "hf_token"
API_KEY_FILE = "vastai_api_key"
BOOTSTRAP_FILE = "vastai_bootstrap_command"
ONSTART_FILE = "vastai_onstart"
_REDACTED_FILES = frozenset({HF_TOKEN_FILE, API_KEY_FILE})
"""Of these the content is blotted out wherever it shows up; a bootstrap command may be an everyday word."""


def secrets_of(config: Config) -> Mapping[str, Secret]:
    """File name → what has to be written into it, for the secrets that this run needs."""
    found = {HF_TOKEN_FILE: config.hf_token}
    if config.vastai is not None:
        found[API_KEY_FILE] = config.vastai.api_key
        found[BOOTSTRAP_FILE] = config.vastai.bootstrap_command
        found[ONSTART_FILE] = config.vastai.provisioning.onstart
    return {name: secret for name, secret in found.items() if secret is not None}


def secrets_files(config: Config, secrets_dir: Path) -> list[str]:
    """Paths of the files whose content no record may contain."""
    mine = [str(secrets_dir / name) for name in secrets_of(config) if name in _REDACTED_FILES]
    return [*mine, str(config.http_token_file)] if config.http_token_file else mine


def slice_for(config: Config, role: Role, secrets_dir: Path) -> msgspec.Struct | None:
    """What this service gets, or None for a role that has no configuration."""
    match role:
        case Role.ORCHESTRATOR:
            return _orchestrator(config, secrets_dir)
        case Role.PROVISIONER:
            return _provisioner(config, secrets_dir)
        case Role.GATEWAY:
            return GatewaySlice(
                rpc_bind=str(config.rpc_bind),
                max_tokens=config.default_max_tokens,
                allow_remote=config.allow_remote,
                http_addr=_text(config.http_addr),
                http_token_file=_text(config.http_token_file),
                model_id=config.model_id,
                secrets_files=secrets_files(config, secrets_dir),
            )
        case Role.COLLECTOR:
            return CollectorSlice(
                frame_log=_text(config.datastream_frame_log),
                archive_max_bytes=config.archive_max_bytes,
                run_id=config.run_id,
                dashboard_addr=_text(config.dashboard_addr),
                metrics_addr=_text(config.metrics_addr),
                http_token_file=_text(config.http_token_file),
                secrets_files=secrets_files(config, secrets_dir),
            )
        case Role.MEMBERSHIP:
            return MembershipSlice(profile=network_profile(config.provider))
        case Role.ROUTER | Role.RELAY:
            return RelaySlice(
                used=config.relay.used,
                local=config.relay.local,
                url=_text(config.relay.url),
                bind_addr=_text(config.relay.bind_addr),
                advertise_addr=config.relay.advertise_addr or "",
                provider=config.provider,
            )
        case _:
            return None


def all_slices(config: Config, secrets_dir: Path) -> dict[str, bytes]:
    """Role → the slice as ConfigSlice carries it."""
    made = {role: slice_for(config, role, secrets_dir) for role in Role}
    return {role: encode_slice(value) for role, value in made.items() if value is not None}


def _orchestrator(config: Config, secrets_dir: Path) -> OrchestratorSlice:
    cached = config.cached_model
    return OrchestratorSlice(
        provider=config.provider,
        image=config.image,
        run_id=config.run_id,
        node_id=config.node_id,
        stage_index=config.stage_index,
        layer_end_exclusive=config.layer_end_exclusive,
        pipeline_stages=config.pipeline_stages,
        model_id=config.model_id,
        gguf_source=config.gguf_source,
        tokenizer=config.tokenizer,
        max_context=config.max_context,
        cached_model=None
        if cached is None
        else CachedModelSlice(host_path=str(cached.host_path), container_path=cached.container_path),
        relay_mode=config.relay.mode,
        relay=config.relay.used,
        rpc_bind=str(config.rpc_bind),
        on_worker_loss=config.on_worker_loss,
        pipeline_feedback=config.pipeline_feedback,
        pipeline_edges=config.pipeline_edges,
        pipeline_placement=config.pipeline_placement,
        activation_dtype=config.activation_dtype,
        docker_gpus=config.docker_gpus,
        hf_token_file=str(secrets_dir / HF_TOKEN_FILE) if config.planned and config.hf_token is not None else "",
        notes=list(config.notes),
        detail_json=json.dumps(detail(config), separators=(",", ":")),
    )


def _provisioner(config: Config, secrets_dir: Path) -> ProvisionerSlice:
    return ProvisionerSlice(
        provider=config.provider,
        image=config.image,
        worker_bin=_text(config.worker_bin),
        docker_gpus=config.docker_gpus,
        docker_pull=config.docker_pull,
        swarm_constraints=list(config.swarm_constraints),
        hf_token_file=str(secrets_dir / HF_TOKEN_FILE) if config.hf_token is not None else "",
        relay=config.relay.used,
        node_id=config.node_id,
        run_id=config.run_id,
        vastai=None if config.vastai is None else _vastai(config.vastai, secrets_dir),
        secrets_files=secrets_files(config, secrets_dir),
    )


def _vastai(config: VastAiRuntimeConfig, secrets_dir: Path) -> VastAiSlice:
    return VastAiSlice(
        api_key_file=str(secrets_dir / API_KEY_FILE),
        bootstrap_command_file=str(secrets_dir / BOOTSTRAP_FILE),
        onstart_file=str(secrets_dir / ONSTART_FILE) if config.provisioning.onstart is not None else "",
        ssh_identity=str(config.ssh_identity),
        ssh_public_key=config.ssh_public_key,
        ssh_public_fingerprint=config.ssh_public_fingerprint,
        **_limits(config),
    )


def _limits(config: VastAiRuntimeConfig) -> dict[str, Any]:
    """The provisioning limits by name; none of them is a secret."""
    wanted = config.provisioning
    return {
        "disk_gb": wanted.disk_gb,
        "ssh_user": wanted.ssh_user,
        "confirm_lease": wanted.confirm_lease,
        "gpu_name": wanted.gpu_name,
        "min_gpu_ram_mb": wanted.min_gpu_ram_mb,
        "min_down_mbps": wanted.min_down_mbps,
        "min_up_mbps": wanted.min_up_mbps,
        "min_reliability": wanted.min_reliability,
        "require_verified": wanted.require_verified,
        "poll_interval_secs": wanted.poll_interval_secs,
        "max_dph_total": wanted.max_dph_total,
        "max_hours": wanted.max_hours,
        "max_spend": wanted.max_spend,
        "excluded_hosts": list(wanted.excluded_hosts),
    }


def detail(config: Config) -> dict[str, Any]:
    """The detail of the bootstrap record `config: ready` (S1 8.4; rust-swactor.md 2.7)."""
    return {
        "config_profile": config.config_profile,
        "config_file": None if config.config_file is None else str(config.config_file),
        "digest": config.digest,
        "image": config.image,
        "provider": config.provider,
        "rpc_bind": str(config.rpc_bind),
        "model_id": config.model_id,
        "model_source": "huggingface" if isinstance(config.gguf_source, HuggingFaceGguf) else "local",
        "cached_model": None if config.cached_model is None else str(config.cached_model.host_path),
        "stage_index": config.stage_index,
        "legacy_layer_end_exclusive": config.layer_end_exclusive,
        "max_context": config.max_context,
        "relay_mode": config.relay.mode,
        "pipeline_stages": config.pipeline_stages,
        "planned": config.planned,
        "dashboard": config.dashboard,
        "has_hf_token": config.hf_token is not None,
        "notes": list(config.notes),
        "provider_config": _provider_config(config),
    }


def _provider_config(config: Config) -> dict[str, Any]:
    match config.provider:
        case "process":
            return {"worker_bin": _text(config.worker_bin)}
        case "docker":
            return {"gpus": config.docker_gpus, "pull": config.docker_pull}
        case "swarm":
            return {"constraints": list(config.swarm_constraints)}
    if config.vastai is None:
        return {}
    return {
        "has_api_key": True,
        "has_bootstrap_command": True,
        "has_onstart": config.vastai.provisioning.onstart is not None,
        "has_ssh_identity": True,
        "ssh_public_fingerprint": config.vastai.ssh_public_fingerprint,
        **_limits(config.vastai),
    }


def _text(value: SocketAddr | Path | object | None) -> str:
    return "" if value is None else str(value)
