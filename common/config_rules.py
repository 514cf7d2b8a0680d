"""What depends on more than one key: the model's source, the relay, and what each provider needs (S1 7.2, 9.2).

Every function takes the merged settings with their origin and returns typed values or raises ConfigError.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common.config_environment import API_KEY, HF_TOKEN, checked_token, secret
from common.config_errors import ConfigError, show
from common.config_model import (
    CachedModelConfig,
    ProviderKind,
    RelayRuntimeConfig,
    RuntimeConfigProfile,
    Secret,
    SocketAddr,
    VastAiProvisioning,
    VastAiRuntimeConfig,
)
from common.config_paths import Origin, absolute, file_problem
from common.config_schema import Settings
from common.messages.node_agent import EmbeddedGguf, GgufSource, HuggingFaceGguf, LocalPath, TokenizerSource

WORKER_PROGRAM = "mvp-worker-node"
CACHED_MODEL_DIR = PurePosixPath("/models/cached")
MODEL_CACHE = ".model-cache"
DEFAULT_PIPELINE_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKOUT = Path(__file__).resolve().parent.parent

_OWN_FILES = frozenset({ProviderKind.DOCKER, ProviderKind.SWARM, ProviderKind.EXTERNAL})
"""Workers that see other files than this machine: a local model reaches them only as the cached one."""
_FETCH = f"./dev fetch-model puts one into {MODEL_CACHE}/"


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """[model], resolved."""

    model_id: str
    gguf_source: GgufSource
    tokenizer: TokenizerSource
    cached_model: CachedModelConfig | None
    notes: tuple[str, ...] = ()


def provider_of(settings: Settings) -> ProviderKind:
    """[provider].kind, or the profile's default (S1 7.1)."""
    if settings.provider.kind is not None:
        return ProviderKind(settings.provider.kind)
    local = RuntimeConfigProfile(settings.runtime.profile) is RuntimeConfigProfile.LOCAL
    return ProviderKind.PROCESS if local else ProviderKind.VASTAI


# --- the model ----------------------------------------------------------------------------------------------------
def choose_model(origin: Origin, provider: ProviderKind) -> ModelChoice:
    """S1 7.2 and design.md 6 rows 30, 31."""
    model, stages = origin.settings.model, origin.settings.runtime.pipeline_stages
    _one_source(origin)
    notes: tuple[str, ...] = ()
    cached: CachedModelConfig | None = None
    if model.cached_path is not None:
        cached = _cached_model(origin, provider, model.cached_path)
    elif stages > 1 and _no_source(origin) and (default := _default_pipeline_model(origin.cwd)):
        cached = _as_cached(default)
        notes = (f"no model is chosen; a pipeline uses {default}",)
    source = _source(origin, provider, cached)
    return ModelChoice(
        model_id=model.id or _stem(source),
        gguf_source=source,
        tokenizer=_tokenizer(origin, provider),
        cached_model=cached,
        notes=notes,
    )


def _one_source(origin: Origin) -> None:
    model = origin.settings.model
    remote = [key for key in ("gguf_repo", "gguf_file", "gguf_revision") if getattr(model, key) is not None]
    local = [key for key in ("cached_path", "gguf_local_path") if getattr(model, key) is not None]
    if remote and local:
        raise ConfigError(
            f"{origin.where('model', local[0])} and [model].{remote[0]} name two models: remove one of them"
        )
    for key, partner in (("gguf_repo", "gguf_file"), ("gguf_file", "gguf_repo"), ("gguf_revision", "gguf_repo")):
        if key in remote and partner not in remote:
            raise ConfigError(f"{origin.where('model', key)} is not enough: set [model].{partner} too")


def _no_source(origin: Origin) -> bool:
    model = origin.settings.model
    return model.cached_path is None and model.gguf_local_path is None and model.gguf_repo is None


