"""`mvp-chat`: a chat with a model, in a terminal, in a pipe or for one prompt of a script.

It starts an orchestrator of its own and stops it at the end, or connects to a running one (--connect). The model is
told the whole conversation, as `messages`; a failed turn is taken out of it. Without a terminal each line of stdin is
one turn and only answers go to stdout: the status is 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from services.prompt_gateway.wire import DoneLine, FaultLine, QueuedLine, TextDeltaLine
from tools.chat_commands import TurnStats, command
from tools.chat_run import OrchestratorRun, RunError, Steps
from tools.chat_terminal import Leave, Turns, is_dumb
from tools.chat_text import MarkdownStream, PlainStream, harmless
from tools.prompt_client import PromptClient, PromptClientError

DEFAULT_CONFIG = Path(".config/config.toml")
PROVIDERS = ("process", "docker", "swarm", "vastai")
SHORT_HELP = "/help for commands; Ctrl-C stops an answer, Ctrl-D leaves"
OWN_CONFIG = """\
[provider]
kind = {provider}
[model]
id = {model_id}
gguf_local_path = {model}
[prompt]
rpc_addr = "127.0.0.1:0"
"""
EXAMPLES = """\
examples:
  mvp-chat                                     a model of its own, on this machine
  mvp-chat --config config/docker.toml         as the file says
  mvp-chat --connect 127.0.0.1:19777           a stack that runs already
  mvp-chat --prompt "Why is the sky blue?"     one answer, for scripts
  echo "Why is the sky blue?" | mvp-chat --connect 127.0.0.1:19777
"""


class Chat:
    """A conversation and its connection, which is made anew after each stopped answer."""

    def __init__(
        self,
        addr: str,
        *,
        system: str = "",
        max_tokens: int = 0,
        sampling: Mapping[str, Any] | None = None,
        out: TextIO,
        log: TextIO,
    ) -> None:
        self._addr, self._max_tokens, self._out, self._log = addr, max_tokens, out, log
        self._sampling = dict(sampling or {})
        self._colours = out.isatty() and not is_dumb()
        self.turns: list[TurnStats] = []
        self._start = [{"role": "system", "content": system}] if system else []
        self.history: list[dict[str, str]] = list(self._start)
        self._client: PromptClient | None = None

    def connect(self, wait_s: float = 0.0, alive_check: Callable[[], str] | None = None) -> None:
        """Raises PromptClientError."""
        self._client = PromptClient.connect(self._addr, wait_s=wait_s, alive_check=alive_check)

    def forget(self) -> None:
        """Start over."""
        self.history = list(self._start)

    def say(self, text: str) -> bool:
        """One turn: stream the answer. False if it failed or was stopped (KeyboardInterrupt is taken here).

        Raises PromptClientError when the stack is gone.
        """
        self.history.append({"role": "user", "content": text})
        answer: list[str] = []
        fault = ""
        view = MarkdownStream() if self._colours else PlainStream(escape=self._out.isatty())
        begin, first = time.monotonic(), 0.0
        try:
            for event in self._submit():
                match event:
                    case TextDeltaLine():
                        first = first or time.monotonic()
                        answer.append(event.text)
                        self._out.write(view.feed(event.text))
                        self._out.flush()
                    case QueuedLine():
                        self._note(f"waiting behind {event.position} other prompt{'s'[: event.position != 1]}")
                    case FaultLine():
                        fault = event.error
                    case DoneLine():
                        self.turns.append(TurnStats(event, begin, first or time.monotonic(), time.monotonic()))
        except KeyboardInterrupt:
            self._out.write(view.end())
            # Closing the connection is how a prompt is cancelled (S1 2.5).
            self.close()
            self._note("stopped")
            self._remember("".join(answer))
            return False
        except BaseException:
            self.history.pop()
            raise
        self._out.write(view.end() + ("\n" if answer or not fault else ""))
        self._out.flush()
        if fault:
            self.history.pop()
            self._note(f"error: {fault}")
            return False
        self._remember("".join(answer))
        return True

    def close(self) -> None:
        """Close the connection; the conversation stays."""
        if self._client:
            self._client.close()
            self._client = None

    def _submit(self) -> Iterator[TextDeltaLine | DoneLine | FaultLine | QueuedLine]:
        """The events of one prompt; a connection that died while nothing was asked is made anew once."""
        retry = self._client is not None
        while True:
            if self._client is None:
                self.connect()
            assert self._client is not None
            started = False
            try:
                for event in self._client.submit(
                    messages=self.history,
                    max_tokens=self._max_tokens,
                    sampling=self._sampling,
                    queued_events=True,
                ):
                    started = True
                    yield event
                return
            except PromptClientError:
                self.close()
                if started or not retry:
                    raise
                retry = False

    def _remember(self, answer: str) -> None:
        """A stopped answer counts as far as it came; a turn without any is taken back."""
        if answer:
            self.history.append({"role": "assistant", "content": answer})
        else:
            self.history.pop()

    def _note(self, text: str) -> None:
        text = harmless(text)
        self._log.write(f"\n[{text}]\n" if self._log.isatty() else f"mvp-chat: {text}\n")
        self._log.flush()


def run_chat(
    addr: str,
    *,
    system: str = "",
    max_tokens: int = 0,
    sampling: Mapping[str, Any] | None = None,
    prompt: str | None = None,
    run: OrchestratorRun | None = None,
    wait_s: float = 0.0,
    alive_check: Callable[[], str] | None = None,
    stdin: TextIO | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Chat until the end of input, or answer `prompt` alone. Returns the exit status; raises PromptClientError when
    the stack is gone.

    wait_s, alive_check: as PromptClient.connect. run: for /plan.
    """
    source, out, log = stdin or sys.stdin, stdout or sys.stdout, stderr or sys.stderr
    chat = Chat(addr, system=system, max_tokens=max_tokens, sampling=sampling, out=out, log=log)
    try:
        chat.connect(wait_s, alive_check)
        if prompt is not None:
            return 0 if chat.say(prompt) else 1
        turns = Turns(source, log)
        if turns.interactive:
            log.write(f"{SHORT_HELP}\n")
        all_well = True
        with contextlib.suppress(Leave):
            while (line := turns()) is not None:
                text = line.strip()
                if text.startswith("/") and command(chat, text, run, log):
                    continue
                if text:
                    all_well = chat.say(text) and all_well
        return 0 if turns.interactive or all_well else 1
    finally:
        chat.close()


