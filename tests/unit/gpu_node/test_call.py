"""The client's call on virtual time: every limit of S2 7.2 and 7.3, and the resend of 4.5 that the original lacks."""

from __future__ import annotations

from typing import Any

import pytest

from common.effects import SendFailed
from common.messages.bus import NameEntry
from common.messages.inference import InferenceFault, InferenceNotReady, InferenceRequest, InferenceResponse
from tools.single_gpu_inference_call import LOCAL_LIMITS, Call, Limits, Outcome, Seen
from worker.gpu_node import limits

NODE, BRIDGE, INBOX = b"n" * 32, b"b" * 32, b"i" * 32
REQUEST = InferenceRequest(request_id=7, prompt="p", reply_to=INBOX)
ENTRY = NameEntry(name="inference", address=BRIDGE, node=NODE)
NOBODY, MEMBER, READY = Seen("unknown", None), Seen("alive", None), Seen("alive", ENTRY)


class Play:
    def __init__(self, of: Limits | None = None) -> None:
        self.now = 1000
        self.call = Call(NODE, REQUEST, of or Limits(), self.now)

    def step(self, seen: Seen, *heard: Any) -> list[bytes]:
        return [address for address, request in self.call.step(seen, heard, self.now) if request is REQUEST]

    def wait(self, seen: Seen, ms: int, every: int = 100) -> list[bytes]:
        sent = []
        for _ in range(0, ms, every):
            self.now += every
            sent += self.step(seen)
        return sent

    @property
    def outcome(self) -> Outcome | None:
        return self.call.result.outcome if self.call.result else None

    def asking(self) -> Play:
        assert self.step(READY) == [BRIDGE]
        return self


@pytest.mark.spec("S2 7.2.1", "S2 7.2.2", "S2 7.3.1", "S2 7.3.5", "S2 7.1.3")
def test_the_time_limits_are_those_of_the_specification() -> None:
    assert limits.CONVERGE_LIMIT_MS == 120_000 and limits.RESOLVE_LIMIT_MS == 60_000
    assert limits.WORKER_READY_LIMIT_MS == 600_000 and limits.ANSWER_LIMIT_MS == 300_000
    assert limits.RUNNING_POLLS_MAX == 60 and limits.PROVISION_ATTEMPTS_MAX == 3
    assert limits.CONVERGE_LOG_LINES == 40 and limits.ANSWER_LOG_LINES == 60
    assert Limits() == Limits(120_000, 60_000, 300_000) and Limits(30_000, 30_000, 300_000) == LOCAL_LIMITS
    assert limits.NOT_READY_RESEND_MS == 2000


@pytest.mark.spec("S2 4.2", "S2 3.6")
def test_joined_resolved_asked_once_and_answered() -> None:
    play = Play()
    assert play.step(NOBODY) == [] and play.step(MEMBER) == []
    assert play.step(READY) == [BRIDGE]
    assert play.wait(READY, 10_000) == [], "asked once"
    play.step(READY, InferenceResponse(request_id=7, text="hi"))
    assert play.call.result and play.call.result.text == "hi" and play.outcome is Outcome.ANSWERED


@pytest.mark.spec("S2 7.2.1")
def test_nobody_joins() -> None:
    play = Play()
    play.wait(NOBODY, 119_900)
    assert play.outcome is None
    play.wait(NOBODY, 100)
    assert play.outcome is Outcome.NOT_JOINED


@pytest.mark.spec("S2 7.2.2")
def test_the_name_never_resolves_or_is_somebody_elses() -> None:
    for bridge in (None, NameEntry(name="inference", address=BRIDGE, node=b"o" * 32)):
        play = Play()
        play.step(MEMBER)
        play.wait(Seen("alive", bridge), 59_900)
        assert play.outcome is None
        play.wait(Seen("alive", bridge), 100)
        assert play.outcome is Outcome.NOT_RESOLVED


@pytest.mark.spec("S2 7.3.4", "S2 4.5")
def test_not_ready_is_asked_again_every_2_s_until_the_limit() -> None:
    play = Play().asking()
    sent = 0
    while play.outcome is None:
        play.step(READY, InferenceNotReady(request_id=7))
        assert play.wait(READY, 1900) == []
        sent += len(play.wait(READY, 100))
    assert play.outcome is Outcome.TIMED_OUT and play.call.result and "still loading" in play.call.result.text
    assert 148 <= sent <= 150 and 300_000 <= play.now - 1000 <= 302_000
    assert len([note for note in play.call.notes if "still loading" in note]) == 1, "said once, not 150 times"


@pytest.mark.spec("S2 7.3.4")
def test_ready_after_a_while_is_answered() -> None:
    play = Play().asking()
    play.step(READY, InferenceNotReady(request_id=7))
    assert play.wait(READY, 2000) == [BRIDGE]
    play.step(READY, InferenceResponse(request_id=7, text=""))
    assert play.outcome is Outcome.ANSWERED, "an empty answer is an answer"


@pytest.mark.spec("S2 7.3.5")
def test_no_answer_within_300_s() -> None:
    play = Play().asking()
    play.wait(READY, 299_900)
    assert play.outcome is None
    play.wait(READY, 100)
    assert play.outcome is Outcome.TIMED_OUT
    assert play.step(READY, InferenceResponse(request_id=7, text="late")) == [] and play.outcome is Outcome.TIMED_OUT


@pytest.mark.spec("S2 7.3.2", "S2 7.3.3")
def test_a_fault_ends_it_at_once_with_its_sentence() -> None:
    play = Play().asking()
    play.step(READY, InferenceFault(request_id=7, error="the worker exited"))
    assert play.call.result and play.call.result.text == "the worker exited" and play.outcome is Outcome.FAULT


@pytest.mark.spec("S2 7.5.2")
def test_replies_to_other_requests_are_not_ours() -> None:
    play = Play().asking()
    play.step(READY, InferenceResponse(request_id=8, text="x"), InferenceFault(request_id=6, error="x"))
    assert play.outcome is None and play.wait(READY, 5000) == []


@pytest.mark.spec("S2 7.3.1")
@pytest.mark.parametrize("state", ["dead", "left"])
def test_a_node_that_goes_away_ends_it_at_once(state: str) -> None:
    play = Play().asking()
    play.step(Seen("suspect", ENTRY))
    assert play.outcome is None
    play.step(Seen(state, None))
    assert play.outcome is Outcome.NODE_GONE


def test_a_lost_connection_is_forgiven_for_15_s() -> None:
    play = Play().asking()
    play.wait(Seen("alive", ENTRY, link_up=False), 14_000)
    play.wait(READY, 1000)
    play.wait(Seen("alive", ENTRY, link_up=False), 15_000)
    assert play.outcome is None
    play.wait(Seen("alive", ENTRY, link_up=False), 200)
    assert play.outcome is Outcome.NODE_GONE


def test_a_request_that_was_not_delivered_is_sent_again() -> None:
    play = Play().asking()
    assert play.step(READY, SendFailed(BRIDGE, REQUEST, "link_down")) == []
    assert play.wait(READY, 2000) == [BRIDGE]


def test_a_request_that_is_refused_is_not_sent_for_five_minutes() -> None:
    play = Play().asking()
    play.step(READY, SendFailed(BRIDGE, REQUEST, "refused"))
    assert play.outcome is Outcome.FAULT
