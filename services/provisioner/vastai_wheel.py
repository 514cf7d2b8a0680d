"""This program as a wheel, for a rented machine that has only Python: made from the files that run here.

No index has to offer the version and no build tool has to be at hand: a wheel is a zip with a list of its files.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import common
from common.config_args import DISTRIBUTION
from services.provisioner.plugin import ProviderError

PACKAGES = ("common", "services", "worker", "tools")
LEFT_OUT = frozenset({"__pycache__", ".mypy_cache", ".ruff_cache"})
EPOCH = (2020, 1, 1, 0, 0, 0)  # the same files give the same bytes


def pack() -> tuple[str, bytes]:
    """(file name, content). Raises ProviderError when this program is not installed."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise ProviderError(
            f"{DISTRIBUTION} is not installed, so that no wheel can be made for the rented machine; install it, or use "
            "a prebuilt image and a bootstrap_command without $SMQ_WHEEL"
        ) from None
    stem = f"{DISTRIBUTION.replace('-', '_')}-{installed.version}"
    root = Path(common.__file__).resolve().parents[1]
    files = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for package in PACKAGES
        for path in sorted((root / package).rglob("*"))
        if path.is_file() and not LEFT_OUT.intersection(path.parts)
    }
    info = f"{stem}.dist-info"
    files[f"{info}/METADATA"] = (installed.read_text("METADATA") or "").encode()
    files[f"{info}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: swactor-mq\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = f"{info}/RECORD"
    lines = [f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items()]
    files[record] = "".join([*lines, f"{record},,\n"]).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), data, zipfile.ZIP_DEFLATED)
    return f"{stem}-py3-none-any.whl", out.getvalue()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
