"""The engine's front on pipes: newline-delimited JSON (S2 6.4), one prompt at a time, in order.

Out, once the model is loaded: {"status": "ready", "pid": N}. In: {"prompt", "max_tokens", "temperature"}; out for each:
{"response"} or {"error"}. An `id` in the request comes back in its answer. Standard output carries these lines and
nothing else: whatever a library prints goes to standard error. End of input ends it after what was asked.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from common.messages.inference import DEFAULT_MAX_TOKENS, DEFAULT_TEMPERATURE
from common.messages.node_agent import GgufSource, HuggingFaceGguf, LocalPath
from worker.engine.errors import EngineError

if TYPE_CHECKING:
    from worker.engine.engine import Engine

LINE_BYTES_MAX = 8 * 1024 * 1024  # a prompt at its limit, with every character escaped
READ_BYTES = 64 * 1024
HUB_PREFIX = "hf://"


class Answerer(Protocol):
    """What serves the prompts."""

    def answer(self, prompt: str, max_tokens: int, temperature: float) -> str:
        """The whole answer. Raises EngineError for a request that cannot be served."""


class Stub:
    """`--stub`: no model, an answer at once; for tests of everything around it."""

    def answer(self, prompt: str, max_tokens: int, temperature: float) -> str:
        """The prompt, marked as not a model's words."""
        return f"[stub] {prompt}"


class Real:
    """The model. `alive` is asked after each token: nobody computes for a reader that is gone."""

    def __init__(self, engine: Engine, alive: Any) -> None:
        self._engine, self._alive = engine, alive

    def answer(self, prompt: str, max_tokens: int, temperature: float) -> str:
        """One generation, the prompt as one user turn through the model's template."""
        from worker.engine.generate import Finished
        from worker.engine.sampler import Sampling

        generation = self._engine.generate(
            self._engine.prompt_ids(prompt),
            max_tokens=max_tokens or None,
            sampling=Sampling(temperature=temperature),
        )
        text = ""
        while not generation.finished:
            self._alive()
            for event in generation.step():
                if isinstance(event, Finished):
                    text = event.final_text
        return text.strip()


class Pipes:
    """Lines in, JSON out."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        self._watch = select.poll()
        self._watch.register(sink, 0)

    def say(self, value: dict[str, Any]) -> None:
        """One line, written whole. Ends the process when nobody reads."""
        data = json.dumps(value).encode() + b"\n"
        while data:
            try:
                data = data[os.write(self._sink, data) :]
            except BrokenPipeError:
                sys.exit(0)

    def check_reader(self) -> None:
        """End the process when the reader of the answers is gone, however it went."""
        if any(events & (select.POLLERR | select.POLLHUP) for _, events in self._watch.poll(0)):
            sys.exit(0)

    def lines(self) -> Iterator[bytes | None]:
        """Until the end of input; None for a line over LINE_BYTES_MAX."""
        held, skipping = bytearray(), False
        while data := os.read(self._source, READ_BYTES):
            *whole, rest = data.split(b"\n")
            for piece in whole:
                line = bytes(held) + piece
                held.clear()
                yield None if skipping or len(line) > LINE_BYTES_MAX else line
                skipping = False
            if skipping:
                continue
            held += rest
            if len(held) > LINE_BYTES_MAX:
                held.clear()
                skipping = True
        if held:
            yield bytes(held)


def reply_to(line: bytes | None, answerer: Answerer) -> dict[str, Any]:
    """The answer to one line of input; never raises for what stands in it."""
    if line is None:
        return {"error": f"the line is longer than {LINE_BYTES_MAX} bytes"}
    try:
        asked = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {"error": f"invalid JSON: {error}"}
    if not isinstance(asked, dict):
        return {"error": "invalid JSON: the line is not an object"}
    ids = {"id": asked["id"]} if "id" in asked else {}
    try:
        prompt, max_tokens, temperature = _fields(asked)
        return {**ids, "response": answerer.answer(prompt, max_tokens, temperature)}
    except EngineError as error:
        return {**ids, "error": str(error)}
    except Exception as error:  # one prompt fails, the worker lives (S2 6.4)
        return {**ids, "error": f"generation failed: {str(error) or type(error).__name__}"}


def _fields(asked: dict[str, Any]) -> tuple[str, int, float]:
    prompt = asked.get("prompt")
    if not isinstance(prompt, str):
        raise EngineError("missing 'prompt' field")
    max_tokens = asked.get("max_tokens", DEFAULT_MAX_TOKENS)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 0:
        raise EngineError("'max_tokens' is not a number of tokens")
    temperature = asked.get("temperature", DEFAULT_TEMPERATURE)
    if not isinstance(temperature, int | float) or isinstance(temperature, bool):
        raise EngineError("'temperature' is not a number")
    return prompt.encode("utf-8", "replace").decode(), max_tokens, float(temperature)


def source_of(model: str) -> GgufSource:
    """A path, or hf://OWNER/REPOSITORY/FILE. Raises EngineError."""
    if not model.startswith(HUB_PREFIX):
        return LocalPath(path=model)
    owner, _, rest = model.removeprefix(HUB_PREFIX).partition("/")
    name, _, file = rest.partition("/")
    if not (owner and name and file):
        raise EngineError(f"{model} is no model; it must be {HUB_PREFIX}OWNER/REPOSITORY/FILE.gguf")
    return HuggingFaceGguf(repo=f"{owner}/{name}", file=file)


def _load(model: str, max_context: int | None, alive: Any) -> Real:
    source = source_of(model)
    if isinstance(source, LocalPath) and not Path(source.path).is_file():
        raise EngineError(f"model file {model} does not exist on this machine")
    # tinygrad takes seconds to import: not for a path that is wrong.
    from worker.engine.engine import Engine
    from worker.engine.sources import resolve_source

    def progress(phase: str, done: int, total: int) -> None:
        alive()

    path = resolve_source(source, progress)
    print(f"loading {path}", file=sys.stderr, flush=True)
    engine = Engine.load(path, max_context=max_context, progress=progress)
    engine.warm_up(progress)
    return Real(engine, alive)


def serve(model: str, *, stub: bool = False, max_context: int | None = None) -> int:
    """Load, say ready, answer until the end of input. The exit status: 1 if the model could not be loaded."""
    sink = os.dup(1)
    os.dup2(2, 1)
    pipes = Pipes(0, sink)
    answerer: Answerer
    try:
        answerer = Stub() if stub else _load(model, max_context, pipes.check_reader)
    except (ValueError, OSError, MemoryError) as error:
        pipes.say({"error": f"the model could not be loaded: {str(error) or type(error).__name__}"})
        print(f"worker.engine: {error}", file=sys.stderr)
        return 1
    pipes.say({"status": "ready", "pid": os.getpid()})
    for line in pipes.lines():
        if line is None or line.strip():
            pipes.say(reply_to(line, answerer))
    return 0
