"""The fake vast.ai is itself checked: by the vendor's client (PyPI `vastai`), in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vastai.server import FakeVast

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".cache" / "vendor"
"""The group `vendor` of uv.lock: kept between runs, and never part of .venv, whose packages it pins differently."""


@pytest.fixture(scope="module")
def vendor_python() -> Path:
    uv = ROOT / ".venv" / "bin" / "uv"
    environ = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    environ |= {"UV_PROJECT_ENVIRONMENT": str(HOME), "UV_PYTHON_DOWNLOADS": "never"}
    command = [str(uv), "sync", "--locked", "--only-group", "vendor", "--quiet", "--project", str(ROOT)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return HOME / "bin" / "python"


@pytest.fixture
def market() -> Any:
    fake = FakeVast(real=False)
    fake.boot_reads = 2
    yield fake
    fake.close()


def calls(python: Path, fake: FakeVast, key: str = "") -> subprocess.CompletedProcess[str]:
    script = Path(__file__).parents[1] / "fakes" / "vastai" / "vendor_calls.py"
    return subprocess.run(
        [str(python), str(script), fake.url, key or fake.key],
        env={"PATH": os.environ["PATH"], "HOME": str(HOME), "XDG_CONFIG_HOME": str(HOME)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.spec("S2 6.3", "S2 1")
def test_the_vendors_client_rents_and_gives_back(vendor_python: Path, market: FakeVast) -> None:
    others = market.foreign(26)
    cheap = market.offer(price=0.2)
    market.offer(price=0.1, gpu_name="RTX 3060")
    market.offer(price=0.9)
    market.offer(price=0.1, inet_down=100.0)
    done = calls(vendor_python, market)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    assert seen["user"]["email"] == "someone@example.org"
    assert [row["key"].split()[0] for row in seen["keys"]] == ["ssh-ed25519"]
    assert [row["id"] for row in seen["offers"]] == [cheap]
    (instance,) = market.created
    assert seen["created"] == {"success": True, "new_contract": instance}
    (rental,) = [json.loads(body) for _, path, body in market.requests if "/asks/" in path]
    assert rental["label"] == "smq-vendor" and rental["disk"] == 40 and rental["env"] == {"A": "1"}
    assert seen["first"]["actual_status"] == "loading" and seen["running"]["actual_status"] == "running"
    # The client follows the pages, too.
    assert len(seen["listed"]) == 27 and seen["listed"][-1]["label"] == "smq-vendor-2"
    assert seen["logs"] == "last words\n"
    assert seen["destroyed"] == {"success": True} and market.destroyed == [instance]
    assert seen["afterwards"] is None and seen["left"] == others
    assert all(market.key not in path for _, path, _ in market.requests)


def test_the_vendors_client_is_refused_as_ours_is(vendor_python: Path, market: FakeVast) -> None:
    done = calls(vendor_python, market, "wrong")
    assert done.returncode != 0 and "404" in done.stderr and not market.created
