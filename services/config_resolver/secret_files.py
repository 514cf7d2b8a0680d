"""Writes secrets where only this user reads them; what travels is the path (design.md 2, Secrets)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from common.config_errors import ConfigError
from common.config_model import Secret


def write_secrets(secrets: Mapping[str, Secret], secrets_dir: Path) -> None:
    """Each secret into secrets_dir/name, 0600, replaced as a whole. The folder is made 0700 if it is missing.

    Raises ConfigError in one sentence.
    """
    try:
        secrets_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, secret in secrets.items():
            _write(secrets_dir / name, secret.reveal())
    except OSError as error:
        raise ConfigError(
            f"the secrets folder {secrets_dir} cannot be written: {error.strerror}: make it writable for this user"
        ) from None


def _write(path: Path, value: str) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    # Exclusive and never through a link: nobody may have laid a trap under this name.
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(value)
    os.replace(new, path)
