"""`single-gpu-inference`: one prompt to one GPU, the answer to stdout (S2).

`--seed HEX` asks a gpu-node that runs already (S2 8). Without it a GPU is rented on vast.ai, asked once, given back.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import secrets
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from common.messages.inference import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_TEMPERATURE,
    PROMPT_BYTES_MAX,
    PROMPT_CHARS_MAX,
    InferenceRequest,
)
from worker.gpu_node.limits import ANSWER_LIMIT_MS

PROGRAM = "single-gpu-inference"
CONFIG_KEYS: dict[str, type] = {
    "gpu": str,
    "max_dph": float,
    "image": str,
    "model": str,
    "disk_gb": int,
    "ssh_identity": str,
    "max_tokens": int,
    "temperature": float,
    "limit_s": int,
}
CONFIG_WORDS = {str: "a text", int: "a whole number", float: "a number"}


class UsageError(Exception):
    """One sentence: what was asked for and cannot be."""


class _Parser(argparse.ArgumentParser):
    """Usage errors are one sentence and status 1, as all errors of this program."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{PROGRAM}: {message}; try {PROGRAM} --help\n")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog=PROGRAM,
        description="Ask one prompt of one GPU: a gpu-node that runs already (--seed), or one rented for this answer.",
        epilog="examples:\n"
        "  gpu-node --model model.gguf        prints GPU_NODE_ADDR HEX 127.0.0.1:PORT; then, with this HEX:\n"
        f"  {PROGRAM} --seed HEX --prompt 'Name three primary colors.'\n"
        f"  {PROGRAM} --config config/single-gpu.toml --image IMAGE --prompt 'Hello'   on a rented GPU; asks first",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the prompt; - reads it from standard input")
    parser.add_argument("--seed", metavar="HEX[@HOST:PORT]", help="the gpu-node to ask, from its GPU_NODE_ADDR line")
    parser.add_argument("--key", type=Path, metavar="FILE", help="with --seed: a client key, or the node's state file")
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="0: no cap")
    parser.add_argument("--temperature", type=float, default=DEFAULT_TEMPERATURE, metavar="T", help="0: greedy")
    parser.add_argument("--limit-s", type=int, default=ANSWER_LIMIT_MS // 1000, metavar="S", help="the longest wait")
    rent = parser.add_argument_group("renting", "without --seed; the API key is read from the variable VASTAI_API_KEY")
    rent.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with these options; see config/")
    rent.add_argument("--gpu", default="", metavar="NAME", help="only this GPU, as RTX_4090")
    rent.add_argument("--max-dph", type=float, default=0.5, metavar="USD", help="the most that it may cost an hour")
    rent.add_argument("--image", default="", metavar="IMAGE", help="a registry's image with gpu-node; required")
    rent.add_argument("--model", default="", metavar="MODEL", help="a file in the image, or hf://OWNER/REPOSITORY/FILE")
    rent.add_argument("--disk-gb", type=int, default=20, metavar="GB", help="image and model have to fit")
    rent.add_argument("--ssh-identity", type=Path, metavar="FILE", help="a private key that the account knows")
    rent.add_argument("--yes", action="store_true", help="agree to the price without being asked")
    config, _ = parser.parse_known_args(argv)
    if config.config is not None:
        parser.set_defaults(**read_config(config.config, parser))
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.limit_s <= 24 * 3600:
        parser.error("--limit-s must be between 1 and 86400")
    if not (math.isfinite(arguments.max_dph) and 0 < arguments.max_dph <= 128) or not 8 <= arguments.disk_gb <= 10_000:
        parser.error("--max-dph must be above 0 and at most 128, --disk-gb between 8 and 10000")
    if not 0 <= arguments.max_tokens <= 0xFFFF_FFFF:
        parser.error("--max-tokens must not be negative")
    if not (math.isfinite(arguments.temperature) and 0 <= arguments.temperature <= 100):
        parser.error("--temperature must be between 0 and 100")
    if arguments.key is not None and arguments.seed is None:
        parser.error("--key goes with --seed")
    if arguments.prompt == "-":
        arguments.prompt = sys.stdin.read()
    arguments.prompt = arguments.prompt.encode("utf-8", "replace").decode()
    size = len(arguments.prompt.encode())
    if not arguments.prompt.strip() or len(arguments.prompt) > PROMPT_CHARS_MAX or size > PROMPT_BYTES_MAX:
        parser.error(f"the prompt must have 1 to {PROMPT_CHARS_MAX} characters, at most {PROMPT_BYTES_MAX} bytes")
    return arguments


def read_config(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The table [single_gpu_inference]: what the command line does not say. Unknown keys and wrong types are errors."""
    try:
        table = tomllib.loads(path.read_text()).get("single_gpu_inference", {})
    except OSError as error:
        parser.error(f"{path}: {error.strerror}")
    except ValueError as error:
        parser.error(f"{path} is no TOML: {error}")
    found: dict[str, Any] = {}
    for key, value in table.items():
        kind = CONFIG_KEYS.get(key)
        if kind is None:
            parser.error(f"{path}: there is no key {key!r}; the keys are {', '.join(CONFIG_KEYS)}")
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            parser.error(f"{path}: {key} must be {CONFIG_WORDS[kind]}")
        found[key] = Path(str(value)) if key == "ssh_identity" else kind(value)
    return found


def parse_seed(text: str) -> tuple[str, str, int]:
    """(hex, host, port) of HEX or HEX@HOST:PORT; host is empty for the former. Raises UsageError."""
    key, at, address = text.strip().lower().partition("@")
    host, _, port = address.rpartition(":")
    try:
        if len(bytes.fromhex(key)) != 32 or len(key) != 64:
            raise ValueError
        if at and (not host or not 0 < int(port) <= 65532):
            raise ValueError
    except ValueError:
        raise UsageError(f"--seed {text!r} is not HEX or HEX@HOST:PORT of a GPU_NODE_ADDR line") from None
    return key, host, int(port) if at else 0


def note(text: str) -> None:
    """Progress, for people; the terminal may be gone."""
    with contextlib.suppress(OSError):
        print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


def ask_local(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Localhost mode: dial the node, ask, print. The exit status; raises UsageError, StateError, Interrupted."""
    from tools.single_gpu_inference_call import LOCAL_LIMITS, Call, Outcome
    from tools.single_gpu_inference_client import converse, reply_inbox
    from worker.gpu_node.ends import dial_end, plane_endpoints
    from worker.gpu_node.limits import CLIENT_LEAVE_MS
    from worker.gpu_node.state_file import Door, find, read_key, state_folder

    key, host, port = parse_seed(arguments.seed)
    if arguments.key is None:
        door = find(state_folder(environ), key)
        host, port = host or door.host, port or door.port
    elif host:
        door = Door(bytes.fromhex(key), host, port, read_key(arguments.key))
    else:
        raise UsageError("--key needs the address too: --seed HEX@HOST:PORT")
    end = dial_end(
        reply_inbox(),
        broker_key=door.node,
        endpoints=plane_endpoints(host, port),
        keys=door.keys,
        logical_id=f"client {os.getpid()}",
    )
    try:
        limits = dataclasses.replace(LOCAL_LIMITS, answer_ms=arguments.limit_s * 1000)
        call = Call(door.node, make_request(arguments, end.inbox_addr), limits, end.now_ms)
        result = converse(end, door.node, call, note)
        if result.outcome is Outcome.ANSWERED:
            print(result.text, flush=True)
            return 0
        note(result.text)
        return 1
    finally:
        end.close(CLIENT_LEAVE_MS)


def make_request(arguments: argparse.Namespace, reply_to: bytes) -> InferenceRequest:
    """The request. Its id is unguessable, so that nobody else's message passes for its reply."""
    return InferenceRequest(
        request_id=secrets.randbits(63),
        prompt=arguments.prompt,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        reply_to=reply_to,
    )


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 with an answer, 1 without."""
    arguments = _arguments(argv)
    # Here, so that --help and usage errors need no ZeroMQ.
    from tools.single_gpu_inference_client import Interrupted
    from tools.single_gpu_inference_rent import RentError
    from worker.gpu_node.ends import EndError
    from worker.gpu_node.state_file import StateError

    try:
        if arguments.seed is not None:
            return ask_local(arguments, os.environ)
        from tools.single_gpu_inference_vastai import rent_and_ask

        return rent_and_ask(arguments, lambda inbox: make_request(arguments, inbox), os.environ, note)
    except (UsageError, StateError, EndError, RentError) as error:
        note(str(error))
    except Interrupted as error:
        note(f"{error}; no answer")
    return 1


if __name__ == "__main__":
    sys.exit(main())
