"""Prompts, tokenizer work and cancels at the node agent: one request, one terminal (S1 6.9, 6.10, 9.11)."""

from __future__ import annotations

import pytest

from common.effects import SendFailed
from common.messages.engine import (
    Cancel,
    Cancelled,
    EngineDecode,
    EngineDecoded,
    EngineDone,
    EngineEncode,
    EngineEncoded,
    EngineFault,
    EngineInfer,
    TokenDelta,
)
from common.messages.node_agent import (
    CancelRequest,
    ChatMessage,
    DecodeTokens,
    EncodePrompt,
    Sampling,
    StopRun,
    WorkerCrashed,
)
from common.messages.prompt import (
    Done,
    Fault,
    PromptEncoded,
    RequestCancelled,
    TextDelta,
    TokenizerFault,
    TokensDecoded,
)
from tests.unit.agent.playbook import ENGINE_READY, GATEWAY_INBOX, RUN, Agent, prompt, provision, ready_agent
from worker.agent.requests import TOKENIZER_JOBS_MAX

GATEWAY = b"G" * 32
ENGINE_DONE = EngineDone(
    request_id=5, final_text="Hello", tokens_generated=2, elapsed_ms=40, prompt_tokens=9, finish_reason="stop"
)
DONE = Done(request_id=5, final_text="Hello", tokens_generated=2, elapsed_ms=40, prompt_tokens=9, finish_reason="stop")


@pytest.mark.spec("S1 6.9", "S1 9.11", "S1 6.5")
def test_a_prompt_goes_to_the_engine_and_its_events_to_reply_to() -> None:
    agent = ready_agent()
    turns = [ChatMessage(role="user", content="hi")]
    agent.tell(prompt(5, max_tokens=8, messages=turns, stop=["\n"], sampling=Sampling(temperature=0.5, seed=3)))
    assert agent.told() == [
        EngineInfer(
            request_id=5,
            prompt="hi",
            max_tokens=8,
            messages=turns,
            stop=["\n"],
            sampling=Sampling(temperature=0.5, seed=3),
        )
    ]
    agent.engine(
        TokenDelta(request_id=5, text="Hel", tokens=1), TokenDelta(request_id=5, text="lo", tokens=1), ENGINE_DONE
    )
    assert agent.sent() == [
        (GATEWAY_INBOX, TextDelta(request_id=5, text="Hel")),
        (GATEWAY_INBOX, TextDelta(request_id=5, text="lo")),
        (GATEWAY_INBOX, DONE),
    ]
    assert agent.events() == [("prompt", "infer", "started"), ("prompt", "infer", "done")]
    agent.tell(prompt(6))
    assert [type(message) for message in agent.told()] == [EngineInfer], "ready for the next"


def test_a_failed_request_is_one_fault_and_the_engine_goes_on() -> None:
    agent = ready_agent()
    agent.tell(prompt(5))
    agent.engine(EngineFault(request_id=5, error="the prompt has 900 tokens, the context 512"))
    assert agent.sent() == [(GATEWAY_INBOX, Fault(request_id=5, error="the prompt has 900 tokens, the context 512"))]
    agent.tell(prompt(6))
    assert agent.sent() == []


@pytest.mark.spec("S1 6.5")
def test_a_prompt_before_readiness_after_a_fault_and_of_a_pipeline_stage_is_refused_in_one_sentence() -> None:
    agent = Agent()
    agent.engine(ENGINE_READY)
    agent.quiet()
    agent.tell(prompt(5))
    assert agent.sent() == [
        (GATEWAY_INBOX, Fault(request_id=5, error="the worker is not ready: its stage is unprovisioned", lost=True))
    ]
    agent.tell(provision())
    agent.tell(prompt(6))
    assert "its stage is waiting" in agent.sent_to(GATEWAY_INBOX)[0].error  # type: ignore[attr-defined]
    agent.tell(provision(node_id=9))
    agent.tell(prompt(7))
    assert "faulted: the provision is for node 9" in agent.sent_to(GATEWAY_INBOX)[0].error  # type: ignore[attr-defined]
    staged = Agent()
    staged.tell(provision(stage_count=2))
    staged.tell(prompt(8))
    assert "one stage of a pipeline" in staged.sent_to(GATEWAY_INBOX)[0].error  # type: ignore[attr-defined]


