"""The pipeline prompt runtime in its gateway: S1 5.8, 6.10, 7.10, 9.12, 9.13; design.md 4 and 6 rows 13, 21, 36."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from common.edge_records import Record, decode_tokens, encode_tokens
from common.effects import SendFailed
from common.limits import TEXT_DELTA_COALESCE_MS
from common.messages.edge import BeginSequence
from common.messages.node_agent import CancelRequest, DecodeTokens, EncodePrompt
from common.messages.orchestrator import StageAssignment
from common.messages.prompt import TokenizerFault, TokensDecoded
from common.messages.serve import CloseRpc, ServingFailed, TokenEndpointFailed, TokenEndpointReady, TokenOutListening
from services.orchestrator.run_fsm import OrchestratorRun
from services.prompt_gateway.token_edges import CloseTokenEdges, DialTokenIn, EdgeDown
from tests.unit.pipeline.pipeline_rig import EOS, STAGES, TOKEN_OUT, PipelineRig
from tests.unit.prompt_gateway.rig import ORCHESTRATOR

TEXT = "10 11 12 13 14 "


def texts(lines: list[dict[str, object]]) -> str:
    return "".join(str(line["text"]) for line in lines if line["type"] == "text_delta")


@pytest.mark.spec("S1 9.12", "S1 6.10", "S1 5.8")
def test_a_prompt_goes_through_encode_begin_tokens_and_decode() -> None:
    rig = PipelineRig().open()
    conn = rig.connect()
    rig.ask(conn, 7, "hello")
    *deltas, done = rig.lines(conn)
    assert texts(deltas) == done["final_text"] == TEXT
    assert (done["type"], done["request_id"], done["finish_reason"]) == ("done", 7, "stop")
    assert (done["tokens_generated"], done["prompt_tokens"]) == (5, 5)
    first = rig.injected[0]
    assert first.begin and first.end and decode_tokens(first.payload) == [20, 21, 22, 23, 24]
    assert rig.fed_back() == [10, 11, 12, 13, 14], "EOS is not fed back"
    assert [r.sequence for r in rig.injected] == [r.object_id for r in rig.injected] == [0, 1, 2, 3, 4, 5]
    encodes = [dst for dst, msg in rig.sent_to_stages if isinstance(msg, EncodePrompt)]
    decodes = [dst for dst, msg in rig.sent_to_stages if isinstance(msg, DecodeTokens)]
    begins = [dst for dst, msg in rig.sent_to_stages if isinstance(msg, BeginSequence)]
    assert encodes == [STAGES[0]] and set(decodes) == {STAGES[-1]} and begins == STAGES
    # The sequence goes on, the position starts anew: only BEGIN says so.
    rig.ask(conn, 8, "again")
    assert rig.lines(conn)[-1]["final_text"] == TEXT
    assert rig.injected[6].begin and rig.injected[6].sequence == 6


@pytest.mark.parametrize(("max_tokens", "foretold"), [(0, 5), (5, 4), (3, 2), (1, 0)])
def test_each_token_that_is_fed_back_was_foretold(max_tokens: int, foretold: int) -> None:
    """The rig compares: what `foretell` says is what is done. The last token of an answer is fed back to nobody."""
    rig = PipelineRig().open()
    conn = rig.connect()
    assert rig.gateway.foretell() is None
    rig.ask(conn, 7, "hello", max_tokens=max_tokens)
    assert rig.lines(conn)[-1]["type"] == "done"
    assert rig.times_foretold == foretold and rig.gateway.foretell() is None


def test_nothing_is_foretold_that_may_not_happen() -> None:
    """The context's end, a cancelled prompt, a run that waits for a worker."""
    rig = PipelineRig("encode begin decode cancel").open()
    conn = rig.connect()
    rig.ask(conn, 7, "x" * 38)  # the context holds 40
    rig.step("token")
    assert rig.gateway.foretell() is None, "there is no room for a second one"
    rig.step("token")
    rig.ask(conn, 8, "hello")
    rig.step("token")
    assert rig.gateway.foretell() is not None
    rig.hold()
    assert rig.gateway.foretell() is None
    rig = PipelineRig("encode begin decode").open()
    conn = rig.connect()
    rig.ask(conn, 9, "hello")
    rig.step("token")
    assert rig.gateway.foretell() is not None
    rig.close(conn)
    assert rig.gateway.foretell() is None


