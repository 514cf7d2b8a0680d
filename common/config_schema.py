"""The configuration file as a schema: every table and key with its type, range and default (S1 2.1; design.md 6 row 6).

Imported by the config_resolver alone: pydantic-settings costs 0.3 s and 20 MB, which no other service should pay.
Each field's description completes the sentence "it must be ...". What depends on other keys is in config_rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, StringConstraints, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from common.config_errors import ConfigError, listed, show, suggestion

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
WHOLE_U32 = f"a whole number from 0 to {U32_MAX}"
POSITIVE_U32 = f"a whole number from 1 to {U32_MAX}"
WHOLE_U64 = f"a whole number from 0 to {U64_MAX}"
PROVIDERS = ("process", "docker", "swarm", "vastai", "external")
PROFILES = ("local", "deploy")
TOKEN_FORM = "one line of printable ASCII without spaces"

_ALIASES = {
    "local_process": "process",
    "local-process": "process",
    "local_docker": "docker",
    "local-docker": "docker",
    "vast_ai": "vastai",
    "vast-ai": "vastai",
}


def _folded(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


def _provider(value: Any) -> Any:
    folded = _folded(value)
    return _ALIASES.get(folded, folded) if isinstance(folded, str) else folded


Text = Annotated[str, StringConstraints(min_length=1, pattern=r"\S")]
PathText = Annotated[str, StringConstraints(pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]
U32 = Annotated[int, Field(ge=0, le=U32_MAX)]
U64 = Annotated[int, Field(ge=0, le=U64_MAX)]
PositiveU32 = Annotated[int, Field(ge=1, le=U32_MAX)]
PositiveFloat = Annotated[float, Field(gt=0)]
Profile = Annotated[Literal["local", "deploy"], BeforeValidator(_folded)]
Provider = Annotated[Literal["process", "docker", "swarm", "vastai", "external"], BeforeValidator(_provider)]
GpuSelector = Annotated[str, StringConstraints(pattern=r"^(none|all|[1-9][0-9]*|device=[\w.,:-]+|cdi:\S+)$")]
Constraint = Annotated[str, StringConstraints(pattern=r"^\s*[\w.-]+\s*(==|!=)\s*\S.*$")]

_TEXT = "a text that is not empty"
_PATH = "a path"
_BOOL = "true or false"


class Table(BaseModel):
    """A TOML table: no unknown keys, no conversion between types, no value in an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True, allow_inf_nan=False)


class Runtime(Table):
    """[runtime]"""

    profile: Profile = Field(default="local", description=f'"{PROFILES[0]}" or "{PROFILES[1]}"')
    run_id: U64 = Field(default=1, description=WHOLE_U64)
    node_id: U64 = Field(default=1, description=WHOLE_U64)
    stage_index: U32 = Field(default=0, description=WHOLE_U32)
    layer_end_exclusive: U32 | None = Field(default=None, description=WHOLE_U32)
    pipeline_stages: PositiveU32 = Field(default=1, description=POSITIVE_U32)
    run_dir: PathText | None = Field(default=None, description=_PATH)
    on_worker_loss: Literal["fail", "restart"] = Field(default="fail", description='"fail" or "restart"')


class ProviderTable(Table):
    """[provider]"""

    kind: Provider | None = Field(default=None, description=listed((f'"{name}"' for name in PROVIDERS), "or"))


class Image(Table):
    """[image]"""

    node: Text = Field(default="swactor-mvp-node:latest", description="the name of an image")


class Relay(Table):
    """[relay]"""

    mode: Literal["default", "disabled"] | None = Field(default=None, description='"default" or "disabled"')
    url: Text | None = Field(default=None, description="curve://<server key, 64 hex digits>@host:port")
    bind_addr: Text | None = Field(default=None, description='IP:port, as "10.0.0.5:19800"')
    advertise_addr: Text | None = Field(default=None, description='host:port, as "box.example.org:19800"')