def _source(origin: Origin, provider: ProviderKind, cached: CachedModelConfig | None) -> GgufSource:
    model = origin.settings.model
    if cached is not None:
        seen = str(cached.host_path) if provider is ProviderKind.PROCESS else cached.container_path
        if model.gguf_local_path is not None:
            _same_file(origin, model.gguf_local_path, cached)
        return LocalPath(path=seen)
    if model.gguf_local_path is not None:
        where = f"{origin.where('model', 'gguf_local_path')} = {show(model.gguf_local_path)}"
        if provider in _OWN_FILES:
            raise ConfigError(
                f"{where} cannot be seen by workers of provider {provider}: "
                "name the file in [model].cached_path, which is handed over to them"
            )
        if provider is ProviderKind.VASTAI:
            return LocalPath(path=_inside_image(where, model.gguf_local_path))
        return LocalPath(path=str(origin.file_path("model", "gguf_local_path", model.gguf_local_path, _FETCH)))
    if model.gguf_repo is not None and model.gguf_file is not None:
        return HuggingFaceGguf(repo=model.gguf_repo, file=model.gguf_file, revision=model.gguf_revision)
    key = "gguf_local_path" if provider is ProviderKind.PROCESS else "cached_path"
    if provider is ProviderKind.VASTAI:
        raise ConfigError(f"no model is chosen: set [model].gguf_repo and [model].gguf_file in {origin.file}")
    raise ConfigError(
        f"no model is chosen: run ./dev fetch-model and set [model].{key} = "
        f'"{MODEL_CACHE}/{DEFAULT_PIPELINE_MODEL}" in {origin.file}'
    )


def _same_file(origin: Origin, raw: str, cached: CachedModelConfig) -> None:
    if origin.file_path("model", "gguf_local_path", raw, _FETCH) != cached.host_path:
        raise ConfigError(
            f"{origin.where('model', 'gguf_local_path')} = {show(raw)} and [model].cached_path name two models: "
            "remove one of them"
        )


def _inside_image(where: str, raw: str) -> str:
    """A path of another machine: it cannot be checked here, and relative to what it would be nobody knows."""
    if not raw.startswith("/"):
        raise ConfigError(f"{where} must be a path inside the worker's image: write it from / on")
    return raw


def _cached_model(origin: Origin, provider: ProviderKind, raw: str) -> CachedModelConfig:
    if provider is ProviderKind.VASTAI:
        raise ConfigError(
            f"{origin.where('model', 'cached_path')} = {show(raw)} is not supported by provider vastai, only by "
            "process, docker, swarm and external: set [model].gguf_repo and [model].gguf_file"
        )
    return _as_cached(origin.file_path("model", "cached_path", raw, _FETCH))


def _as_cached(host_path: Path) -> CachedModelConfig:
    return CachedModelConfig(host_path, str(CACHED_MODEL_DIR / host_path.name))


def _default_pipeline_model(cwd: Path) -> Path | None:
    """S1 2.4's default pipeline cached model path: the working directory's cache, else the checkout's."""
    for folder in (cwd, CHECKOUT):
        path = folder / MODEL_CACHE / DEFAULT_PIPELINE_MODEL
        if not file_problem(path):
            return path.resolve()
    return None


def _tokenizer(origin: Origin, provider: ProviderKind) -> TokenizerSource:
    raw = origin.settings.model.tokenizer_local_path
    if raw is None:
        return EmbeddedGguf()
    if provider is ProviderKind.PROCESS:
        way_out = "name a tokenizer.json, or remove the key to use the tokenizer in the GGUF"
        return LocalPath(path=str(origin.file_path("model", "tokenizer_local_path", raw, way_out)))
    return LocalPath(path=_inside_image(f"{origin.where('model', 'tokenizer_local_path')} = {show(raw)}", raw))


def _stem(source: GgufSource) -> str:
    name = PurePosixPath(source.path if isinstance(source, LocalPath) else source.file).name
    return name.removesuffix(".gguf") or name


