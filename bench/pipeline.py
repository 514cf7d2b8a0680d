"""One model over several workers: what the pipeline costs on one host, one thread per worker (issue 4).

Each number of stages is one whole run of mvp-orchestrator with process workers and the real model. Greedy text must be
that of one stage for every prompt. Decode is tokens a second between the first and the last token of an answer. Delays
between network namespaces are not measured here: they need privileges that a test machine may not give.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.prompt_gateway.wire import DoneLine
from tests.e2e.stack import Stack, model_file
from tools.fetch_model import fetch_default
from tools.prompt_client import PromptClient

ROUNDS = 3
STAGES = "1,2,4"
DECODE_TOKENS = 96
LONG_WORD = "lighthouse "
PREFILL_TOKENS = 512
STORY = "Write a long story about a lighthouse keeper and the sea."
PROMPTS = (
    "What is the capital of France?",
    "Count from one to twenty.",
    "Name three primary colors.",
    "Write one sentence about 海.",
    "a",
    LONG_WORD * 300,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--stages", default=STAGES, help="numbers of stages to measure (%(default)s)")


@contextmanager
def running(stages: int) -> Iterator[Stack]:
    """A stack that is ready for prompts; one stage is direct mode."""
    with Stack(args=("--pipeline-stages", str(stages)), environ={"OMP_NUM_THREADS": "1"}) as stack:
        stack.addr()
        yield stack


def ask(client: PromptClient, prompt: str, count: int) -> tuple[DoneLine, list[float]]:
    """The end of a prompt and when its texts came, seconds from its start."""
    started, times = time.monotonic(), []
    done = None
    for event in client.submit(prompt, max_tokens=count):
        times.append(time.monotonic() - started)
        if isinstance(event, DoneLine):
            done = event
    assert done is not None
    return done, times


def measure(stages: int, rounds: int) -> dict[str, object]:
    """Of one number of stages: answers, decode and prefill speed."""
    with running(stages) as stack, stack.client() as client:
        answers = [(done.final_text, done.tokens_generated) for done, _ in (ask(client, p, 24) for p in PROMPTS)]
        decode, first = [], []
        long = LONG_WORD * (PREFILL_TOKENS - 40)
        for _ in range(rounds):
            done, times = ask(client, STORY, DECODE_TOKENS)
            decode.append((done.tokens_generated - 1) / (times[-1] - times[0]))
            done, times = ask(client, long, 1)
            first.append(done.prompt_tokens / times[0])
        stack.say("stop\n")
        stack.assert_stopped("stdin")
    return {"answers": answers, "decode": decode, "prefill": first}


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """The bench."""
    fetch_default(model_file().parent)
    counts = [int(word) for word in arguments.stages.split(",")]
    found = {count: measure(count, arguments.rounds) for count in counts}
    figures: dict[str, object] = {
        "cores": os.cpu_count(),
        "model": "SmolLM2-135M-Instruct.Q4_1",
        "threads_per_worker": 1,
    }
    for count, of in found.items():
        for name in ("decode", "prefill"):
            samples = [float(value) for value in of[name]]  # type: ignore[attr-defined]
            figures[f"stages_{count}_{name}_tok_s"] = round(statistics.median(samples), 1)
            figures[f"stages_{count}_{name}_tok_s_all"] = [round(value, 1) for value in samples]
    base = counts[0]
    for count in counts[1:]:
        for name in ("decode", "prefill"):
            one, many = figures[f"stages_{base}_{name}_tok_s"], figures[f"stages_{count}_{name}_tok_s"]
            figures[f"stages_{count}_{name}_ratio"] = round(float(many) / float(one), 3)  # type: ignore[arg-type]
        figures[f"stages_{count}_text_identical"] = found[count]["answers"] == found[base]["answers"]
    for name in ("delay_5ms_ratio", "delay_25ms_ratio", "delay_50ms_ratio"):
        figures[name] = None
        figures[f"{name}_why"] = "network namespaces with a delay are not set up by this bench"
    return figures