def test_the_token_endpoints_are_opened_and_closed() -> None:
    rig = PipelineRig().open()
    kinds = [type(msg) for msg in rig.to_orchestrator]
    assert kinds[:3] == [TokenOutListening, TokenEndpointReady, TokenEndpointReady]
    assert rig.to_orchestrator[0].endpoint.candidates == ["ipc:///gw"]
    assert [msg.endpoint for msg in rig.to_orchestrator[1:3]] == ["TokenIn", "TokenOut"]
    assert any(isinstance(effect, DialTokenIn) for effect in rig.other)
    rig.tell(CloseRpc(reason="over"), src=ORCHESTRATOR)
    assert any(isinstance(effect, CloseTokenEdges) for effect in rig.other)


@pytest.mark.parametrize(
    ("cap", "stop", "text", "reason", "tokens"),
    [
        (2, [], "10 11 ", "length", 2),
        (5, [], TEXT, "length", 5),
        (0, ["12"], "10 11 ", "stop", 3),
        (0, [" 1"], "10", "stop", 2),
        (1, [], "10 ", "length", 1),
    ],
)
def test_caps_and_stop_strings_are_those_of_direct_mode(
    cap: int, stop: list[str], text: str, reason: str, tokens: int
) -> None:
    rig = PipelineRig().open()
    conn = rig.connect()
    rig.ask(conn, 1, "hello", max_tokens=cap, stop=stop or None)
    *deltas, done = rig.lines(conn)
    assert (done["final_text"], done["finish_reason"], done["tokens_generated"]) == (text, reason, tokens)
    assert texts(deltas) == text
    if cap:
        assert len(rig.fed_back()) == cap - 1, "the capped token is not fed back"
    rig.ask(conn, 2, "next")
    assert rig.lines(conn)[-1]["final_text"] == TEXT


def test_the_context_ends_a_prompt() -> None:
    rig = PipelineRig(length=100).open()
    conn = rig.connect()
    rig.ask(conn, 1, "x" * 30)
    done = rig.lines(conn)[-1]
    assert (done["finish_reason"], done["tokens_generated"], done["prompt_tokens"]) == ("context", 10, 30)
    for prompt, says in (
        ("x" * 40, "the prompt has 40 tokens, but the context holds 40 and needs room"),
        ("", "empty"),
    ):
        rig.ask(conn, 2, prompt)
        fault = rig.lines(conn)[-1]
        assert fault["type"] == "fault" and says in fault["error"]
    rig.ask(conn, 3, "ok")
    assert rig.lines(conn)[-1]["type"] == "done"


def test_a_token_is_fed_back_before_it_is_decoded_and_text_keeps_its_order() -> None:
    rig = PipelineRig("encode begin token").open()
    conn = rig.connect()
    rig.ask(conn, 1, "hello")
    assert rig.fed_back() == [10, 11, 12, 13, 14] and not rig.lines(conn)
    while rig.todo["decode"]:
        rig.step("decode")
    *deltas, done = rig.lines(conn)
    assert texts(deltas) == TEXT == done["final_text"] and done["finish_reason"] == "stop"


@pytest.mark.spec("S1 6.4")
def test_the_runs_machine_follows_the_tokens() -> None:
    """Coalesced: without a gap, and the end of each answer at once."""
    rig = PipelineRig().open()
    conn = rig.connect()
    rig.ask(conn, 1, "hello", max_tokens=3)
    rig.ask(conn, 2, "again")
    following = OrchestratorRun(1)
    following.plan_available([StageAssignment(stage_index=0, node_id=2)])
    following.pool_is_ready([2])
    for msg in rig.received:
        following.token_received(msg.sequence, msg.token_id, msg.eos, msg.count)
    assert following.expected_token_sequence == rig.out_sequence == 9
    assert following.state == "generating tokens" and not following.terminal
    assert (rig.received[-1].eos, rig.received[-1].token_id) == (True, EOS) and len(rig.received) < 9


def test_at_most_32_decodes_are_on_their_way() -> None:
    rig = PipelineRig("encode begin token", length=36).open()
    conn = rig.connect()
    rig.ask(conn, 1, "hi")
    assert len(rig.fed_back()) == 36 and len(rig.todo["decode"]) == 32
    while rig.todo["decode"]:
        rig.step("decode")
        assert len(rig.todo["decode"]) <= 32
    assert rig.lines(conn)[-1]["tokens_generated"] == 36


def decodes(rig: PipelineRig) -> list[list[int]]:
    return [msg.tokens for _, msg in rig.sent_to_stages if isinstance(msg, DecodeTokens)]


