"""Checks of the machine itself: Python and its packages, tinygrad's devices, the kernels, the compiler."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from services.orchestrator.doctor.findings import Finding, fail, ok, skip, warn
from worker.engine.cpu_objects import (
    CHOICE,
    CompileError,
    chosen,
    compile_object,
    compilers,
    instruction_sets,
    machine,
    present_object,
)

PROBE_LIMIT_S = 60.0  # tinygrad's import, opening devices, and the first compilation on a slow disk
DISTRIBUTION = "swactor-mq"
PYTHONS = ((3, 11), (3, 14))
"""The oldest that works and the first that does not."""
INSTALL = "install swactor-mq again into an environment of its own (in a checkout: ./dev clean, then any ./dev command)"
GET_COMPILER = "install clang (Debian: apt-get install clang) or the Python package ziglang"
_DEVICES = ("NV", "CUDA", "AMD", "METAL", "CL", "CPU")
_PROBE = f"""
import json
import numpy as np
import worker.engine.tinygrad_shim as tg
from tinygrad import Device
found = []
for name in {_DEVICES!r}:
    try:
        found.append(Device[name].device)
    except Exception:
        pass
used = tg.device_name()
said = tg.read(tg.upload(np.arange(8, dtype=np.float32)), 8).sum()
print(json.dumps({{"devices": found, "used": used, "sum": float(said)}}))
"""


def python() -> Finding:
    """Version, platform, and that every package we need is there in a version that we know."""
    version = platform.python_version()
    where = f"Python {version} in {sys.prefix}, {platform.system()} {platform.machine()}"
    if not PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]:
        return fail(where, "use Python 3.11, 3.12 or 3.13")
    if platform.system() != "Linux" or sys.maxsize < 2**32:
        return fail(where, "use a 64-bit Linux")
    missing = missing_packages(metadata.requires(DISTRIBUTION) or [])
    if missing:
        return fail(f"{where}; missing: {', '.join(missing)}", INSTALL)
    return ok(where)


def missing_packages(required: Sequence[str]) -> list[str]:
    """Names of required distributions (PEP 508 texts) that are not installed. Groups and extras do not count."""
    missing = []
    for text in required:
        name = re.split(r"[^A-Za-z0-9._-]", text.strip(), maxsplit=1)[0]
        if name and "extra ==" not in text:
            try:
                metadata.version(name)
            except metadata.PackageNotFoundError:
                missing.append(name)
    return missing


def device() -> Finding:
    """What tinygrad can open, and that the device in use computes. In a process of its own: a driver may crash it."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return fail(f"tinygrad did not answer within {PROBE_LIMIT_S:g} s", "unset DEV, or set DEV=CPU")
    except (OSError, ValueError, IndexError) as error:
        return fail(f"tinygrad cannot be asked: {error}", INSTALL)
    wanted = os.environ.get("DEV", "")
    if found is None:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        way = f"DEV={wanted} does not work here: unset it, or repair its driver" if wanted else INSTALL
        return fail(f"tinygrad cannot compute: {last}", way)
    says = f"tinygrad on {found['used']}; it can open {', '.join(found['devices']) or 'nothing'}"
    if found["sum"] != 28.0:
        return fail(f"{says}, but {found['used']} computes wrongly", "set DEV=CPU")
    others = [name for name in found["devices"] if name.split(":")[0] != "CPU"]
    if others and found["used"].split(":")[0] == "CPU":
        return warn(f"{says}, so the GPU is not used", f"set DEV={others[0]} in the environment to use it")
    return ok(says)


def kernels() -> Finding:
    """The C kernels for this processor: shipped, cached, or compiled here as the first start would."""
    wanted = os.environ.get(CHOICE, "")
    names = chosen()
    if not names:
        if wanted:
            return warn(f"{CHOICE}={wanted} turns the fast kernels off", f"unset {CHOICE}")
        return warn(
            f"there are none for {machine()}; the portable ones are used, which is slower",
            "nothing: no other kernels exist for this processor",
        )
    best = names[0]
    says = f"{best} (this processor can run {', '.join(instruction_sets())})"
    if (found := present_object(best)) is not None:
        return ok(f"{says}, {found[1]}")
    try:
        with tempfile.TemporaryDirectory(prefix="smq-doctor-") as folder:
            compile_object(best, Path(folder) / "step.o")
    except CompileError as error:
        return warn(f"{error}; the portable backend is used, which is slower", GET_COMPILER)
    return ok(f"{says}, compiled at the first start (it was tried)")


def compiler() -> Finding:
    """Who compiles: the C kernels at a first start, and tinygrad's own kernels for a CPU."""
    found = compilers()
    if not found:
        return warn("neither clang, gcc nor the package ziglang is there", GET_COMPILER)
    program = found[0]
    command = [program, "version"] if Path(program).name == "zig" else [program, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=8, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return warn(f"{program} cannot be run: {error}", GET_COMPILER)
    if done.returncode:
        return warn(f"{program} ends with status {done.returncode}", GET_COMPILER)
    return ok(f"{program}: {(done.stdout.splitlines() or [''])[0][:80]}")


def ssh(*, needed: bool, identity: Path | None) -> Finding:
    """The ssh client and the identity for rented machines."""
    if not needed:
        return skip("only rented machines (vastai) need it")
    missing = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None]
    if missing:
        return fail(f"{' and '.join(missing)} not on the PATH", "install it (Debian: apt-get install openssh-client)")
    if identity is None:
        return skip("no identity is configured")
    try:
        mode = identity.stat().st_mode
        identity.open("rb").close()
    except OSError as error:
        way = f"make one with `ssh-keygen -t ed25519 -N '' -f {identity}` or set [vastai] ssh_identity"
        return fail(f"the identity {identity}: {error.strerror}", way)
    if mode & 0o077:
        return fail(f"the identity {identity} can be read by others, so ssh refuses it", f"chmod 600 {identity}")
    asked = ["ssh-keygen", "-y", "-P", "", "-f", str(identity)]
    try:
        done = subprocess.run(asked, capture_output=True, timeout=8, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return fail(f"ssh-keygen cannot be run: {error}", "repair the ssh installation")
    if done.returncode:
        return fail(
            f"the identity {identity} has a passphrase or is no private key",
            "set [vastai] ssh_identity to a key without one",
        )
    return ok(f"ssh, and the identity {identity}")
