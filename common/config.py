"""Configuration: defaults < TOML file < secrets of the environment < arguments, into one typed Config (S1 7.1).

`resolve` is the only place that interprets raw configuration strings. It reads files and changes nothing; every
failure is a ConfigError with one sentence (S1 9.1, 10.2) that holds no secret (S1 10.16).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from common import config_rules as rules
from common.config_args import Arguments, parse
from common.config_environment import API_KEY, HF_TOKEN, refuse_settings, secret
from common.config_errors import ConfigError, Information, hiding, show
from common.config_model import Config, ProviderKind, RuntimeConfigProfile, Secret, SocketAddr, digest_source
from common.config_paths import Origin, absolute, file_problem
from common.config_schema import POSITIVE_U32, U32_MAX, Layer, Settings, explain, merge, toml_keys

__all__ = [
    "Config",
    "ConfigError",
    "Information",
    "ProviderKind",
    "RuntimeConfigProfile",
    "Secret",
    "SocketAddr",
    "digest_source",
    "resolve",
]

DEFAULT_FILE = Path(".config/config.toml")


def resolve(argv: Sequence[str], environ: Mapping[str, str], cwd: Path, *, executable: Path) -> Config:
    """The run's configuration.

    argv: without the program name; executable: the program that runs now, unresolved. Raises ConfigError with one
    sentence, Information for --help and --version.
    """
    from_environment = tuple(value for name in (API_KEY, HF_TOKEN) if (value := secret(environ, name)))
    with hiding(from_environment):
        return _resolve(argv, environ, cwd, executable, from_environment)


def vastai_key(argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> str:
    """The vast.ai key of the environment or the configuration file, "" if there is none; nothing else is checked.

    For commands that look after what was rented, which must work without a model. Raises ConfigError, Information.
    """
    arguments = parse(argv, toml_keys())
    if (api_key := secret(environ, API_KEY)) is not None:
        return api_key.strip()
    path, label = _config_file(arguments, cwd, environ.get("HOME", ""))
    found = _load(path, label, {}, {}, {}).vastai.api_key
    return "" if found is None else found.get_secret_value().strip()


def _resolve(
    argv: Sequence[str], environ: Mapping[str, str], cwd: Path, executable: Path, from_environment: tuple[str, ...]
) -> Config:
    arguments = parse(argv, toml_keys())
    refuse_settings(environ)
    home = environ.get("HOME", "")
    path, label = _config_file(arguments, cwd, home)
    layer, given = _argument_layer(arguments)
    api_key = secret(environ, API_KEY)
    if api_key is not None:
        given["vastai", "api_key"] = f"variable {API_KEY}"
    secrets: Layer = {} if api_key is None else {"vastai": {"api_key": api_key}}
    settings = _load(path, label, layer, secrets, given)
    final_key = settings.vastai.api_key
    with hiding(() if final_key is None else (final_key.get_secret_value().strip(), *from_environment)):
        return _build(Origin(settings, label, given, cwd, home), arguments, environ, executable, path)


def _config_file(arguments: Arguments, cwd: Path, home: str) -> tuple[Path | None, Path]:
    """The file to read, or None, and its name for the user."""
    if arguments.runtime_config is None:
        path = cwd / DEFAULT_FILE
        if not os.path.lexists(path):
            return None, DEFAULT_FILE
        if problem := file_problem(path):
            raise ConfigError(f"{DEFAULT_FILE} {problem}: make it a readable TOML file or remove it")
        return path, DEFAULT_FILE
    what = f"argument --runtime-config = {show(arguments.runtime_config)}"
    path = absolute(arguments.runtime_config, cwd, home, what)
    if problem := file_problem(path):
        raise ConfigError(f"{what} names {path}, which {problem}: name a readable TOML file")
    return path, Path(arguments.runtime_config)


def _argument_layer(arguments: Arguments) -> tuple[Layer, dict[tuple[str, str], str]]:
    """The arguments as a layer above the file, and which keys they set."""
    layer: Layer = {}
    given: dict[tuple[str, str], str] = {}
    if arguments.provider is not None:
        layer["provider"] = {"kind": arguments.provider}
        given["provider", "kind"] = "argument --provider"
    if (stages := arguments.pipeline_stages) is not None:
        given["runtime", "pipeline_stages"] = "argument --pipeline-stages"
        if not re.fullmatch(r"\+?[0-9]{1,20}", stages, re.ASCII) or not 1 <= int(stages) <= U32_MAX:
            raise ConfigError(f"argument --pipeline-stages = {show(stages)} is not valid: it must be {POSITIVE_U32}")
        layer["runtime"] = {"pipeline_stages": int(stages)}
    if arguments.vastai_ssh_identity is not None:
        layer["vastai"] = {"ssh_identity": arguments.vastai_ssh_identity}
        given["vastai", "ssh_identity"] = "argument --vastai-ssh-identity"
    return layer, given


def _load(
    path: Path | None, label: Path, arguments: Layer, secrets: Layer, given: Mapping[tuple[str, str], str]
) -> Settings:
    try:
        return merge(path, arguments, secrets)
    except ValidationError as error:
        raise explain(error, label, given) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{label} is not valid TOML: {_toml_problem(str(error), path)}: correct that place") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{label} is not valid TOML: line {line} is not UTF-8: save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{label} cannot be read: {error.strerror}: make it a readable TOML file") from None
    except (ValueError, RecursionError):
        # tomllib lets these through for numbers of thousands of digits and for endless nesting.
        raise ConfigError(f"{label} is not valid TOML: a value is too large or too deep: shorten it") from None


def _toml_problem(text: str, path: Path | None) -> str:
    """tomllib's complaint with the place in front."""
    message, _, place = text.rpartition(" (at ")
    if place.startswith("end of document") and path is not None:
        lines = path.read_bytes().count(b"\n") + 1
        place = f"line {lines}, end of file"
    message = message[:1].lower() + message[1:]
    return f"{place.rstrip(')')}: {message}" if message else text