def test_one_request_at_a_time_and_a_repeat_is_no_second_request() -> None:
    agent = ready_agent()
    agent.tell(prompt(5))
    agent.tell(prompt(5))
    assert len(agent.told()) == 1
    assert agent.sent() == []
    agent.tell(prompt(6))
    assert agent.sent() == [(GATEWAY_INBOX, Fault(request_id=6, error="busy: request 5 is still being answered"))]
    agent.engine(ENGINE_DONE)
    assert agent.sent() == [(GATEWAY_INBOX, DONE)]


def test_an_answer_of_no_active_request_is_dropped() -> None:
    agent = ready_agent()
    agent.engine(TokenDelta(request_id=9, text="x", tokens=1), EngineFault(request_id=9, error="x"))
    agent.tell(prompt(5))
    agent.engine(
        EngineDone(**{**{name: getattr(ENGINE_DONE, name) for name in ENGINE_DONE.__struct_fields__}, "request_id": 4})
    )
    agent.engine(EngineEncoded(request_id=5, tokens=[1]), EngineDecoded(request_id=5, text="x"))
    assert agent.sent() == []


@pytest.mark.spec("S1 6.9")
def test_a_cancel_reaches_the_engine_and_is_confirmed_to_whoever_asked_when_nothing_more_comes() -> None:
    agent = ready_agent()
    agent.tell(prompt(5))
    agent.told()
    agent.tell(CancelRequest(request_id=5), src=GATEWAY)
    agent.tell(CancelRequest(request_id=5), src=GATEWAY)
    assert agent.told() == [Cancel(request_id=5)] * 2
    agent.engine(TokenDelta(request_id=5, text="late", tokens=1))
    assert agent.sent() == []
    agent.engine(Cancelled(request_id=5))
    assert agent.sent() == [(GATEWAY, RequestCancelled(request_id=5))]
    agent.engine(Cancelled(request_id=5, known=False))
    assert agent.sent() == []
    assert ("prompt", "infer", "cancelled") in agent.events()
    agent.tell(prompt(6))
    assert [type(message) for message in agent.told()] == [EngineInfer]


def test_a_done_that_crosses_the_cancel_is_not_sent() -> None:
    agent = ready_agent()
    agent.tell(prompt(5))
    agent.tell(CancelRequest(request_id=5), src=GATEWAY)
    agent.engine(ENGINE_DONE, Cancelled(request_id=5, known=False))
    assert agent.sent() == [(GATEWAY, RequestCancelled(request_id=5, known=False))]


def test_a_cancel_of_an_unknown_request_is_confirmed_as_unknown() -> None:
    agent = ready_agent()
    agent.tell(CancelRequest(request_id=7), src=GATEWAY)
    assert agent.told() == [Cancel(request_id=7)]
    agent.engine(Cancelled(request_id=7, known=False))
    assert agent.sent() == [(GATEWAY, RequestCancelled(request_id=7, known=False))]
    young = Agent()
    young.tell(CancelRequest(request_id=7), src=GATEWAY)
    assert young.sent() == [(GATEWAY, RequestCancelled(request_id=7, known=False))]


@pytest.mark.spec("S1 6.11")
def test_an_answer_without_a_listener_ends_the_request() -> None:
    agent = ready_agent()
    agent.tell(prompt(5))
    agent.told()
    delta = TextDelta(request_id=5, text="x")
    agent.tell(SendFailed(b"?" * 32, delta, "unroutable"))
    agent.tell(SendFailed(GATEWAY_INBOX, TextDelta(request_id=4, text="x"), "unroutable"))
    assert agent.told() == []
    agent.tell(SendFailed(GATEWAY_INBOX, delta, "peer_lost"))
    agent.tell(SendFailed(GATEWAY_INBOX, delta, "peer_lost"))
    assert agent.told() == [Cancel(request_id=5)]
    agent.engine(TokenDelta(request_id=5, text="y", tokens=1), Cancelled(request_id=5))
    assert agent.sent() == []
    agent.tell(prompt(6))
    assert agent.sent() == []


@pytest.mark.spec("S1 6.11", "S1 9.10")
def test_a_listener_that_is_out_of_reach_for_a_while_still_gets_its_one_terminal() -> None:
    """Found by tests/sim: the generation was cancelled in silence, and the prompt waited for ever."""
    agent = ready_agent()
    agent.tell(prompt(5))
    agent.told()
    agent.tell(SendFailed(GATEWAY_INBOX, TextDelta(request_id=5, text="x"), "link_down"))
    assert agent.told() == [Cancel(request_id=5)]
    agent.engine(Cancelled(request_id=5))
    assert agent.sent() == []
    fault = Fault(request_id=5, error="the answer was not delivered: link_down")
    for _ in range(2):
        agent.advance(2000)
        assert agent.sent() == [(GATEWAY_INBOX, fault)]
        agent.tell(SendFailed(GATEWAY_INBOX, fault, "link_down"))
    agent.tell(SendFailed(GATEWAY_INBOX, fault, "peer_lost"))
    agent.advance(2000)
    assert agent.sent() == []


