"""A prompt to a run, timed."""

from __future__ import annotations

import time

from services.prompt_gateway.wire import DoneLine
from tools.prompt_client import PromptClient

STORY = "Write a long story about a lighthouse keeper and the sea."


def ask(client: PromptClient, prompt: str, count: int) -> tuple[DoneLine, float, float]:
    """The end of a prompt, seconds to its first text, seconds a token between the first and the last."""
    started, times = time.monotonic(), []
    done = None
    for event in client.submit(prompt, max_tokens=count):
        times.append(time.monotonic() - started)
        done = event if isinstance(event, DoneLine) else done
    assert done is not None
    return done, times[0], (times[-1] - times[0]) / max(1, done.tokens_generated - 1)
