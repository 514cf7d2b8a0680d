"""A worker of the pipeline is replaced under the active prompt: the client gets the text that it would have got."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from common.edge_records import decode_tokens
from common.effects import SendFailed
from common.messages.edge import BeginSequence
from common.messages.node_agent import DecodeTokens, EncodePrompt
from common.messages.prompt import TokenizerFault, TokensDecoded
from common.messages.serve import CloseRpc, ServingDisturbed, ServingFailed, ServingRestored
from services.prompt_gateway.token_edges import DropTokenEdges, EdgeDown
from tests.unit.pipeline.pipeline_rig import OPEN, STAGES, TOKEN_OUT, PipelineRig
from tests.unit.pipeline.test_pipeline_runtime import TEXT, texts
from tests.unit.prompt_gateway.rig import ORCHESTRATOR

RESTARTING = msgspec.structs.replace(OPEN, restart=True)


def rig_with(auto: str = "encode begin token decode cancel", length: int = 5) -> PipelineRig:
    return PipelineRig(auto, length=length).open(RESTARTING)


def replay_all(rig: PipelineRig) -> None:
    rig.auto = {"encode", "begin", "token", "decode", "cancel"}
    rig.settle()


@pytest.mark.parametrize("tokens", [0, 1, 3, 5])
@pytest.mark.parametrize("decoded", [0, 1, 3])
def test_the_history_goes_in_once_more_and_comes_out_once(tokens: int, decoded: int) -> None:
    rig = rig_with("encode begin")
    conn = rig.connect()
    rig.ask(conn, 7, "hello", max_tokens=5)
    for _ in range(tokens):
        rig.step("token")
    for _ in range(min(decoded, tokens)):
        rig.step("decode")
    before = texts(rig.lines(conn))
    stale = [(msg.request_id, msg.reply_to) for _, msg in rig.sent_to_stages if isinstance(msg, DecodeTokens)]
    rig.todo["decode"].clear()
    rig.hold()
    assert any(isinstance(effect, DropTokenEdges) for effect in rig.other)
    rig.injected.clear()
    rig.restore(RESTARTING)
    for request_id, reply_to in stale:
        rig.tell(TokensDecoded(request_id=request_id, text="stale "), dst=reply_to)
    replay_all(rig)
    *deltas, done = rig.lines(conn)
    assert before + texts(deltas) == TEXT == done["final_text"]
    assert (done["tokens_generated"], done["prompt_tokens"], done["finish_reason"]) == (5, 5, "length")
    records = [msgspec.json.decode(one.payload) for one in rig.h.observed()]
    observed = [record["detail"] for record in records if record["phase"] == "pipeline_token_out"]
    fresh = [detail["generated_index"] for detail in observed if not detail["replayed"]]
    assert fresh == [1, 2, 3, 4, 5], "a token that came before the restart is marked when it comes again"
    again = [detail["generated_index"] for detail in observed if detail["replayed"]]
    assert again == (list(range(1, tokens + 1)) if tokens < 5 else [])
    if tokens < 5:
        assert decode_tokens(rig.injected[0].payload) == [20, 21, 22, 23, 24] and rig.injected[0].begin
        assert rig.fed_back() == [10, 11, 12, 13], "each token of the answer once, in its own record"
        assert [record.sequence for record in rig.injected] == [0, 1, 2, 3, 4]
    else:
        assert not rig.injected, "all tokens were there: only their texts are asked for"
    (restored,) = [msg for msg in rig.to_orchestrator if isinstance(msg, ServingRestored)]
    assert restored.replayed == tokens
    rig.ask(conn, 8, "again")
    assert rig.lines(conn)[-1]["final_text"] == TEXT


def test_what_an_old_worker_says_about_its_end_is_no_fault_of_the_prompt() -> None:
    rig = rig_with("encode begin token")
    conn = rig.connect()
    rig.ask(conn, 1, "hello")
    decode = rig.todo["decode"].popleft()
    rig.tell(TokenizerFault(request_id=decode.request_id, error="the engine died", lost=True), dst=decode.reply_to)
    rig.tell(EdgeDown(TOKEN_OUT, "EdgeFault: gone"))
    disturbed = [msg.error for msg in rig.to_orchestrator if isinstance(msg, ServingDisturbed)]
    assert disturbed == ["the engine died"] and not rig.lines(conn)
    rig.todo["decode"].clear()
    rig.hold()
    rig.restore(RESTARTING)
    replay_all(rig)
    assert rig.lines(conn)[-1]["final_text"] == TEXT
    assert not [msg for msg in rig.to_orchestrator if isinstance(msg, ServingFailed)]


def test_an_own_fault_of_the_prompt_is_one_as_ever() -> None:
    rig = rig_with("encode begin token")
    conn = rig.connect()
    rig.ask(conn, 1, "hello")
    decode = rig.todo["decode"].popleft()
    rig.tell(TokenizerFault(request_id=decode.request_id, error="no such token"), dst=decode.reply_to)
    assert rig.lines(conn)[-1]["error"] == "tokenizer request failed: no such token"


def test_a_message_that_does_not_arrive_holds_the_prompt() -> None:
    rig = rig_with("")
    conn = rig.connect()
    rig.ask(conn, 1, "hello")
    (encode,) = rig.todo["encode"]
    rig.tell(SendFailed(STAGES[0], encode, "peer_lost"))
    (disturbed,) = [msg for msg in rig.to_orchestrator if isinstance(msg, ServingDisturbed)]
    assert "it was restarted" in disturbed.error
    rig.todo["encode"].clear()
    rig.hold()
    rig.restore(RESTARTING)
    replay_all(rig)
    assert rig.lines(conn)[-1]["final_text"] == TEXT


def test_a_client_that_leaves_while_nobody_works_frees_the_place_and_the_end_of_the_run_faults_the_rest() -> None:
    rig = rig_with("encode begin")
    first, second = rig.connect(), rig.connect()
    rig.ask(first, 1, "hello")
    rig.ask(second, 2, "next")
    rig.step("token")
    rig.hold()
    rig.close(first, "reset")
    rig.todo["cancel"].clear()
    rig.restore(RESTARTING)
    encodes = [msg for _, msg in rig.sent_to_stages if isinstance(msg, EncodePrompt)]
    assert encodes[-1].prompt == "next"
    rig.hold()
    rig.tell(CloseRpc(reason="the restarts are spent"), src=ORCHESTRATOR)
    (fault,) = rig.lines(second)
    assert (fault["type"], fault["error"]) == ("fault", "the restarts are spent")


def test_a_worker_that_says_other_tokens_is_a_fault_of_the_prompt() -> None:
    rig = rig_with("encode begin decode cancel")
    conn = rig.connect()
    rig.ask(conn, 1, "hello")
    rig.step("token")
    rig.step("token")
    rig.hold()
    rig.restore(RESTARTING)
    rig.generated = 3
    rig.todo["token"][0] = replace(rig.todo["token"][0], begin=False)  # its model goes on counting
    rig.step("token")
    fault = rig.lines(conn)[-1]
    assert fault["type"] == "fault" and "now gives token 13 as number 1 of the answer, it was 10" in fault["error"]


def test_a_sampled_prompt_gets_a_seed_so_that_a_replay_draws_the_same() -> None:
    rig = rig_with("encode begin")
    conn = rig.connect()
    rig.ask(conn, 1, "hello", sampling={"temperature": 0.7})
    rig.hold()
    rig.restore(RESTARTING)
    seeds = {msg.sampling.seed for _, msg in rig.sent_to_stages if isinstance(msg, BeginSequence) and msg.sampling}
    assert len(seeds) == 1 and seeds != {None}


class ReplayMachine(RuleBasedStateMachine):
    """Clients come, ask and leave, every part answers when it likes, and workers are replaced at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = PipelineRig("", length=3).open(RESTARTING)
        self.asked: dict[int, int] = {}
        self.gone: set[int] = set()
        self.held = False

    @rule(cap=st.integers(0, 4))
    def ask(self, cap: int) -> None:
        if len(self.asked) < 10:
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

    @precondition(lambda self: not self.held)
    @rule(lost=st.sets(st.sampled_from(["encode", "begin", "decode", "cancel"])))
    def lose(self, lost: set[str]) -> None:
        """What the old worker was asked for is not answered any more; other old answers may still be on their way."""
        self.held = True
        for name in lost:
            self.rig.todo[name].clear()
        self.rig.hold()

    @precondition(lambda self: self.held)
    @rule()
    def restore(self) -> None:
        self.held = False
        self.rig.restore(RESTARTING)

    def teardown(self) -> None:
        if self.held:
            self.restore()
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


TestReplayMachine = ReplayMachine.TestCase
TestReplayMachine.settings = settings(max_examples=60, stateful_step_count=40)
