"""A prompt each second, by people who sometimes hang up: what became of each."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PERIOD_S = 1.0
PROMPTS = ("Name three primary colors.", "What is the sea?", "Count to five.", "Who are you?")
TOKENS = (2, 4, 8)
HANG_UP_SHARE = 0.05  # clients that leave in the middle of their answer
HANG_UP_TOKENS = 64
END_LIMIT_S = 180.0  # a prompt may wait behind others while a worker is away; longer is a request without an end
AFTER_S = 0.3  # how long a second terminal is waited for


@dataclass(slots=True)
class Tally:
    """How the requests ended. closed: the connection ended without a terminal; refused: there was none; unended: no
    terminal although the connection stood; doubled: several."""

    done: int = 0
    fault: int = 0
    hung_up: int = 0
    closed: int = 0
    refused: int = 0
    unended: int = 0
    doubled: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        counts = {name: getattr(self, name) for name in self.__slots__}
        return {**counts, "faults": dict(self.faults)}


class Prompter:
    """Asks once a second wherever `addr` says; `addr` may say "" while there is no run."""

    def __init__(self, addr: Callable[[], str], seed: int) -> None:
        self.tally = Tally()
        self._addr = addr
        self._rng = random.Random(seed)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._asking: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask no more; wait for what is under way."""
        self._over.set()
        self._thread.join()
        for thread in self._asking:
            thread.join(END_LIMIT_S + AFTER_S)

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            self._asking = [thread for thread in self._asking if thread.is_alive()]
            prompt, tokens = self._rng.choice(PROMPTS), self._rng.choice(TOKENS)
            hang_up = self._rng.random() < HANG_UP_SHARE
            thread = threading.Thread(target=self._one, args=(prompt, tokens, hang_up), daemon=True)
            thread.start()
            self._asking.append(thread)

    def _one(self, prompt: str, tokens: int, hang_up: bool) -> None:
        if addr := self._addr():
            what, error = ask(addr, prompt, HANG_UP_TOKENS if hang_up else tokens, hang_up)
            with self._lock:
                setattr(self.tally, what, getattr(self.tally, what) + 1)
                if error:
                    self.tally.faults[error] += 1


def ask(addr: str, prompt: str, tokens: int, hang_up: bool) -> tuple[str, str]:
    """(a field of Tally, the fault's sentence)."""
    host, _, port = addr.rpartition(":")
    until = time.monotonic() + END_LIMIT_S
    ended: list[dict[str, str]] = []
    try:
        sock = socket.create_connection((host, int(port)), timeout=END_LIMIT_S)
    except OSError:
        return "refused", ""
    with sock, sock.makefile("rb") as lines:
        try:
            sock.sendall(json.dumps({"request_id": 1, "prompt_text": prompt, "max_tokens": tokens}).encode() + b"\n")
            while not ended:
                sock.settimeout(max(0.1, until - time.monotonic()))
                if not (line := lines.readline()):
                    return "closed", ""
                if hang_up:
                    return "hung_up", ""
                ended += _terminal(line)
        except TimeoutError:
            return "unended", ""
        except OSError:
            return "closed", ""
        with contextlib.suppress(OSError):
            sock.settimeout(AFTER_S)
            while line := lines.readline():
                ended += _terminal(line)
    return ("doubled", "") if len(ended) > 1 else (ended[0]["type"], ended[0].get("error", ""))


def _terminal(line: bytes) -> list[dict[str, str]]:
    event = json.loads(line)
    return [event] if event["type"] in ("done", "fault") else []