def test_tokens_that_come_fast_are_decoded_together() -> None:
    """The first at once, so that it is seen; the others at most 20 ms later, also when no token follows."""
    rig = PipelineRig("encode begin decode cancel", length=9, token_ms=0).open()
    conn = rig.connect()
    rig.ask(conn, 1, "hi")
    for _ in range(4):
        rig.step("token")
    assert decodes(rig) == [[10]]
    rig.h.advance(TEXT_DELTA_COALESCE_MS)
    rig.settle()
    assert decodes(rig) == [[10], [11, 12, 13]]
    assert [line["text"] for line in rig.lines(conn) if line["type"] == "text_delta"] == ["10 ", "11 12 13 "]
    rig.auto.add("token")
    rig.settle()
    assert decodes(rig)[2:] == [[14, 15, 16, 17, 18]], "the end does not wait"
    assert rig.lines(conn)[-1]["tokens_generated"] == 9


def test_a_stop_string_in_the_middle_of_what_was_decoded_together_counts_as_if_alone() -> None:
    rig = PipelineRig("encode begin token decode cancel", length=30, token_ms=1).open()
    conn = rig.connect()
    rig.ask(conn, 1, "hi", stop=["13 "])
    done = rig.lines(conn)[-1]
    assert (done["final_text"], done["tokens_generated"], done["finish_reason"]) == ("10 11 12 ", 4, "stop")


@pytest.mark.parametrize(("text", "lengths"), [("ab", [1, 1]), ("ab", [1]), ("ab", [3])])
def test_a_decoder_that_answers_other_tokens_faults_the_prompt(text: str, lengths: list[int]) -> None:
    rig = PipelineRig("encode begin token cancel", length=3).open()
    conn = rig.connect()
    rig.ask(conn, 1, "hi")
    asked = rig.todo["decode"][0]
    rig.tell(TokensDecoded(request_id=asked.request_id, text=text, lengths=lengths), dst=asked.reply_to)
    says = f"the decoder's answer does not fit its question: 2 characters, lengths {lengths} for 1 tokens"
    assert rig.lines(conn)[-1]["error"] == says


@pytest.mark.spec("S1 9.10", "S1 10.10")
def test_an_answer_whose_end_could_not_be_sent_to_the_decoder_ends() -> None:
    """All its text was there; the last DecodeTokens, without tokens, failed with the bus, and nobody waited for it."""
    rig = PipelineRig("encode begin token cancel", length=1).open()
    conn = rig.connect()
    rig.ask(conn, 1, "hi")
    rig.step("decode")
    (end,) = rig.todo["decode"]
    assert end.last and not end.tokens
    rig.tell(SendFailed(STAGES[-1], end, "link_down"))
    fault = rig.lines(conn)[-1]
    assert fault["type"] == "fault" and "could not be sent to the worker" in fault["error"]


# --- faults -------------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 9.13", "S1 10.10")
@pytest.mark.parametrize(
    ("record", "says"),
    [
        (Record(1, 1, encode_tokens([4])), "pipeline token sequence violation: expected 0, got 1"),
        (Record(5, 0, encode_tokens([4])), "pipeline token sequence violation: expected 0, got object 5"),
        (Record(0, 0, encode_tokens([4, 5])), "invalid token-out record: 8 bytes instead of one u32"),
    ],
)
def test_a_record_out_of_order_ends_serving_with_one_fault(record: Record, says: str) -> None:
    rig = PipelineRig("encode begin").open()
    conn = rig.connect()
    rig.ask(conn, 1, "hello")
    rig.token_out(record)
    rig.settle()
    (fault,) = rig.lines(conn)
    assert fault["type"] == "fault" and says in fault["error"]
    assert [msg.error for msg in rig.to_orchestrator if isinstance(msg, ServingFailed)] == [fault["error"]]


