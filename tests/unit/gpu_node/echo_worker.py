"""A stand-in for the worker of S2 6.4 that misbehaves when a prompt says so (rust-swactor.md 10.3).

ECHO_READY_S delays its readiness, ECHO_READY_FILE until that file is there. It echoes no ids, as a worker of the
original would not.
"""

from __future__ import annotations

import json
import os
import sys
import time


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    time.sleep(float(os.environ.get("ECHO_READY_S", "0")))
    while (file := os.environ.get("ECHO_READY_FILE")) and not os.path.exists(file):
        time.sleep(0.05)
    if os.environ.get("ECHO_FAIL"):
        print("cannot load the model", file=sys.stderr)
        sys.exit(3)
    print("loading, this line is no JSON", flush=True)
    say({"status": "ready", "pid": os.getpid()})
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = asked["prompt"]
        if prompt == "__crash__":
            print("about to crash", file=sys.stderr, flush=True)
            os._exit(7)
        elif prompt == "__error__":
            say({"error": "generation failed: as asked"})
        elif prompt == "__hang__":
            time.sleep(600)
        elif prompt == "__noise__":
            print("not json\n[1, 2]\n\x1b[31mred\n", flush=True)
            say({"response": "after noise"})
        elif prompt == "__pieces__":
            for piece in json.dumps({"response": "in pieces, ä"}, ensure_ascii=False).encode():
                os.write(1, bytes([piece]))
                time.sleep(0.001)
            os.write(1, b"\n")
        else:
            say({"response": f"{prompt} {asked['max_tokens']} {asked['temperature']}"})


if __name__ == "__main__":
    main()
