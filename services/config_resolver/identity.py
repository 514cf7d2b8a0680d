"""The SSH identity for rented machines: its public key and fingerprint (S1 4.1, 7.3).

Whether the account at vast.ai knows the key is the provider's question, asked before the first worker is started.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from common.config_errors import ConfigError
from common.config_model import Config

KEYGEN_LIMIT_S = 10
_KEY_TYPES = ("ssh-", "ecdsa-", "sk-")


def prepare_identity(config: Config) -> Config:
    """The configuration with public key and fingerprint of its identity; unchanged for providers without one.

    Raises ConfigError in one sentence; nothing of the private key is ever read into this process.
    """
    if config.vastai is None:
        return config
    public = derive_public_key(config.vastai.ssh_identity)
    prepared = replace(config.vastai, ssh_public_key=public, ssh_public_fingerprint=fingerprint(public))
    return replace(config, vastai=prepared)


def derive_public_key(identity: Path) -> str:
    """`type base64` as ssh-keygen derives it. Raises ConfigError."""
    what = f"the ssh identity {identity}"
    way_out = "name a private key without passphrase in [vastai].ssh_identity or with --vastai-ssh-identity"
    # An empty passphrase is given, so that ssh-keygen fails for a protected key instead of asking on the terminal.
    command = ["ssh-keygen", "-y", "-P", "", "-f", str(identity)]
    # Its messages in English, and none of the tokens that this process has in its environment.
    environ = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=KEYGEN_LIMIT_S,
            env=environ,
        )
    except FileNotFoundError:
        raise ConfigError(
            "provider vastai needs the program ssh-keygen, which is not installed: install the OpenSSH client"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{what} cannot be used: ssh-keygen did not end within {KEYGEN_LIMIT_S} s: {way_out}"
        ) from None
    words = done.stdout.split()
    if done.returncode != 0 or len(words) < 2 or not words[0].startswith(_KEY_TYPES):
        raise ConfigError(f"{what} cannot be used: {_reason(done.stderr, identity)}: {way_out}")
    return f"{words[0]} {words[1]}"


def fingerprint(public_key: str) -> str:
    """SHA256:..., as ssh-keygen -l shows it. Raises ConfigError for what is no public key."""
    try:
        blob = base64.b64decode(public_key.split()[1], validate=True)
    except (IndexError, binascii.Error):
        raise ConfigError("ssh-keygen printed no public key: check that it is OpenSSH's") from None
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _reason(stderr: str, identity: Path) -> str:
    """What ssh-keygen said, as the middle of a sentence; it may print a whole frame of warnings."""
    text = stderr.lower()
    if "too open" in text or "bad permissions" in text:
        return "other users may read it (chmod 600 it)"
    if "passphrase" in text:
        return "it is protected by a passphrase"
    lines = [line.strip() for line in stderr.splitlines() if line.strip(" @")]
    last = lines[-1] if lines else "ssh-keygen refused it"
    return last.replace(f'"{identity}"', "").replace("Load key", "ssh-keygen says").replace(" :", ":").rstrip(".")
