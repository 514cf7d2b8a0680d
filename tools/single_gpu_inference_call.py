"""One call as the client of S2 makes it: join, resolve the name, ask, ask again while the worker loads (S2 4.2, 7.2,
7.3). Pure: what is seen and the time come in, requests go out, and exactly one result ends it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from common.effects import SendFailed
from common.messages.bus import NameEntry
from common.messages.inference import InferenceFault, InferenceNotReady, InferenceRequest, InferenceResponse
from worker.gpu_node.limits import (
    ANSWER_LIMIT_MS,
    CONVERGE_LIMIT_MS,
    LINK_LOST_LIMIT_MS,
    LOCAL_CONVERGE_LIMIT_MS,
    LOCAL_RESOLVE_LIMIT_MS,
    NOT_READY_RESEND_MS,
    RESOLVE_LIMIT_MS,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The waits of one call."""

    converge_ms: int = CONVERGE_LIMIT_MS
    resolve_ms: int = RESOLVE_LIMIT_MS
    answer_ms: int = ANSWER_LIMIT_MS


LOCAL_LIMITS = Limits(LOCAL_CONVERGE_LIMIT_MS, LOCAL_RESOLVE_LIMIT_MS)


class Outcome(StrEnum):
    """How a call ended; the rows of S2 7.2 and 7.3."""

    ANSWERED = "answered"
    NOT_JOINED = "not joined"
    NOT_RESOLVED = "not resolved"
    NODE_GONE = "node gone"
    FAULT = "fault"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Result:
    """text: the answer, or one sentence."""

    outcome: Outcome
    text: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What the client's end knows now. state: SWIM's word of the node; bridge: where the name leads."""

    state: str
    bridge: NameEntry | None
    link_up: bool = True


class Call:
    """Feed it with `step` after each turn of the loop, until `result` is there."""

    def __init__(self, node: bytes, request: InferenceRequest, limits: Limits, now_ms: int) -> None:
        self.result: Result | None = None
        self.notes: list[str] = []
        """What a person may want to know, since the last look."""
        self._node, self._request, self._limits = node, request, limits
        self._joined = self._resolved = False
        self._since_ms = now_ms
        self._send_at_ms: int | None = None
        self._link_down_ms: int | None = None
        self._said_not_ready = False

    def step(self, seen: Seen, heard: Iterable[Any], now_ms: int) -> list[tuple[bytes, InferenceRequest]]:
        """heard: messages of the inbox since the last step. Returns (bridge address, request) to send to the node."""
        if self.result is not None:
            return []
        for message in heard:
            self._hear(message, now_ms)
        if self.result is None:
            self._judge(seen, now_ms)
        if self.result is not None or not self._resolved or self._send_at_ms is None or now_ms < self._send_at_ms:
            return []
        if seen.bridge is None or seen.bridge.node != self._node:
            return []  # it was there; its gossip is late, or the node is on its way out
        self._send_at_ms = None
        return [(seen.bridge.address, self._request)]

    # --- what comes back ----------------------------------------------------------------------------------------
    def _hear(self, message: Any, now_ms: int) -> None:
        match message:
            case InferenceResponse(request_id=self._request.request_id):
                self._end(Outcome.ANSWERED, message.text)
            case InferenceFault(request_id=self._request.request_id):
                self._end(Outcome.FAULT, message.error)
            case InferenceNotReady(request_id=self._request.request_id):
                self._again(now_ms)
                if not self._said_not_ready:
                    self._said_not_ready = True
                    self.notes.append("the worker is still loading; asking again every 2 s")
            case SendFailed(message=InferenceRequest(), reason="refused" | "unsupported"):
                self._end(Outcome.FAULT, "gpu-node does not take this request: too large, or from another version")
            case SendFailed(message=InferenceRequest()):
                self._again(now_ms)
                self.notes.append(f"the request was not delivered ({message.reason}); asking again")
            case _:
                pass

    def _again(self, now_ms: int) -> None:
        """S2 4.5, closed: the client resends."""
        self._send_at_ms = now_ms + NOT_READY_RESEND_MS

    # --- how it goes --------------------------------------------------------------------------------------------
    def _judge(self, seen: Seen, now_ms: int) -> None:
        waited = now_ms - self._since_ms
        if not self._joined:
            if seen.state in ("alive", "suspect"):
                self._joined, self._since_ms, waited = True, now_ms, 0
                self.notes.append("gpu-node is a member")
            elif waited >= self._limits.converge_ms:
                self._end(Outcome.NOT_JOINED, f"gpu-node did not join within {self._limits.converge_ms // 1000} s")
        if self.result is None and self._joined:
            self._watch(seen, now_ms)
        if self.result is None and self._joined and not self._resolved:
            if seen.bridge is not None and seen.bridge.node == self._node:
                self._resolved, self._since_ms, waited = True, now_ms, 0
                self._send_at_ms = now_ms
                self.notes.append(f'"{seen.bridge.name}" is resolved; asking')
            elif waited >= self._limits.resolve_ms:
                self._end(
                    Outcome.NOT_RESOLVED, f'"inference" did not resolve within {self._limits.resolve_ms // 1000} s'
                )
        if self.result is None and self._resolved and waited >= self._limits.answer_ms:
            why = "the worker was still loading" if self._said_not_ready else "the worker did not answer"
            self._end(Outcome.TIMED_OUT, f"no answer within {self._limits.answer_ms // 1000} s: {why}")

    def _watch(self, seen: Seen, now_ms: int) -> None:
        """A node that is gone will not answer: no need to wait for the limit."""
        if seen.state in ("dead", "left"):
            self._end(Outcome.NODE_GONE, f"gpu-node is gone (SWIM: {seen.state})")
        if seen.link_up:
            self._link_down_ms = None
        elif self._link_down_ms is None:
            self._link_down_ms = now_ms
        elif now_ms - self._link_down_ms >= LINK_LOST_LIMIT_MS:
            self._end(Outcome.NODE_GONE, f"the connection to gpu-node is lost for {LINK_LOST_LIMIT_MS // 1000} s")

    def _end(self, outcome: Outcome, text: str) -> None:
        self.result = Result(outcome, text)
        self._send_at_ms = None
