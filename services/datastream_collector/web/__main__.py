"""`python -m services.datastream_collector.web`: dashboard and metrics of a live run or of an archive file.

Listening sockets come from the launcher (--dashboard-fd, --metrics-fd) or are bound here (--dashboard, --metrics).
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from pathlib import Path

from common.web import App, Guard, serve
from common.web_socket import PUBLISHED_HELP, WebError, is_loopback, listen, read_token, where
from services.datastream_collector.subscribe import SOCKET_NAME
from services.datastream_collector.web.app import Dashboard
from services.datastream_collector.web.feed import follow_live, read_archive
from services.datastream_collector.web.metrics import Metrics, metrics_app
from services.datastream_collector.web.store import Store

PROGRAM = "python -m services.datastream_collector.web"
OPEN_PATHS = frozenset({"/healthz"})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="The dashboard and the metrics of a run.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run-dir", type=Path, metavar="DIR", help="the run directory of a live run (its stream.sock)")
    source.add_argument("--archive", type=Path, metavar="FILE", help="a frame archive, of a finished run or a live one")
    for name in ("dashboard", "metrics"):
        parser.add_argument(f"--{name}", default="", metavar="IP:PORT", help=f"where the {name} listens")
        parser.add_argument(f"--{name}-fd", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--token-file", default="", metavar="FILE", help="bearer token, needed beyond loopback")
    parser.add_argument("--published-on-loopback", action="store_true", help=PUBLISHED_HELP)
    parser.add_argument("--owner-fd", type=int, metavar="N", help=argparse.SUPPRESS)
    return parser


def _socket(fd: int | None, addr: str, guarded: bool, what: str) -> socket.socket | None:
    if fd is not None:
        return socket.socket(fileno=fd)
    return listen(addr, token=guarded, what=what) if addr else None


async def _run(args: argparse.Namespace, token: str, page: socket.socket | None, numbers: socket.socket | None) -> None:
    stopping = asyncio.Event()
    metrics = Metrics()
    store = Store((metrics.add,))
    metrics.watch(store)
    apps: list[tuple[App, socket.socket]] = []
    for sock, app in ((page, Dashboard(store, stopping).app), (numbers, metrics_app(metrics))):
        if sock is not None:
            loopback = args.published_on_loopback or is_loopback(sock)
            guard = Guard(app, token=token, loopback=loopback, open_paths=OPEN_PATHS)
            apps.append((guard, sock))
    if args.archive is not None:
        feed = asyncio.create_task(read_archive(args.archive, store))
    else:
        feed = asyncio.create_task(follow_live(args.run_dir / SOCKET_NAME, store))
    try:
        await serve(apps, stopping, args.owner_fd)
    finally:
        feed.cancel()


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop. 1 with one sentence when it cannot start."""
    args = _parser().parse_args(argv)
    try:
        token = read_token(args.token_file)
        guarded = bool(token) or args.published_on_loopback
        page = _socket(args.dashboard_fd, args.dashboard, guarded, "the dashboard")
        numbers = _socket(args.metrics_fd, args.metrics, guarded, "the metrics")
        if page is None and numbers is None:
            raise WebError("nothing to serve: give --dashboard IP:PORT, --metrics IP:PORT or both")
        if args.archive is not None:
            args.archive.open("rb").close()
    except WebError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{PROGRAM}: cannot read {args.archive}: {error.strerror or error}", file=sys.stderr)
        return 1
    for sock, path, what in ((page, "/", "dashboard"), (numbers, "/metrics", "metrics")):
        if sock is not None:
            print(f"{what}: http://{where(sock)}{path}", flush=True)
    asyncio.run(_run(args, token, page, numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