# --- the program --------------------------------------------------------------------------------------------------
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mvp-chat",
        description="Chat with a model: on a stack of its own, or on a running one.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--connect", metavar="HOST:PORT", help="the prompt RPC of a running stack")
    for name in PROVIDERS:
        where.add_argument(f"--{name}", action="store_const", const=name, dest="provider", help=f"workers: {name}")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"configuration (default {DEFAULT_CONFIG}, if it is)"
    )
    parser.add_argument("--pipeline-stages", type=int, metavar="N", help="over how many workers the model is cut")
    parser.add_argument("--yes", "-y", action="store_true", help="rent machines without asking")
    parser.add_argument("--prompt", metavar="TEXT", help="answer this one prompt and end")
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message before the conversation")
    parser.add_argument("--max-tokens", type=int, default=0, metavar="N", help="cap of each answer (default: none)")
    for name, kind, text in (
        ("temperature", float, "0 is always the likeliest token (the default)"),
        ("top-k", int, "only the likeliest K tokens"),
        ("top-p", float, "only tokens of this share of the probability"),
        ("min-p", float, "only tokens this likely relative to the likeliest"),
        ("repetition-penalty", float, "above 1: what was said becomes less likely"),
        ("seed", int, "of the random choices"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar="X", help=text)
    return parser


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _configured(args: argparse.Namespace, directory: Path, steps: Steps) -> tuple[list[str], Path]:
    """The orchestrator's arguments and its configuration: the given or default one, else one with the default model."""
    config = args.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
    if config is None:
        from tools.fetch_model import FetchError, default_model_path, fetch_default

        model = default_model_path()
        try:
            if not model.exists():
                steps.line("fetching the default model")
                fetch_default(model.parent)
        except FetchError as error:
            raise RunError(str(error)) from None
        values = {"provider": args.provider or "process", "model_id": model.stem, "model": str(model.absolute())}
        config = directory / "chat.toml"
        config.write_text(OWN_CONFIG.format(**{key: json.dumps(value) for key, value in values.items()}))
    arguments = ["--runtime-config", str(config)]
    arguments += ["--provider", args.provider] if args.provider else []
    arguments += ["--pipeline-stages", str(args.pipeline_stages)] if args.pipeline_stages else []
    return arguments, config


def _rents(args: argparse.Namespace, arguments: list[str]) -> bool:
    """Whether this run rents machines. Raises RunError unless somebody agreed to pay for them."""
    if args.provider not in (None, "vastai") or (
        args.provider is None and not (args.config or DEFAULT_CONFIG.exists())
    ):
        return False
    from tools.chat_rent import agree  # the resolver costs a third of a second

    return agree(arguments, yes=args.yes, source=sys.stdin, log=sys.stderr)


def _own_stack(args: argparse.Namespace, chat_options: dict[str, Any]) -> int:
    """Start, chat, stop, and say what was stopped."""
    steps = Steps(sys.stderr)
    run: OrchestratorRun | None = None
    rented = False
    with tempfile.TemporaryDirectory(prefix="smq-chat-") as directory:
        try:
            arguments, config = _configured(args, Path(directory), steps)
            rented = _rents(args, arguments)
            run = OrchestratorRun(arguments, config, steps.record)
            addr = run.wait_ready()
            status = run_chat(addr, run=run, alive_check=run.why_not_alive, **chat_options)
        finally:
            if run is not None:
                # A second Ctrl-C while it stops must not leave workers behind.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            ended = run.stop(rented=rented) if run is not None else 0
    for text in run.stopped:
        steps.line(f"stopped: {text}")
    if ended != 0:
        print(f"mvp-chat: {harmless(run.why_not_alive())}", file=sys.stderr)
    else:
        steps.line("everything is stopped")
    return status or (1 if ended else 0)


def main(argv: list[str] | None = None) -> int:
    """The console script."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not 0 <= args.max_tokens < 2**32:
        parser.error("--max-tokens must be from 0 to 4294967295")
    if args.pipeline_stages is not None and args.pipeline_stages < 1:
        parser.error("--pipeline-stages must be at least 1")
    if args.connect and (args.config or args.pipeline_stages):
        parser.error("--connect talks to a running stack; --config and --pipeline-stages would start another one")
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    options = {"system": args.system, "max_tokens": args.max_tokens, "sampling": _sampling(args), "prompt": args.prompt}
    try:
        return run_chat(args.connect, **options) if args.connect else _own_stack(args, options)
    except (PromptClientError, RunError) as error:
        print(f"mvp-chat: {harmless(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
