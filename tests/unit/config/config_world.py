"""A small world for configuration tests: a folder with a model, a worker program and an ssh key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.config import Config, ConfigError, resolve

API_KEY = "vast-0123456789abcdef"
MODEL = '[model]\ngguf_local_path = "model.gguf"\n'
CACHED = '[model]\ncached_path = "model.gguf"\n'
REMOTE = '[model]\ngguf_repo = "owner/repo"\ngguf_file = "big.gguf"\n'
VASTAI = REMOTE + '[provider]\nkind = "vastai"\n[vastai]\nbootstrap_command = "mvp-worker-node"\nssh_identity = "id"\n'


@dataclass
class World:
    """Resolves in its own folder; `c.toml` is the configuration file."""

    cwd: Path
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def executable(self) -> Path:
        return self.cwd / "bin" / "python"

    def resolve(self, toml: str | bytes | None = None, *argv: str, environ: Mapping[str, str] | None = None) -> Config:
        if toml is not None:
            (self.cwd / "c.toml").write_bytes(toml.encode() if isinstance(toml, str) else toml)
            argv = ("--runtime-config", "c.toml", *argv)
        return resolve(argv, {**self.environ, **(environ or {})}, self.cwd, executable=self.executable)

    def error(self, toml: str | bytes | None = None, *argv: str, environ: Mapping[str, str] | None = None) -> str:
        """The sentence, with this world's folder written as CWD."""
        try:
            config = self.resolve(toml, *argv, environ=environ)
        except ConfigError as error:
            return str(error).replace(str(self.cwd), "CWD")
        raise AssertionError(f"resolved: {config}")


def make_world(folder: Path) -> World:
    (folder / "bin").mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "other.gguf").write_bytes(b"GGUF")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "id").write_text("private")
    worker = folder / "bin" / "mvp-worker-node"
    worker.write_text("#!/bin/sh\n")
    worker.chmod(0o755)
    return World(folder)
