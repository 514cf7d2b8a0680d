"""`mvp-chat`: a plain chat with a running stack over the prompt RPC.

Enter sends a line, the answer streams; Ctrl-C stops the current answer and keeps the chat, Ctrl-D leaves. `/new`
forgets the conversation. Without a terminal each line of stdin is one turn and only answers go to stdout: the status
is 1 if one of them failed. The model is told the whole conversation, as `messages`; a failed turn is taken out of it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from services.prompt_gateway.wire import DoneLine, FaultLine, QueuedLine, TextDeltaLine
from tools.prompt_client import PromptClient, PromptClientError

DEFAULT_ADDR = "127.0.0.1:19777"  # [prompt] rpc_addr's default (S1 7.1)
PROMPT = "> "
HELP = "Ctrl-C stops an answer, Ctrl-D leaves, /new forgets the conversation"


class Chat:
    """A conversation and its connection, which is made anew after each stopped answer."""

    def __init__(self, addr: str, *, system: str = "", max_tokens: int = 0, out: TextIO, log: TextIO) -> None:
        self._addr, self._max_tokens, self._out, self._log = addr, max_tokens, out, log
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
        try:
            for event in self._submit():
                match event:
                    case TextDeltaLine():
                        answer.append(event.text)
                        self._out.write(event.text)
                        self._out.flush()
                    case QueuedLine():
                        self._note(f"waiting behind {event.position} other prompt{'s'[: event.position != 1]}")
                    case FaultLine():
                        fault = event.error
                    case DoneLine():
                        pass
        except KeyboardInterrupt:
            # Closing the connection is how a prompt is cancelled (S1 2.5).
            self.close()
            self._note("stopped")
            self._remember("".join(answer))
            return False
        except BaseException:
            self.history.pop()
            raise
        self._out.write("\n" if answer or not fault else "")
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
                    messages=self.history, max_tokens=self._max_tokens, queued_events=True
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
        self._log.write(f"\n[{text}]\n" if self._log.isatty() else f"mvp-chat: {text}\n")
        self._log.flush()


def run_chat(
    addr: str,
    *,
    system: str = "",
    max_tokens: int = 0,
    wait_s: float = 0.0,
    alive_check: Callable[[], str] | None = None,
    stdin: TextIO | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Chat until the end of input. Returns the exit status; raises PromptClientError when the stack is gone.

    wait_s, alive_check: as PromptClient.connect.
    """
    source, out, log = stdin or sys.stdin, stdout or sys.stdout, stderr or sys.stderr
    chat = Chat(addr, system=system, max_tokens=max_tokens, out=out, log=log)
    interactive = source.isatty()
    all_well = True
    try:
        chat.connect(wait_s, alive_check)
        if interactive:
            log.write(f"{HELP}\n")
        while (line := _read_line(source, interactive)) is not None:
            text = line.strip()
            if text == "/new":
                chat.forget()
            elif text:
                all_well = chat.say(text) and all_well
    finally:
        chat.close()
    return 0 if interactive or all_well else 1


def _read_line(source: TextIO, interactive: bool) -> str | None:
    """The next line, None at the end. Ctrl-C at the prompt throws the half-typed line away."""
    if not interactive:
        return source.readline() or None
    if source is sys.stdin:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() its line editing
    while True:
        try:
            return input(PROMPT)
        except EOFError:
            return None
        except KeyboardInterrupt:
            sys.stdout.write("\n")


def main(argv: list[str] | None = None) -> int:
    """The console script."""
    parser = argparse.ArgumentParser(prog="mvp-chat", description="Chat with a running stack.", epilog=HELP)
    parser.add_argument(
        "--connect", metavar="HOST:PORT", default=DEFAULT_ADDR, help=f"the prompt RPC (default {DEFAULT_ADDR})"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message before the conversation")
    parser.add_argument("--max-tokens", type=int, default=0, metavar="N", help="cap of each answer (default: none)")
    args = parser.parse_args(argv)
    if not 0 <= args.max_tokens < 2**32:
        parser.error("--max-tokens must be from 0 to 4294967295")
    try:
        return run_chat(args.connect, system=args.system, max_tokens=args.max_tokens)
    except PromptClientError as error:
        print(f"mvp-chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
