"""One model over several workers: what the pipeline costs on one host and over slow links (issue 4).

Runs of mvp-orchestrator with process workers and the real model, one thread a worker, side by side; rounds go through
them in turn, so that each ratio compares neighbours in time. Decode is the time between an answer's first and last
token. Delays are made between network namespaces of this machine (root; bench/_wan.py says how).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from bench import _cut, _wan
from bench._ask import STORY, ask
from bench._bare import BareEngine
from tests.e2e.stack import Stack, StackError, model_file
from tools.fetch_model import fetch_default
from tools.prompt_client import PromptClient, PromptClientError

ROUNDS = 5
CUTS = (2, 3, 7, 30)
DECODE_TOKENS = 96
DECODE_TURNS = 4  # of a round: a single answer of half a second says little on a machine that others share
PREFILL_WORDS = 470  # about 512 tokens
PROMPTS = ("What is the capital of France?", "Count from one to twenty.", "Write one sentence about 海.", "a")
WAN_ROUNDS_MAX = 3
WAN_KEYS = tuple(f"wan_{delay}ms_error" for delay in _wan.DELAYS_MS)
Figures = dict[str, object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--only", choices=("identical", "share", "rpc", "wan"), help="one part (%(default)s: all)")


@contextmanager
def running(threads: int, *args: str, config: str = "") -> Iterator[PromptClient]:
    """A client of a run that is ready; at the end the run is stopped as an operator stops it."""
    with Stack(args=args, config=config, environ={"OMP_NUM_THREADS": str(threads)}) as stack:
        stack.addr()
        with stack.client() as client:
            yield client
        stack.say("stop\n")
        stack.assert_stopped("stdin")


def spread(key: str, ratios: Sequence[float]) -> Figures:
    """A ratio and what it was in the rounds."""
    return {
        key: round(statistics.median(ratios), 4),
        f"{key}_min": round(min(ratios), 4),
        f"{key}_max": round(max(ratios), 4),
    }


# --- the parts ----------------------------------------------------------------------------------------------------
def identical() -> Figures:
    """Ids and text of 20 prompts from 1 to 2,000 tokens for every cut, in one process."""
    asked, expected = _cut.whole(model_file())
    differ = [stages for stages in CUTS if _cut.cut(model_file(), stages, asked) != expected]
    return {
        "identical": not differ,
        "identical_stages": [1, *CUTS],
        "identical_prompt_tokens": list(_cut.LENGTHS),
        "identical_differ": differ,
    }


def share(rounds: int, feedback: str) -> Figures:
    """Decode and prefill of 2 and 4 stages over one."""
    suffix = "_direct" if feedback == "direct" else ""
    decode: dict[int, list[float]] = {1: [], 2: [], 4: []}
    prefill: dict[int, list[float]] = {1: [], 2: []}
    texts: dict[int, list[str]] = {}
    with ExitStack() as stacks:
        clients = {}
        for stages in decode:
            config = f'[pipeline]\nfeedback = "{feedback}"\n' if stages > 1 else ""
            clients[stages] = stacks.enter_context(running(1, "--pipeline-stages", str(stages), config=config))
        for stages, client in clients.items():
            texts[stages] = [ask(client, prompt, 24)[0].final_text for prompt in PROMPTS]
        for number in range(rounds):
            for _ in range(DECODE_TURNS):
                for stages, client in clients.items():
                    decode[stages].append(ask(client, STORY, DECODE_TOKENS)[2])
            for stages in prefill:
                # Its beginning is new each time: one worker would know it again from the last prompt.
                done, first_s, _ = ask(clients[stages], f"{number} " + "lighthouse " * PREFILL_WORDS, 1)
                prefill[stages].append(first_s / done.prompt_tokens)
    figures: Figures = {f"identical_end_to_end{suffix}": texts[1] == texts[2] == texts[4]}
    for stages in (2, 4):
        ratios = [one / many for one, many in zip(decode[1], decode[stages], strict=True)]
        figures |= spread(f"share_{stages}_stages{suffix}", ratios)
    if not suffix:
        ratios = [one / many for one, many in zip(prefill[1], prefill[2], strict=True)]
        figures |= spread("prefill512_2_stages_ratio", ratios)
        figures["prefill512_tokens_per_s"] = {
            str(stages): round(1 / statistics.median(values), 1) for stages, values in prefill.items()
        }
    figures[f"decode_tokens_per_s{suffix}"] = {
        str(stages): round(1 / statistics.median(values), 1) for stages, values in decode.items()
    }
    return figures


def rpc_overhead(rounds: int) -> Figures:
    """Direct mode through the prompt RPC over the bare engine with the same threads."""
    cores = len(os.sched_getaffinity(0))
    figures: Figures = {}
    for key, threads in (("rpc_overhead_share", cores - 1), ("rpc_overhead_share_saturated", cores)):
        if not threads:
            figures |= {key: None, f"{key}_why": "one core leaves no thread for the engine"}
            continue
        with running(threads) as client, BareEngine(model_file(), threads) as bare:
            ask(client, STORY, 8)
            bare.token_s(STORY, 8)
            ratios = []
            for _ in range(rounds * DECODE_TURNS):
                through = ask(client, STORY, 2 * DECODE_TOKENS)[2]
                ratios.append(through / bare.token_s(STORY, 2 * DECODE_TOKENS) - 1)
        figures |= spread(key, ratios)
    return figures


def wan(rounds: int, feedback: str) -> Figures:
    """Two stages and the run, each in a network namespace of its own."""
    keys = [key + ("_direct" if feedback == "direct" else "") for key in WAN_KEYS]
    why = _wan.why_not()
    if not why:
        try:
            return _wan.measure(min(rounds, WAN_ROUNDS_MAX), feedback)
        except (OSError, subprocess.CalledProcessError, StackError, PromptClientError) as error:
            why = f"the run across namespaces failed: {error}"
    return dict.fromkeys(keys) | {f"{key}_why": why for key in keys}


def run(arguments: argparse.Namespace) -> Figures:
    """The bench."""
    fetch_default(model_file().parent)
    only = arguments.only
    figures: Figures = {
        "model": "SmolLM2-135M-Instruct.Q4_1",
        "threads_per_worker": 1,
        "wan_how": "a user-space router holds the packets between network namespaces back (TUN interfaces)",
    }
    if only in (None, "identical"):
        figures |= identical()
    for feedback in ("gateway", "direct"):
        for part, measure in (("share", share), ("wan", wan)):
            if only in (None, part):
                figures |= measure(arguments.rounds, feedback)
    if only in (None, "rpc"):
        figures |= rpc_overhead(arguments.rounds)
    return figures