@pytest.mark.spec("S1 9.12", "S1 10.10")
@pytest.mark.parametrize("at", ["encode", "begin", "decode"])
def test_a_tokenizer_fault_is_the_fault_of_the_active_prompt_alone(at: str) -> None:
    auto = "encode begin token decode cancel".replace(at, "")
    rig = PipelineRig(auto).open()
    conn = rig.connect()
    rig.ask(conn, 1, "hello")
    item = rig.todo[at].popleft()
    asked = item[1] if isinstance(item, tuple) else item
    foreign = TokenizerFault(request_id=asked.request_id + 9, error="not yours")
    rig.tell(foreign, dst=asked.reply_to)
    assert not [line for line in rig.lines(conn) if line["type"] == "fault"]
    rig.tell(TokenizerFault(request_id=asked.request_id, error="no such token"), dst=asked.reply_to)
    fault = rig.lines(conn)[-1]
    assert fault["type"] == "fault" and fault["error"] == "tokenizer request failed: no such token"
    assert not [msg for msg in rig.to_orchestrator if isinstance(msg, ServingFailed)]
    assert {dst for dst, msg in rig.sent_to_stages if isinstance(msg, CancelRequest)} == set(STAGES)
    rig.todo[at].clear()
    rig.auto.add(at)
    rig.ask(conn, 2, "again")
    assert rig.lines(conn)[-1]["final_text"] == TEXT


def test_a_broken_edge_ends_serving() -> None:
    rig = PipelineRig("encode begin").open()
    conn = rig.connect()
    rig.ask(conn, 1, "hello")
    rig.tell(EdgeDown(TOKEN_OUT, "EdgeFault: edge 4: gone"))
    (fault,) = rig.lines(conn)
    assert fault["error"] == "pipeline token-out stream fault: EdgeFault: edge 4: gone"
    assert [type(msg) for msg in rig.to_orchestrator][-2:] == [TokenEndpointFailed, ServingFailed]


def test_a_cancel_waits_for_every_stage_and_the_late_token_advances_the_sequence() -> None:
    rig = PipelineRig("encode begin decode").open()
    conn = rig.connect()
    rig.ask(conn, 1, "hello")
    rig.step("token")
    rig.close(conn, "reset")
    other = rig.connect()
    rig.ask(other, 2, "next")
    assert len(rig.todo["cancel"]) == len(STAGES) and not rig.todo["encode"]
    rig.step("cancel")
    rig.step("cancel")
    assert not [r for r in rig.injected if r.begin][1:], "the next prompt waits for the last stage"
    rig.step("cancel")
    assert rig.injected[-1].begin
    rig.auto.add("token")
    rig.settle()
    assert rig.lines(other)[-1]["final_text"] == TEXT


def test_an_object_that_the_pipeline_gave_up_is_a_fault_of_its_prompt_only() -> None:
    rig = PipelineRig("encode begin decode cancel").open()
    conn = rig.connect()
    rig.ask(conn, 1, "hello")
    rig.todo["token"].clear()
    rig.token_out(Record(0, 0, b""))
    rig.settle()
    assert rig.lines(conn)[-1]["error"] == "the pipeline gave up object 0"
    rig.auto.add("token")
    rig.ask(conn, 2, "again")
    assert rig.lines(conn)[-1]["final_text"] == TEXT


# --- any order ----------------------------------------------------------------------------------------------------
class PipelineMachine(RuleBasedStateMachine):
    """Clients come, ask and leave; every part of the pipeline answers when it likes. Each prompt ends exactly once,
    with the text it would have alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = PipelineRig("", length=3).open()
        self.asked: dict[int, int] = {}
        self.gone: set[int] = set()

    @rule(cap=st.integers(0, 4))
    def ask(self, cap: int) -> None:
        if len(self.asked) < 12:
            conn = self.rig.connect()
            self.asked[conn] = cap
            self.rig.ask(conn, conn, "hello", max_tokens=cap)

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        conn = sorted(self.asked)[which % len(self.asked)]
        self.gone.add(conn)
        self.rig.close(conn, "reset")

    @rule(name=st.sampled_from(["encode", "begin", "token", "decode", "cancel"]), count=st.integers(1, 5))
    def answer(self, name: str, count: int) -> None:
        for _ in range(count):
            if self.rig.todo[name]:
                self.rig.step(name)

    def teardown(self) -> None:
        self.rig.auto = {"encode", "begin", "token", "decode", "cancel"}
        self.rig.settle()
        assert not [msg for msg in self.rig.to_orchestrator if isinstance(msg, ServingFailed)]
        for conn, cap in self.asked.items():
            if conn in self.gone:
                continue
            lines = self.rig.lines(conn)
            assert [line["type"] for line in lines if line["type"] != "text_delta"] == ["done"], lines
            wanted = "10 11 12 "[: 3 * cap] if cap and cap < 4 else "10 11 12 "
            assert lines[-1]["final_text"] == texts(lines) == wanted


TestPipelineMachine = PipelineMachine.TestCase
TestPipelineMachine.settings = settings(max_examples=60, stateful_step_count=40)