@pytest.mark.spec("S1 9.10")
def test_a_done_that_was_not_delivered_is_said_again_but_never_after_lost_text() -> None:
    agent = ready_agent()
    done = Done(request_id=5, final_text="x", tokens_generated=1, elapsed_ms=1, prompt_tokens=1, finish_reason="stop")
    agent.tell(SendFailed(GATEWAY_INBOX, done, "link_down"))
    agent.advance(2000)
    assert agent.sent() == [(GATEWAY_INBOX, done)]
    agent.tell(SendFailed(GATEWAY_INBOX, TextDelta(request_id=5, text="x"), "link_down"))
    agent.tell(SendFailed(GATEWAY_INBOX, done, "link_down"))
    agent.advance(2000)
    assert [type(message) for _, message in agent.sent()] == [Fault]


def test_tokenizer_work_is_answered_in_order_at_its_reply_to() -> None:
    agent = ready_agent()
    other = b"h" * 32
    agent.tell(EncodePrompt(request_id=5, prompt="hi", raw=True, reply_to=GATEWAY_INBOX))
    agent.tell(DecodeTokens(request_id=6, tokens=[1, 2], reply_to=GATEWAY_INBOX))
    agent.tell(DecodeTokens(request_id=6, tokens=[3], last=True, reply_to=other))
    assert agent.told() == [
        EngineEncode(request_id=5, prompt="hi", raw=True),
        EngineDecode(request_id=6, tokens=[1, 2]),
        EngineDecode(request_id=6, tokens=[3], last=True),
    ]
    agent.engine(EngineDecoded(request_id=6, text="a"), EngineEncoded(request_id=5, tokens=[7]))
    agent.engine(EngineFault(request_id=6, error="no such token"))
    assert agent.sent() == [
        (GATEWAY_INBOX, TokensDecoded(request_id=6, text="a")),
        (GATEWAY_INBOX, PromptEncoded(request_id=5, tokens=[7])),
        (other, TokenizerFault(request_id=6, error="no such token")),
    ]


def test_tokenizer_work_needs_weights_and_has_a_bound() -> None:
    agent = Agent()
    agent.tell(EncodePrompt(request_id=5, prompt="hi", reply_to=GATEWAY_INBOX))
    ((_, fault),) = agent.sent()
    assert isinstance(fault, TokenizerFault) and "not ready" in fault.error
    agent = ready_agent()
    for number in range(TOKENIZER_JOBS_MAX + 1):
        agent.tell(DecodeTokens(request_id=5, tokens=[number], reply_to=GATEWAY_INBOX))
    ((_, fault),) = agent.sent()
    assert isinstance(fault, TokenizerFault) and fault.error.startswith("busy")
    assert len(agent.told()) == TOKENIZER_JOBS_MAX


@pytest.mark.spec("S1 6.5")
def test_a_fault_of_the_stage_is_the_one_fault_of_every_request() -> None:
    agent = ready_agent()
    agent.tell(prompt(5))
    agent.tell(EncodePrompt(request_id=6, prompt="hi", reply_to=GATEWAY_INBOX))
    agent.told()
    agent.tell(provision(layer_start=4))
    assert agent.sent_to(GATEWAY_INBOX) == [
        Fault(request_id=5, error="the stage already has another provision", lost=True),
        TokenizerFault(request_id=6, error="the stage already has another provision", lost=True),
    ]
    assert agent.told() == [Cancel(request_id=5)]
    agent.engine(Cancelled(request_id=5), EngineEncoded(request_id=6, tokens=[]))
    agent.tell(WorkerCrashed(), src_node=agent.system.node)
    assert agent.sent_to(GATEWAY_INBOX) == []


def test_a_stop_of_the_run_faults_the_active_request() -> None:
    agent = ready_agent()
    agent.tell(prompt(5))
    agent.tell(StopRun(run_id=RUN))
    assert agent.sent_to(GATEWAY_INBOX) == [Fault(request_id=5, error="the run is being stopped", lost=True)]
    agent.tell(prompt(6))
    ((_, fault),) = agent.sent()
    assert isinstance(fault, Fault) and "stopping" in fault.error
