"""The wheel for rented machines: what pip takes, from the files that run here."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from services.provisioner import vastai_wheel
from services.provisioner.plugin import ProviderError


def test_it_is_whole_and_the_same_each_time() -> None:
    name, data = vastai_wheel.pack()
    assert name.startswith("swactor_mq-") and name.endswith("-py3-none-any.whl")
    assert vastai_wheel.pack() == (name, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = set(archive.namelist())
        (record,) = [entry for entry in names if entry.endswith(".dist-info/RECORD")]
        rows = {row[0]: row[1] for row in csv.reader(archive.read(record).decode().splitlines())}
        assert set(rows) == names
        for entry, digest in rows.items():
            if entry != record:
                found = base64.urlsafe_b64encode(hashlib.sha256(archive.read(entry)).digest()).decode().rstrip("=")
                assert digest == f"sha256={found}", entry
        assert "worker/agent/__main__.py" in names and "worker/engine/cpu/step.c" in names
        assert not [entry for entry in names if "__pycache__" in entry or entry.startswith("tests")]
        entry_points = archive.read(record.replace("RECORD", "entry_points.txt")).decode()
        assert "mvp-worker-node = worker.agent.__main__:main" in entry_points
        assert "Requires-Dist: tinygrad" in archive.read(record.replace("RECORD", "METADATA")).decode()


def test_what_is_imported_from_it_runs(tmp_path: Path) -> None:
    """Unpacked, without this checkout on the path."""
    with zipfile.ZipFile(io.BytesIO(vastai_wheel.pack()[1])) as archive:
        archive.extractall(tmp_path)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import worker.agent.__main__ as m; print(m.__file__)"
    done = subprocess.run([sys.executable, "-I", "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "worker" / "agent" / "__main__.py")


def test_without_an_installation_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vastai_wheel, "DISTRIBUTION", "no-such-thing")
    with pytest.raises(ProviderError, match="install it, or use a prebuilt image"):
        vastai_wheel.pack()
