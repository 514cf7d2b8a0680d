"""A small Hugging Face hub with one file; it counts what it sends."""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """`owner/repo/model.gguf`, and what is in `others`, at `main` and at COMMIT. A context manager: it serves inside.

    `has_ranges` False sends whole files only; after `breaks_after` ranges each further one is cut in its middle; each
    body waits `pause_s`; with `store`, the URL of another one, files are redirected there, as Hugging Face does.
    `tokens`: the Authorization headers that came.
    """

    daemon_threads = True

    def __init__(self, data: bytes, *, has_ranges: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.data, self.has_ranges = data, has_ranges
        self.others: dict[str, bytes] = {}
        self.tokens: list[str | None] = []
        self.ranges: list[tuple[int, int]] = []
        self.wholes = 0
        self.breaks_after: int | None = None
        self.pause_s = 0.0
        self.store = ""
        self.url = f"http://127.0.0.1:{self.server_port}"

    @staticmethod
    @functools.cache
    def etag(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    def environment(self, home: Path) -> dict[str, str]:
        """For a process that shall fetch from here and keep it under `home`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}

    def __enter__(self) -> Hub:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves in the middle is none of the hub's."""


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, with_body: bool) -> None:
        hub = self.server
        assert isinstance(hub, Hub)
        hub.tokens.append(self.headers.get("Authorization"))
        _, owner, repo, _, revision, *rest = [*self.path.split("/"), *[""] * 5]
        problem = ""
        if (owner, repo) != ("owner", "repo"):
            problem = "RepoNotFound"
        elif revision not in ("main", COMMIT):
            problem = "RevisionNotFound"
        elif rest[0] not in ("model.gguf", *hub.others):
            problem = "EntryNotFound"
        if problem:
            self.send_response(404)
            self.send_header("X-Error-Code", problem)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = hub.others.get(rest[0], hub.data)
        if hub.store:
            self.send_response(302)
            self.send_header("Location", hub.store + self.path)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.send_header("X-Linked-Size", str(len(data)))
            self.send_header("X-Linked-Etag", f'"{hub.etag(data)}"')
            self.end_headers()
            return
        begin, end = 0, len(data)
        is_range = with_body and hub.has_ranges and "Range" in self.headers
        if is_range:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            begin, end = int(first), int(last) + 1
            hub.ranges.append((begin, end))
        self.send_response(206 if is_range else 200)
        if is_range:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.send_header("ETag", f'"{hub.etag(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if with_body:
            time.sleep(hub.pause_s)
            hub.wholes += not is_range
            is_cut = hub.breaks_after is not None and len(hub.ranges) > hub.breaks_after
            self.wfile.write(memoryview(data)[begin : (begin + end) // 2 if is_cut else end])
            self.close_connection = self.close_connection or is_cut

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests read what it counts instead."""
