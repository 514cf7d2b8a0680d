"""The environment as a layer (S1 2.2): two secrets, and the refusal of everything that looks like a setting."""

from __future__ import annotations

from collections.abc import Mapping

from common.config_errors import ConfigError, nearest
from common.config_schema import TOKEN_FORM, toml_keys

API_KEY = "VASTAI_API_KEY"
HF_TOKEN = "HF_TOKEN"

_PREFIX = "MVP_"

# The original reads dozens of MVP_* variables; whoever has them set is told where their value belongs now.
_MOVED = {
    "MVP_RUNTIME_CONFIG": "--runtime-config",
    "MVP_WORKER_BIN": "--worker-bin",
    "MVP_LOGICAL_NODE_ID": "[runtime].node_id",
    "MVP_NODE_PROVIDER": "[provider].kind",
    "MVP_PROVIDER": "[provider].kind",
    "MVP_NODE_IMAGE": "[image].node",
    "MVP_CACHED_MODEL_HOST_PATH": "[model].cached_path",
    "MVP_PROMPT_RPC_BIND": "[prompt].rpc_addr",
    "MVP_DASHBOARD": "[observability].dashboard_addr",
    "MVP_DASHBOARD_PORT": "[observability].dashboard_addr",
    "MVP_IROH_RELAY_MODE": "[relay].mode",
    "MVP_IROH_RELAY_URL": "[relay].url",
    "MVP_VASTAI_API_KEY": API_KEY,
}


def refuse_settings(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for the first (by name) MVP_* variable that is set; a blank one counts as unset."""
    for name in sorted(environ):
        if name.startswith(_PREFIX) and environ[name].strip():
            raise ConfigError(f"variable {name} is not read: {_home(name)}")


def secret(environ: Mapping[str, str], name: str) -> str | None:
    """The variable's value as it stands, or None when unset or blank."""
    value = environ.get(name, "").strip()
    return value or None


def checked_token(value: str, where: str) -> str:
    """The token, if it can stand in an HTTP header. Raises ConfigError, which does not show it."""
    if not value or not all("!" <= char <= "~" for char in value):
        raise ConfigError(f"{where} is not valid: it must be {TOKEN_FORM}")
    return value


def _home(name: str) -> str:
    homes = {key.upper(): f"[{table}].{key}" for table, key in toml_keys()}
    homes |= {f"{table}_{key}".upper(): f"[{table}].{key}" for table, key in toml_keys()}
    homes |= {moved.removeprefix(_PREFIX): home for moved, home in _MOVED.items()}
    bare = name.removeprefix(_PREFIX)
    # Closer than elsewhere: most of these names never had a key, and a wrong hint is worse than none.
    home = homes.get(bare) or homes.get(nearest(bare, homes, likeness=0.8), "")
    if home.startswith("["):
        return f"set {home} in the configuration file and unset it"
    if home:
        return f"use {home} and unset it"
    return "unset it; settings belong into the configuration file"