# --- the relay ----------------------------------------------------------------------------------------------------
def resolve_relay(origin: Origin, provider: ProviderKind) -> RelayRuntimeConfig:
    """design.md 3, relay: who uses one, and which combinations cannot work."""
    relay = origin.settings.relay
    url = None if relay.url is None else origin.relay_url("relay", "url", relay.url)
    if relay.mode == "disabled" and url is not None:
        raise ConfigError(f'{origin.where("relay", "url")} contradicts [relay].mode = "disabled": remove one of them')
    if relay.mode == "disabled" and provider in (ProviderKind.SWARM, ProviderKind.VASTAI):
        raise ConfigError(
            f'{origin.where("relay", "mode")} = "disabled" cannot work with provider {provider}, whose workers reach '
            "this machine only through a relay: remove the key"
        )
    bind = None if relay.bind_addr is None else origin.socket_addr("relay", "bind_addr", relay.bind_addr)
    if bind is not None and not 1 <= bind.port <= 65532:
        raise ConfigError(
            f"{origin.where('relay', 'bind_addr')} = {show(relay.bind_addr)} leaves no room for four ports: "
            "use a port from 1 to 65532"
        )
    advertise = relay.advertise_addr
    if advertise is not None:
        advertise = origin.advertised("relay", "advertise_addr", advertise)
    elif bind is not None and bind.host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"{origin.where('relay', 'bind_addr')} = {show(relay.bind_addr)} is no address that a worker can dial: "
            "set [relay].advertise_addr"
        )
    used = relay.mode == "default" or url is not None if provider is ProviderKind.PROCESS else relay.mode != "disabled"
    return RelayRuntimeConfig(relay.mode or "unset", url, bind, advertise, used)


def check_restart(origin: Origin, provider: ProviderKind) -> None:
    """A lost worker is started again by whoever has started it, which is not always this program."""
    if origin.settings.runtime.on_worker_loss == "restart" and provider is ProviderKind.EXTERNAL:
        raise ConfigError(
            f'{origin.where("runtime", "on_worker_loss")} = "restart" is not supported by provider external, whose '
            "workers are started by hand: remove the key"
        )


def check_feedback(origin: Origin) -> None:
    """One stage has nobody to feed back to."""
    if origin.settings.pipeline.feedback == "direct" and origin.settings.runtime.pipeline_stages < 2:
        raise ConfigError(
            f'{origin.where("pipeline", "feedback")} = "direct" needs two stages or more: '
            "set [runtime].pipeline_stages, or remove the key"
        )


def check_edges(origin: Origin, relay: RelayRuntimeConfig, planned: bool) -> None:
    """Edges over the relay need one."""
    if planned and origin.settings.pipeline.edges == "relay" and not relay.used:
        raise ConfigError(
            f'{origin.where("pipeline", "edges")} = "relay" needs a relay: set [relay].mode = "default" or use "auto"'
        )


# --- what is reachable from elsewhere -----------------------------------------------------------------------------
def prompt_rpc(origin: Origin) -> SocketAddr:
    """[prompt].rpc_addr; beyond this machine only on demand, because it asks nobody who he is (row 34)."""
    raw = origin.settings.prompt.rpc_addr
    addr = origin.socket_addr("prompt", "rpc_addr", raw)
    if not addr.is_loopback and not origin.settings.prompt.allow_remote:
        raise ConfigError(
            f"{origin.where('prompt', 'rpc_addr')} = {show(raw)} can be reached from other machines without any "
            "password: set [prompt].allow_remote = true or use 127.0.0.1"
        )
    return addr


def http_token_file(origin: Origin) -> Path | None:
    """[prompt].http_token_file: a file with something in it."""
    raw = origin.settings.prompt.http_token_file
    if raw is None:
        return None
    way_out = "write a bearer token into it"
    path = origin.file_path("prompt", "http_token_file", raw, way_out)
    try:
        content = path.read_bytes().strip()
    except OSError:
        raise ConfigError(f"{_named(origin, raw, path)} cannot be read: {way_out}") from None
    if not content:
        raise ConfigError(f"{_named(origin, raw, path)} is empty: {way_out}")
    checked_token(content.decode("latin-1"), f"{_named(origin, raw, path)} holds no usable token and")
    return path


def _named(origin: Origin, raw: str, path: Path) -> str:
    return f"{origin.where('prompt', 'http_token_file')} = {show(raw)} names {path}, which"