def _build(
    origin: Origin, arguments: Arguments, environ: Mapping[str, str], executable: Path, config_file: Path | None
) -> Config:
    settings = origin.settings
    provider = rules.provider_of(settings)
    rpc_bind = rules.prompt_rpc(origin)
    token_file = rules.http_token_file(origin)
    vastai = rules.vastai(origin, environ) if provider is ProviderKind.VASTAI else None
    model = rules.choose_model(origin, provider)
    relay = rules.resolve_relay(origin, provider)
    rules.check_edges(origin, relay, model.cached_model is not None or settings.runtime.pipeline_stages > 1)
    rules.check_restart(origin, provider)
    rules.check_feedback(origin)
    worker_bin = None
    if provider is ProviderKind.PROCESS:
        worker_bin = rules.worker_binary(arguments.worker_bin, origin, executable)
    image = settings.vastai.image if vastai is not None and settings.vastai.image else settings.image.node
    frame_log, run_dir = settings.observability.datastream_frame_log, settings.runtime.run_dir
    return Config(
        config_profile=RuntimeConfigProfile(settings.runtime.profile),
        provider=provider,
        image=image,
        docker_gpus=settings.docker.gpus,
        rpc_bind=rpc_bind,
        run_id=settings.runtime.run_id,
        node_id=settings.runtime.node_id,
        stage_index=settings.runtime.stage_index,
        layer_end_exclusive=settings.runtime.layer_end_exclusive,
        pipeline_stages=settings.runtime.pipeline_stages,
        model_id=model.model_id,
        gguf_source=model.gguf_source,
        tokenizer=model.tokenizer,
        default_max_tokens=settings.prompt.max_tokens,
        dashboard=settings.observability.dashboard_addr is not None,
        max_context=settings.model.max_context,
        relay=relay,
        vastai=vastai,
        cached_model=model.cached_model,
        worker_bin=worker_bin,
        datastream_frame_log=None
        if frame_log is None
        else origin.absolute("observability", "datastream_frame_log", frame_log),
        run_dir=None if run_dir is None else origin.absolute("runtime", "run_dir", run_dir),
        on_worker_loss=settings.runtime.on_worker_loss,
        allow_remote=settings.prompt.allow_remote,
        http_addr=rules.http_addr(origin, "prompt", "http_addr", token_file),
        http_token_file=token_file,
        pipeline_feedback=settings.pipeline.feedback,
        pipeline_edges=settings.pipeline.edges,
        pipeline_placement=settings.pipeline.placement,
        activation_dtype=settings.pipeline.activation_dtype,
        docker_pull=settings.docker.pull,
        swarm_constraints=tuple(settings.swarm.constraints),
        dashboard_addr=rules.http_addr(origin, "observability", "dashboard_addr", token_file),
        metrics_addr=rules.http_addr(origin, "observability", "metrics_addr", token_file),
        archive_max_bytes=settings.observability.archive_max_bytes,
        hf_token=rules.hf_token(environ, model.gguf_source),
        notes=model.notes,
        config_file=config_file,
    )
