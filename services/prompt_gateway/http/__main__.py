"""`python -m services.prompt_gateway.http`: OpenAI's API over a running prompt RPC.

The listening socket comes from the launcher (--http-fd) or is bound here (--http); the RPC's address from the file that
the gateway writes into its run directory (--rpc-file) or from --connect.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from common.web import Guard, serve
from common.web_socket import PUBLISHED_HELP, WebError, is_loopback, listen, read_token, where
from services.prompt_gateway.http.app import Front
from services.prompt_gateway.http.rpc import PromptRpc
from services.prompt_gateway.http.shapes import error_body, error_kind

PROGRAM = "python -m services.prompt_gateway.http"
OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz"})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="OpenAI's API over a prompt RPC.")
    rpc = parser.add_mutually_exclusive_group(required=True)
    rpc.add_argument("--connect", metavar="HOST:PORT", help="the prompt RPC")
    rpc.add_argument("--rpc-file", type=Path, metavar="FILE", help="the file that says where the prompt RPC is")
    listener = parser.add_mutually_exclusive_group(required=True)
    listener.add_argument("--http", metavar="IP:PORT", help="where to listen")
    listener.add_argument("--http-fd", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="default", metavar="ID", help="the id under which the model is offered")
    parser.add_argument("--token-file", default="", metavar="FILE", help="bearer token, needed beyond loopback")
    parser.add_argument("--published-on-loopback", action="store_true", help=PUBLISHED_HELP)
    parser.add_argument("--owner-fd", type=int, metavar="N", help=argparse.SUPPRESS)
    return parser


def _refusal(status: int, sentence: str) -> tuple[bytes, bytes]:
    code = "invalid_api_key" if status == 401 else ""
    return b"application/json", error_body(sentence, kind=error_kind(status), code=code)


def _address(args: argparse.Namespace) -> Callable[[], str]:
    def read() -> str:
        try:
            return str(args.rpc_file.read_text(encoding="ascii").strip())
        except (OSError, UnicodeError):
            return ""

    return (lambda: str(args.connect)) if args.connect else read


async def _run(args: argparse.Namespace, sock: socket.socket, token: str) -> None:
    front = Front(PromptRpc(_address(args)), args.model)
    loopback = args.published_on_loopback or is_loopback(sock)
    guard = Guard(front.app, token=token, loopback=loopback, refusal=_refusal, open_paths=OPEN_PATHS)
    await serve([(guard, sock)], asyncio.Event(), args.owner_fd)


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop. 1 with one sentence when it cannot start."""
    args = _parser().parse_args(argv)
    try:
        token = read_token(args.token_file)
        if args.http_fd is not None:
            sock = socket.socket(fileno=args.http_fd)
        else:
            sock = listen(args.http, token=bool(token) or args.published_on_loopback, what="the HTTP front")
    except WebError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    print(f"http: http://{where(sock)}/v1", flush=True)
    asyncio.run(_run(args, sock, token))
    return 0


if __name__ == "__main__":
    sys.exit(main())
