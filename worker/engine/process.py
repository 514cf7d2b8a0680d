"""The engine process: commands of the agent in, answers out (design.md 4, S1 6.6, 7.4, 7.8, 7.9).

The main thread makes every tinygrad call (its compile cache is bound to a thread) and works through the commands in
order; the port thread owns the link, the tokenizer and the cancel flags. Expected errors are one sentence: of a
request as EngineFault, of the engine as Fatal with exit status 1. tinygrad is imported on Initialize, so that the
process answers at once and the import counts as progress.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.codec import Message
from common.free_memory import free_memory
from common.gguf import GgufError
from common.messages.engine import (
    ConfigureRole,
    EngineDecode,
    EngineDecoded,
    EngineDone,
    EngineEncode,
    EngineEncoded,
    EngineFault,
    EngineInfer,
    EngineReady,
    Fatal,
    Initialize,
    LoadWeights,
    Progress,
    Released,
    ReleaseRun,
    ResetRole,
    RoleConfigured,
    RoleReset,
    TokenDelta,
    WeightsLoaded,
)
from common.messages.node_agent import LocalPath
from common.messages.node_agent import Sampling as WireSampling
from worker.engine import measure
from worker.engine.errors import EngineError
from worker.engine.mailbox import Mailbox
from worker.engine.port import Port
from worker.engine.progress import CoalescedProgress, Phase, ProgressPage
from worker.engine.stage_role import StageRole

if TYPE_CHECKING:
    from worker.engine.engine import Engine
    from worker.engine.generate import Generation
    from worker.engine.sampler import Sampling
    from worker.engine.tokenizer import StreamDecoder

NOT_LOADED = "the engine has no weights loaded"


def _elapsed_ms(since: float) -> int:
    return round((time.monotonic() - since) * 1000)


def _one_sentence(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "out of memory while loading the model"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


BAD_MODEL_WAY_OUT = "name a whole GGUF file in [model] (./dev fetch-model fetches one)"


class EngineProcess:
    """State of the process: role, engine and the decoders of the pipelined prompts."""

    def __init__(self, descriptor: int, progress_descriptor: int | None) -> None:
        self._page = ProgressPage(progress_descriptor)
        self._mailbox = Mailbox()
        self._port = Port(descriptor, self._mailbox, self._tokenizer_work)
        self._role: ConfigureRole | None = None
        self._engine: Engine | None = None
        self._threads = 0
        self._streams: dict[int, StreamDecoder] = {}
        self._port.stage.alive = self._page.bump
        self._stage = StageRole(self._mailbox, self._port.stage, self._page, self._port.send, _sampling)
        self._handlers: dict[type, Callable[..., None]] = {
            Initialize: self._initialize,
            ConfigureRole: self._configure,
            LoadWeights: self._load,
            EngineInfer: self._infer,
            ReleaseRun: self._release,
            ResetRole: self._reset,
            **self._stage.handlers,
        }

    def run(self) -> None:
        """Serve until the port thread ends the process. Does not return."""
        self._port.start()
        while True:
            try:
                message = self._mailbox.get()  # the main thread turns the edges meanwhile, and may take a step there
                handler = self._handlers.get(type(message))
                if handler is None:
                    raise EngineError(f"the engine does not serve {type(message).__name__}")
                handler(message)
            except GgufError as error:
                self._fatal(f"{_one_sentence(error)}; {BAD_MODEL_WAY_OUT}")
            except (EngineError, OSError, MemoryError) as error:
                self._fatal(_one_sentence(error))
            except Exception as error:
                traceback.print_exc()
                self._fatal(f"{type(error).__name__}: {_one_sentence(error)}")

    def _fatal(self, error: str) -> None:
        """The port sends this last message and ends the process with status 1."""
        self._port.send(Fatal(error=error))
        self._port.join()

    # -- commands, on the main thread ----------------------------------------------------------------------

    def _initialize(self, message: Initialize) -> None:
        started = time.monotonic()
        self._page.enter(Phase.IMPORTING)
        if message.device:
            os.environ["DEV"] = message.device
        self._threads = message.threads or 0
        from worker.engine import engine, tinygrad_shim  # sets tinygrad's environment, then imports it

        assert engine is not None
        self._page.enter(Phase.IDLE)
        device = tinygrad_shim.device_name()
        backend = f"tinygrad {device}"
        is_cpu = device.partition(":")[0] == "CPU"
        ready = EngineReady(
            pid=os.getpid(),
            backend=backend,
            elapsed_ms=_elapsed_ms(started),
            edge_candidates=self._port.stage.candidates,
            memory_bytes=free_memory() if is_cpu else 0,
            bytes_per_s=measure.read_speed() if is_cpu and message.measure else 0,
        )
        self._port.send(ready)

    def _configure(self, message: ConfigureRole) -> None:
        if not 0 <= message.stage_index < message.stage_count:
            raise EngineError(f"stage {message.stage_index} is not one of {message.stage_count} stages")
        self._role = message
        self._port.send(RoleConfigured())

    def _load(self, message: LoadWeights) -> None:
        from worker.engine.engine import Engine
        from worker.engine.parts import Part
        from worker.engine.sources import resolve_source

        role = self._role
        if role is None:
            raise EngineError("weights were asked for before the role was configured")
        self._drop_engine()
        self._port.stage.leave_to_port()
        started = time.monotonic()
        self._page.enter(Phase.LOADING)
        report = CoalescedProgress(
            lambda phase, done, total: self._port.send(Progress(phase=phase, done=done, total=total)), self._page
        )

        def part_of(block_count: int) -> Part:
            end = block_count if role.layer_end_exclusive is None else role.layer_end_exclusive
            last = role.stage_index == role.stage_count - 1
            return Part(role.layer_start, end, with_embedding=role.stage_index == 0, with_head=last)

        is_whole = role.stage_count == 1 and not role.layer_start and role.layer_end_exclusive is None
        engine = Engine.load(
            resolve_source(message.gguf_source, report, None if is_whole else part_of),
            max_context=message.max_context,
            part_of=part_of,
            tokenizer_path=message.tokenizer.path if isinstance(message.tokenizer, LocalPath) else None,
            threads=self._stage.threads(self._threads),
            progress=report,
        )
        self._page.enter(Phase.WARMING_UP)
        engine.warm_up(report)
        self._engine = engine
        self._stage.loaded(engine)
        self._page.enter(Phase.IDLE)
        self._port.send(
            WeightsLoaded(
                weights_bytes=engine.model.weights_bytes,
                kv_bytes=engine.model.kv_bytes,
                layers=engine.model.part.layers,
                max_context=engine.max_context,
                elapsed_ms=_elapsed_ms(started),
                eos_tokens=sorted(engine.tokenizer.vocabulary.end_ids),
            )
        )

    def _infer(self, message: EngineInfer) -> None:
        request_id, engine = message.request_id, self._engine
        self._page.enter(Phase.PREFILL_OR_DECODE)
        try:
            if engine is None:
                raise EngineError(NOT_LOADED)
            generation = engine.generate(
                _prompt_ids(engine, message),
                max_tokens=message.max_tokens or None,
                sampling=_sampling(message.sampling),
                stop=message.stop,
                tick=self._page.bump,
            )
        except EngineError as error:
            self._port.send(EngineFault(request_id=request_id, error=_one_sentence(error)))
        else:
            self._generate(request_id, generation)
        self._page.enter(Phase.IDLE)

    def _generate(self, request_id: int, generation: Generation) -> None:
        """Step by step, so that a cancel takes effect within one chunk or token."""
        from worker.engine.generate import Finished

        while not generation.finished:
            if self._mailbox.is_cancelled(request_id):
                generation.cancel()
            for event in generation.step():
                if not isinstance(event, Finished):
                    delta = TokenDelta(request_id=request_id, text=event.text, tokens=len(event.token_ids))
                    self._port.send(delta)
                    continue
                self._port.send(
                    EngineDone(
                        request_id=request_id,
                        final_text=event.final_text,
                        tokens_generated=event.tokens_generated,
                        elapsed_ms=round(event.elapsed_s * 1000),
                        prompt_tokens=event.prompt_tokens,
                        finish_reason=event.finish_reason,
                    )
                )

    def _release(self, _message: ReleaseRun) -> None:
        self._drop_engine()
        self._port.send(Released())

    def _reset(self, _message: ResetRole) -> None:
        self._drop_engine()
        self._role = None
        self._port.send(RoleReset())

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._page.enter(Phase.RELEASING)
            engine, self._engine = self._engine, None
            self._stage.dropped()
            engine.close()
        self._page.enter(Phase.IDLE)

    # -- tokenizer work, on the port thread ----------------------------------------------------------------

    def _tokenizer_work(self, message: Message) -> Message:
        assert isinstance(message, EngineEncode | EngineDecode)
        request_id, engine = message.request_id, self._engine
        try:
            if engine is None:
                raise EngineError(NOT_LOADED)
            if isinstance(message, EngineEncode):
                return EngineEncoded(request_id=request_id, tokens=_prompt_ids(engine, message))
            stream = self._streams.setdefault(request_id, engine.tokenizer.stream())
            texts = [stream.feed(token) for token in message.tokens]
            if message.last:
                self._streams.pop(request_id, None)
            return EngineDecoded(request_id=request_id, text="".join(texts), lengths=[len(text) for text in texts])
        except EngineError as error:
            return EngineFault(request_id=request_id, error=_one_sentence(error))


def _prompt_ids(engine: Engine, message: EngineInfer | EngineEncode) -> list[int]:
    turns = [{"role": turn.role, "content": turn.content} for turn in message.messages] or None
    return engine.prompt_ids(message.prompt, turns, message.raw)


def _sampling(wire: WireSampling | None) -> Sampling | None:
    from worker.engine.sampler import Sampling

    if wire is None:
        return None
    return Sampling(
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        repetition_penalty=wire.repetition_penalty,
        seed=wire.seed,
    )


def serve(descriptor: int, progress_descriptor: int | None) -> None:
    """Run the engine on an inherited socket. Does not return; stdout is line-buffered, it is captured as a log."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    EngineProcess(descriptor, progress_descriptor).run()
