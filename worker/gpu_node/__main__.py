"""`gpu-node`: the remote end of single-gpu-inference (S2 5, 8). Runs the worker and answers whoever was let in.

With SEED_ADDR and SEED_RELAY in the environment it dials the client that rented it; without, it listens here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from worker.gpu_node.events import ProcessSpec

PROGRAM = "gpu-node"
DEFAULT_KEY_FILE = "/run/smq/node.key"


class _Parser(argparse.ArgumentParser):
    """Usage errors are one sentence and status 1, as all errors of this program."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{PROGRAM}: {message}; try {PROGRAM} --help\n")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog=PROGRAM,
        description="One GPU, one model: answers the prompts of single-gpu-inference.",
        epilog="example: gpu-node --model model.gguf, then single-gpu-inference --seed HEX --prompt 'Hello' with the "
        "HEX of the GPU_NODE_ADDR line. Environment: GPU_NODE_MODEL (as --model), WORKER_SCRIPT, WORKER_CMD (another "
        "worker program and its interpreter), SEED_ADDR, SEED_RELAY, NODE_KEY_FILE (set for rented nodes).",
    )
    parser.add_argument("--model", metavar="MODEL", help="a GGUF file, or hf://OWNER/REPOSITORY/FILE.gguf")
    parser.add_argument("--max-context", type=int, metavar="N", help="tokens of prompt and answer together")
    parser.add_argument("--device", metavar="NAME", help="tinygrad's device: CUDA, AMD, CPU, ...; else its own choice")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="listen on 127.0.0.1, ports N to N+3")
    parser.add_argument("--stub", action="store_true", help="a worker without a model, for trying out the rest")
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.port <= 65532:
        parser.error("--port must be between 1 and 65532")
    return arguments


def worker_spec(arguments: argparse.Namespace, environ: Mapping[str, str]) -> ProcessSpec:
    """The worker's command line (S2 5). Raises GpuNodeError."""
    from tools.fetch_model import default_model_path
    from worker.gpu_node.service import GpuNodeError

    device = arguments.device or environ.get("DEV") or ("CUDA" if environ.get("CUDA") == "1" else "")
    extra = {"DEV": device} if device else {}
    if script := environ.get("WORKER_SCRIPT"):
        return ProcessSpec((environ.get("WORKER_CMD") or sys.executable, script), extra)
    command = [sys.executable, "-P", "-m", "worker.engine", "--ndjson"]
    if arguments.stub:
        return ProcessSpec((*command, "--stub"), extra)
    model = arguments.model or environ.get("GPU_NODE_MODEL") or ""
    if not model:
        if not default_model_path().exists():
            raise GpuNodeError("no model: say --model FILE (./dev fetch-model gets a small one)")
        model = str(default_model_path())
    context = ("--max-context", str(arguments.max_context)) if arguments.max_context is not None else ()
    return ProcessSpec((*command, "--model", model, *context), extra)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 after a stop, 1 if the worker never came up or nothing could be started."""
    arguments = _arguments(argv)
    # Here, so that --help needs no ZeroMQ.
    from worker.gpu_node.service import GpuNodeError, run_local, run_rented, seed_of

    try:
        spec = worker_spec(arguments, os.environ)
        seed = seed_of(os.environ)
        if seed is None:
            return run_local(spec, os.environ, arguments.port)
        return run_rented(spec, seed, Path(os.environ.get("NODE_KEY_FILE") or DEFAULT_KEY_FILE), os.environ)
    except GpuNodeError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