def http_addr(origin: Origin, table: str, key: str, token_file: Path | None) -> SocketAddr | None:
    """An HTTP address: beyond this machine only with a token (row 34)."""
    raw: str | None = getattr(getattr(origin.settings, table), key)
    if raw is None:
        return None
    addr = origin.socket_addr(table, key, raw)
    if not addr.is_loopback and token_file is None:
        raise ConfigError(
            f"{origin.where(table, key)} = {show(raw)} can be reached from other machines without any password: "
            "set [prompt].http_token_file or use 127.0.0.1"
        )
    return addr


# --- providers ----------------------------------------------------------------------------------------------------
def worker_binary(argument: str | None, origin: Origin, executable: Path) -> Path:
    """--worker-bin, else mvp-worker-node beside the program that runs now, else in its environment's bin folder.

    Symbolic links are kept: a virtual environment's python is one, and its programs lie beside the link.
    """
    if argument is not None:
        what = f"argument --worker-bin = {show(argument)}"
        path = absolute(argument, origin.cwd, origin.home, what)
        if problem := _program_problem(path):
            raise ConfigError(f"{what} names {path}, which {problem}: name the {WORKER_PROGRAM} program")
        return path
    folders = (executable.parent, executable.resolve().parent, Path(sys.prefix) / "bin")
    for folder in folders:
        if not _program_problem(folder / WORKER_PROGRAM):
            return folder / WORKER_PROGRAM
    raise ConfigError(
        f"provider process needs the program {WORKER_PROGRAM}, which is not in {folders[0]}: "
        "install swactor-mq there or name it with --worker-bin"
    )


def _program_problem(path: Path) -> str:
    return file_problem(path) or ("" if os.access(path, os.X_OK) else "is not executable")


def vastai(origin: Origin, environ: Mapping[str, str]) -> VastAiRuntimeConfig:
    """S1 7.3 as far as it can be known without asking vast.ai or starting ssh-keygen."""
    table, stages = origin.settings.vastai, origin.settings.runtime.pipeline_stages
    if stages > 1:
        raise ConfigError(
            f"{origin.where('runtime', 'pipeline_stages')} = {stages} is not supported by provider vastai, which runs "
            "one stage: use 1 or another provider"
        )
    if table.api_key is None:
        unread = "; VAST_API_KEY is not read" if secret(environ, "VAST_API_KEY") else ""
        raise ConfigError(
            f"provider vastai needs an API key: set the variable {API_KEY} or [vastai].api_key in {origin.file}{unread}"
        )
    key = checked_token(table.api_key.get_secret_value().strip(), origin.where("vastai", "api_key"))
    if table.bootstrap_command is None:
        raise ConfigError(
            f"provider vastai needs the command that starts the worker: set [vastai].bootstrap_command in {origin.file}"
        )
    way_out = "make one with ssh-keygen -t ed25519 or name another with --vastai-ssh-identity"
    return VastAiRuntimeConfig(
        api_key=Secret(key),
        bootstrap_command=Secret(table.bootstrap_command),
        ssh_identity=origin.file_path("vastai", "ssh_identity", table.ssh_identity, way_out),
        provisioning=VastAiProvisioning(
            disk_gb=table.disk_gb,
            ssh_user=table.ssh_user,
            confirm_lease=table.confirm_lease,
            onstart=None if table.onstart is None else Secret(table.onstart),
            gpu_name=table.gpu_name,
            min_gpu_ram_mb=table.min_gpu_ram_mb,
            min_down_mbps=table.min_down_mbps,
            min_up_mbps=table.min_up_mbps,
            min_reliability=table.min_reliability,
            require_verified=table.require_verified,
            poll_interval_secs=table.poll_interval_secs,
            max_dph_total=table.max_dph_total,
            max_hours=table.max_hours,
            max_spend=table.max_spend,
            excluded_hosts=tuple(table.excluded_hosts),
        ),
    )


def hf_token(environ: Mapping[str, str], source: GgufSource) -> Secret | None:
    """HF_TOKEN, only where a worker fetches from Hugging Face (S1 2.2)."""
    value = secret(environ, HF_TOKEN)
    if value is None or not isinstance(source, HuggingFaceGguf):
        return None
    return Secret(checked_token(value, f"variable {HF_TOKEN}"))