class Prompt(Table):
    """[prompt]"""

    rpc_addr: Text = Field(default="127.0.0.1:19777", description='IP:port, as "127.0.0.1:19777"')
    max_tokens: U32 = Field(default=0, description=WHOLE_U32)
    http_addr: Text | None = Field(default=None, description='IP:port, as "127.0.0.1:8080"')
    http_token_file: PathText | None = Field(default=None, description=_PATH)
    allow_remote: bool = Field(default=False, description=_BOOL)


class Model(Table):
    """[model]"""

    id: Text | None = Field(default=None, description=_TEXT)
    gguf_local_path: PathText | None = Field(default=None, description=_PATH)
    gguf_repo: Text | None = Field(default=None, description='a Hugging Face repository, as "owner/name"')
    gguf_file: Text | None = Field(default=None, description="the name of a file in gguf_repo")
    gguf_revision: Text | None = Field(default=None, description="a branch, tag or commit of gguf_repo")
    tokenizer_local_path: PathText | None = Field(default=None, description=_PATH)
    max_context: PositiveU32 | None = Field(default=None, description=POSITIVE_U32)
    cached_path: PathText | None = Field(default=None, description=_PATH)


class Pipeline(Table):
    """[pipeline]"""

    feedback: Literal["gateway", "direct"] = Field(default="gateway", description='"gateway" or "direct"')
    edges: Literal["auto", "relay"] = Field(default="auto", description='"auto" or "relay"')
    placement: Literal["even", "measured"] = Field(default="even", description='"even" or "measured"')
    activation_dtype: Literal["float32", "float16"] = Field(default="float32", description='"float32" or "float16"')


class Docker(Table):
    """[docker]"""

    gpus: GpuSelector = Field(default="all", description='"none", "all", a count as "2", "device=0,1" or "cdi:<name>"')
    pull: Literal["missing", "always", "never"] = Field(default="missing", description='"missing", "always" or "never"')


class Swarm(Table):
    """[swarm]"""

    constraints: list[Constraint] = Field(default=[], description='a list of texts as "node.labels.gpu == true"')


class Observability(Table):
    """[observability]"""

    datastream_frame_log: PathText | None = Field(default=None, description=_PATH)
    archive_max_bytes: U64 = Field(default=0, description=WHOLE_U64)
    dashboard_addr: Text | None = Field(default=None, description='IP:port, as "127.0.0.1:8090"')
    metrics_addr: Text | None = Field(default=None, description='IP:port, as "127.0.0.1:9090"')


class VastAi(Table):
    """[vastai]; checked always, used only when the provider is vastai."""

    api_key: SecretStr | None = Field(default=None, description=TOKEN_FORM)
    image: Text | None = Field(default=None, description="the name of an image")
    bootstrap_command: Text | None = Field(default=None, description=_TEXT, json_schema_extra={"secret": True})
    onstart: Text | None = Field(default=None, description=_TEXT, json_schema_extra={"secret": True})
    disk_gb: PositiveU32 = Field(default=50, description=POSITIVE_U32)
    ssh_user: Text = Field(default="root", description="a user name")
    ssh_identity: PathText = Field(default="~/.ssh/id_ed25519", description=_PATH)
    confirm_lease: bool = Field(default=False, description=_BOOL)
    gpu_name: Text | None = Field(default=None, description='the name of a GPU, as "RTX_4090"')
    min_gpu_ram_mb: U32 | None = Field(default=None, description=WHOLE_U32)
    min_down_mbps: Annotated[float, Field(ge=0)] = Field(default=100, description="a number from 0 up")
    min_up_mbps: Annotated[float, Field(ge=0)] | None = Field(default=None, description="a number from 0 up")
    min_reliability: Annotated[float, Field(ge=0, le=1)] = Field(default=0.95, description="a number from 0 to 1")
    require_verified: bool = Field(default=False, description=_BOOL)
    poll_interval_secs: PositiveU32 = Field(default=10, description=POSITIVE_U32)
    max_dph_total: PositiveFloat | None = Field(default=None, description="a number above 0 (US dollars an hour)")
    max_hours: PositiveFloat | None = Field(default=None, description="a number above 0 (hours)")
    max_spend: PositiveFloat | None = Field(default=None, description="a number above 0 (US dollars)")
    excluded_hosts: list[U64] = Field(default=[], description="a list of host ids, as [59017]")


