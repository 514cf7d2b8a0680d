"""The dashboard's HTTP: one page, its state as JSON, and server-sent events (S1 7.15, 8.11).

GET /                       the page; /app.js and /style.css beside it, nothing from anywhere else
GET /api/state?run=N        every section of a run (default: the last)
GET /api/logs?run=&source=&search=&after=&limit=
                            log lines of one source
GET /events?run=N           `state` events: sections that changed, at most four times a second
GET /healthz                200 while this process lives
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from services.datastream_collector.web.run_view import LOG_LINES_MAX, SECTIONS, RunView
from services.datastream_collector.web.store import Store

TICK_S = 0.25
SLOW_SECTIONS_S = 1.0  # what changes with every frame
SLOW_SECTIONS = frozenset({"streams", "log_sources", "workers"})
KEEP_ALIVE_S = 15.0  # proxies cut silent connections
STATIC = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
}

_encode = msgspec.json.Encoder().encode


def json_response(value: Any, status: int = 200) -> Response:
    """Never cached: it is old in a moment."""
    return Response(_encode(value), status, {"cache-control": "no-store"}, "application/json")


class Dashboard:
    """The routes over a store."""

    def __init__(self, store: Store, stopping: asyncio.Event) -> None:
        self._store, self._stopping = store, stopping
        static = files("services.datastream_collector.web") / "static"
        self._static = {path: ((static / name).read_bytes(), kind) for path, (name, kind) in STATIC.items()}
        self.app = Starlette(
            routes=[
                *(Route(path, self._file) for path in STATIC),
                Route("/favicon.ico", self._no_icon),
                Route("/api/state", self._state),
                Route("/api/logs", self._logs),
                Route("/events", self._events),
                Route("/healthz", self._health),
            ]
        )

    async def _file(self, request: Request) -> Response:
        body, kind = self._static[request.url.path]
        return Response(body, headers={"cache-control": "no-cache"}, media_type=f"{kind}; charset=utf-8")

    async def _no_icon(self, request: Request) -> Response:
        return Response(status_code=204)

    async def _health(self, request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def _state(self, request: Request) -> Response:
        view = self._store.view(_number(request, "run"))
        sections = {} if view is None else {name: view.section(name) for name in SECTIONS}
        return json_response({"source": self._store.source, "runs": self._store.listed(), **sections})

    async def _logs(self, request: Request) -> Response:
        view = self._store.view(_number(request, "run"))
        tail = view.logs.get(request.query_params.get("source", "")) if view else None
        if tail is None:
            return json_response({"lines": [], "total": 0})
        limit = min(LOG_LINES_MAX, _number(request, "limit") or 500)
        after = _number(request, "after")
        found = tail.lines(
            search=request.query_params.get("search", "")[:200], after=-1 if after is None else after, limit=limit
        )
        return json_response({"lines": found, "total": tail.total})

    async def _events(self, request: Request) -> Response:
        return StreamingResponse(
            self._changes(_number(request, "run")),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _changes(self, run: int | None) -> AsyncIterator[bytes]:
        """Sections as they change. A reader that is slow gets fewer and newer ones; nothing is queued for it."""
        told: dict[str, int] = {}
        number, seen, slow_at, quiet = 0, -1, 0.0, 0.0
        loop = asyncio.get_running_loop()
        yield b"retry: 1000\n\n"
        while not self._stopping.is_set():
            if seen == self._store.version:
                await self._store.changed(TICK_S)
            now = loop.time()
            if seen == self._store.version:
                if now - quiet > KEEP_ALIVE_S:
                    quiet = now
                    yield b": alive\n\n"
                continue
            view = self._store.view(run)
            if view is not None and view.number != number:
                number, told = view.number, {}
            slow = now - slow_at >= SLOW_SECTIONS_S
            behind = self._store.version
            changes = _changed(view, told, slow)
            if slow:
                slow_at, seen = now, behind
            quiet = now
            changes["source"], changes["runs"] = self._store.source, self._store.listed()
            yield b"event: state\ndata: " + _encode(changes) + b"\n\n"
            await asyncio.sleep(TICK_S)


def _changed(view: RunView | None, told: dict[str, int], slow: bool) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name in SECTIONS if view else ():
        assert view is not None
        if told.get(name) != view.versions[name] and (slow or name not in told or name not in SLOW_SECTIONS):
            told[name] = view.versions[name]
            changes[name] = view.section(name)
    return changes


def _number(request: Request, key: str) -> int | None:
    """A query parameter as a number; anything else counts as absent."""
    text = request.query_params.get(key, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None
