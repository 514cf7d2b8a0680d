"""The engine's port: the thread that owns the link to the agent (design.md 4, "Agent and engine").

Frames are a u32 little-endian length and one message of common/messages/engine.py. Outgoing messages come from the
main thread through a deque and an eventfd. Each request gets exactly one terminal: if a cancel is pending, whatever
terminal the main thread produces leaves as Cancelled, and deltas are dropped.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from common.codec import BadEnvelope, Message, decode_body, encode_body
from common.limits import ENVELOPE_BYTES_MAX, TEXT_DELTA_COALESCE_MS
from common.messages.engine import (
    Cancel,
    Cancelled,
    EngineDecode,
    EngineDone,
    EngineEncode,
    EngineFault,
    EngineInfer,
    Fatal,
    ReleaseRun,
    ResetRole,
    Shutdown,
    TokenDelta,
)
from worker.engine.mailbox import Mailbox
from worker.engine.stage_port import StagePort

_LENGTH = struct.Struct("<I")
_READ_BYTES = 65_536


class _Tagged(msgspec.Struct):
    """The tag alone; every other field is skipped undecoded."""

    t: int


def exit_now(status: int) -> None:
    """Leave without waiting for the other thread, which may sit in a kernel for a second."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


class Port:
    """`handle(message)` answers tokenizer work on this thread; everything else goes to the mailbox."""

    def __init__(self, descriptor: int, mailbox: Mailbox, handle: Callable[[Message], Message]) -> None:
        self._thread = threading.Thread(target=self._run, name="engine-port", daemon=True)
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._mailbox, self._handle = mailbox, handle
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outgoing: deque[Message] = deque()
        self._in, self._out = bytearray(), bytearray()
        self._running: set[int] = set()  # requests without their terminal
        self._cancelling: set[int] = set()
        self._started: set[int] = set()  # requests whose first delta has left
        self._delta: TokenDelta | None = None
        self._delta_due = 0.0
        self._exit: int | None = None
        self.stage = StagePort(mailbox, self.tell, self.wake)
        mailbox.before_wait = self.stage.take_over
        mailbox.fast_wait = self.stage.fast_wait

    # -- the main thread's side ----------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the process, which the port thread brings about."""
        self._thread.join()

    def send(self, message: Message) -> None:
        self._outgoing.append(message)
        held = self._delta
        if isinstance(message, TokenDelta) and held is not None and held.text:
            return  # looked for when that is due: a wake-up for each token takes the interpreter from the next step
        self.wake()

    def tell(self, message: Message) -> None:
        """`send` that the port thread may use, too."""
        if threading.get_ident() == self._thread.ident:
            self._forward(message)
        else:
            self.send(message)

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    # -- the port thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except OSError:  # the agent is gone in the middle of a frame
            exit_now(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            exit_now(1)

    def _loop(self) -> None:
        poll = select.poll()
        poll.register(self._event, select.POLLIN)
        watched: int | None = None
        while True:
            self._flush_due()
            self._write()
            if self._exit is not None and not self._out:
                exit_now(self._exit)
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
            if (edges := self.stage.fd) != watched:
                if watched is not None:
                    poll.unregister(watched)
                if edges is not None:
                    poll.register(edges, select.POLLIN)
                watched = edges
            timeout: float | None = self.stage.wait_ms()
            if self._delta is not None and self._delta.text:
                due = max(0.0, (self._delta_due - time.monotonic()) * 1000)
                timeout = due if timeout is None else min(due, timeout)
            if self._outgoing:  # came while the delta that it was to join left
                timeout = 0
            for descriptor, event in poll.poll(timeout):
                if descriptor == self._event:
                    os.eventfd_read(self._event)
                elif descriptor == edges:
                    pass
                elif event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self._read()
            self.stage.pump()
            while self._outgoing:
                self._forward(self._outgoing.popleft())

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            exit_now(0)
        self._in += data
        while len(self._in) >= _LENGTH.size:
            size = _LENGTH.unpack_from(self._in)[0]
            if size > ENVELOPE_BYTES_MAX:
                self._fail(f"the agent sent a frame of {size} bytes")
                return
            if len(self._in) < _LENGTH.size + size:
                return
            frame = bytes(self._in[_LENGTH.size : _LENGTH.size + size])
            del self._in[: _LENGTH.size + size]
            try:
                self._receive(decode_frame(frame))
            except BadEnvelope as error:
                self._fail(f"the agent sent a bad message: {error}")
                return

    def _receive(self, message: Message) -> None:
        if self.stage.receive(message):
            return
        if isinstance(message, Shutdown):
            self._exit = 0
        elif isinstance(message, Cancel):
            self._cancel(message.request_id)
        elif isinstance(message, EngineEncode | EngineDecode):
            self._queue(self._handle(message))
        elif isinstance(message, EngineInfer):
            if message.request_id in self._running:
                return  # a repeated request is the same request
            self._running.add(message.request_id)
            self._mailbox.put(message)
        else:
            if isinstance(message, ReleaseRun | ResetRole):
                for request_id in self._running:
                    self._begin_cancel(request_id)
            self._mailbox.put(message)

    def _cancel(self, request_id: int) -> None:
        if request_id not in self._running:
            self._queue(Cancelled(request_id=request_id, known=False))
            return
        self._begin_cancel(request_id)

    def _begin_cancel(self, request_id: int) -> None:
        self._cancelling.add(request_id)
        self._mailbox.cancel(request_id)
        if self._delta is not None and self._delta.request_id == request_id:
            self._delta = None

    def _forward(self, message: Message) -> None:
        if isinstance(message, TokenDelta):
            self._coalesce(message)
            return
        self._flush_delta()
        if isinstance(message, EngineDone | EngineFault | Cancelled):
            message = self._settle(message)
        if isinstance(message, Fatal):
            self._exit = 1
        self._queue(message)

    def _settle(self, message: EngineDone | EngineFault | Cancelled) -> Message:
        request_id = message.request_id
        self._delta = None  # what is left has no text, and the terminal carries the count
        cancelled = request_id in self._cancelling
        self._running.discard(request_id)
        self._cancelling.discard(request_id)
        self._started.discard(request_id)
        self._mailbox.forget(request_id)
        return Cancelled(request_id=request_id) if cancelled else message

    def _coalesce(self, delta: TokenDelta) -> None:
        """A request's first text leaves at once; later text waits up to 20 ms for company."""
        if delta.request_id in self._cancelling:
            return
        held = self._delta
        if held is not None and held.request_id == delta.request_id:
            delta = TokenDelta(
                request_id=delta.request_id, text=held.text + delta.text, tokens=held.tokens + delta.tokens
            )
        elif held is not None:
            self._flush_delta()
        if held is None:
            self._delta_due = time.monotonic() + TEXT_DELTA_COALESCE_MS / 1000
        self._delta = delta
        if delta.request_id not in self._started and delta.text:
            self._started.add(delta.request_id)
            self._flush_delta()

    def _flush_due(self) -> None:
        if self._delta is not None and self._delta.text and time.monotonic() >= self._delta_due:
            self._flush_delta()

    def _flush_delta(self) -> None:
        """Send the held delta if it has text; tokens without text wait for the text that they begin."""
        if self._delta is not None and self._delta.text:
            self._queue(self._delta)
            self._delta = None

    def _fail(self, error: str) -> None:
        self._in.clear()
        self._queue(Fatal(error=error))
        self._exit = 1

    def _queue(self, message: Message) -> None:
        body = encode_body(message)
        self._out += _LENGTH.pack(len(body)) + body

    def _write(self) -> None:
        while self._out:
            try:
                sent = self._socket.send(self._out)
            except BlockingIOError:
                return
            del self._out[:sent]


def decode_frame(frame: bytes) -> Message:
    """The typed message of a frame's body. Raises BadEnvelope."""
    try:
        tag = msgspec.msgpack.decode(frame, type=_Tagged).t
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadEnvelope(f"no message: {error}", None, len(frame)) from None
    return decode_body(tag, frame)