class Settings(BaseSettings):
    """The whole file."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    runtime: Runtime = Runtime()
    provider: ProviderTable = ProviderTable()
    image: Image = Image()
    relay: Relay = Relay()
    prompt: Prompt = Prompt()
    model: Model = Model()
    pipeline: Pipeline = Pipeline()
    docker: Docker = Docker()
    swarm: Swarm = Swarm()
    observability: Observability = Observability()
    vastai: VastAi = VastAi()


Layer = dict[str, dict[str, Any]]
"""table → key → value."""


def tables() -> dict[str, dict[str, Any]]:
    """Table → key → the field's definition, of the whole schema."""
    found: dict[str, dict[str, Any]] = {}
    for name, field in Settings.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, Table)
        found[name] = dict(field.annotation.model_fields)
    return found


def toml_keys() -> list[tuple[str, str]]:
    """Every (table, key)."""
    return [(table, key) for table, keys in tables().items() for key in keys]


def expectation(table: str, key: str) -> str:
    """Completes "it must be ..." for one key."""
    return str(tables()[table][key].description)


def merge(file: Path | None, arguments: Layer, secrets: Layer) -> Settings:
    """Defaults < TOML file < secrets of the environment < arguments (S1 5.2).

    Pydantic-settings' own environment source is left out: the environment is no configuration surface (S1 2.2).

    Raises ValidationError (explain it with `explain`), tomllib.TOMLDecodeError, UnicodeDecodeError or OSError.
    """

    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: Any, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            layers: list[PydanticBaseSettingsSource] = [
                InitSettingsSource(settings_cls, init_kwargs=dict(arguments)),
                InitSettingsSource(settings_cls, init_kwargs=dict(secrets)),
            ]
            if file is not None:
                layers.append(TomlConfigSettingsSource(settings_cls, file))
            return tuple(layers)

    return Layered()


def explain(error: ValidationError, file: Path, arguments: Mapping[tuple[str, str], str]) -> ConfigError:
    """The first complaint of the schema as one sentence. arguments: which key was given by which argument."""
    # Unknown names first: a misspelt key is often the cause of what is wrong beside it.
    details = sorted(
        error.errors(include_url=False, include_context=False), key=lambda item: item["type"] != "extra_forbidden"
    )
    return ConfigError(_sentence(details[0], file, arguments))


def _sentence(detail: ErrorDetails, file: Path, arguments: Mapping[tuple[str, str], str]) -> str:
    known = tables()
    table, *rest = (str(part) for part in detail["loc"])
    if table not in known:
        if not isinstance(detail["input"], dict):
            homes = [f"[{name}].{table}" for name, keys in known.items() if table in keys]
            way = f"did you mean {listed(homes, 'or')}?" if homes else "every key belongs to a table"
            return f"{file}: {table} stands outside of any table: {way}"
        return f"{file}: [{table}] is not a table of the configuration: {suggestion(table, known, '[{}]')}"
    if not rest:
        return f"{file}: {table} must be a table: write [{table}] on a line of its own and its keys below"
    key = rest[0]
    if key not in known[table]:
        return f"{file}: [{table}].{key} is not a key of the configuration: {suggestion(key, known[table])}"
    where = arguments.get((table, key)) or f"{file}: [{table}].{key}"
    must = f"it must be {expectation(table, key)}"
    if is_secret(table, key):
        return f"{where} is not valid: {must}"
    return f"{where} = {show(detail['input'])} is not valid: {must}"


def is_secret(table: str, key: str) -> bool:
    """Whether the key's value never stands in any text."""
    field = tables()[table][key]
    return field.annotation == SecretStr | None or bool((field.json_schema_extra or {}).get("secret"))
