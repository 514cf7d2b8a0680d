"""The engine without anything around it, in a process of its own: `python -m bench._bare MODEL`.

A line of JSON {"prompt", "max_tokens"} in, a line of JSON {"token_s"} out: seconds a token between the first and the
last token of the answer. Its threads are OMP_NUM_THREADS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


class BareEngine:
    """The other end of the pipe. Use as a context manager."""

    def __init__(self, model: Path, threads: int) -> None:
        command = [sys.executable, "-P", "-m", "bench._bare", str(model)]
        environ = os.environ | {"OMP_NUM_THREADS": str(threads)}
        root = Path(__file__).resolve().parents[1]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ, cwd=root)

    def __enter__(self) -> BareEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=30)

    def token_s(self, prompt: str, tokens: int) -> float:
        """Seconds a token."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "max_tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline())["token_s"])


def main(model: Path) -> None:
    """Serve until stdin ends."""
    from worker.engine.engine import Engine
    from worker.engine.generate import Finished

    engine = Engine.load(model, max_context=4096, threads=int(os.environ["OMP_NUM_THREADS"]))
    engine.warm_up()
    for line in sys.stdin:
        asked = json.loads(line)
        first, count = 0.0, 0
        for event in engine.generate(engine.prompt_ids(asked["prompt"]), max_tokens=asked["max_tokens"]).events():
            first = first or time.monotonic()
            if isinstance(event, Finished):
                count = event.tokens_generated
        print(json.dumps({"token_s": (time.monotonic() - first) / (count - 1)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
