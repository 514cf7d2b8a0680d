"""[pipeline] feedback = "direct": whatever comes first is computed once, the other copy is checked, ends are clean."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.edge_records import Record, decode_tokens, encode_tokens
from tests.unit.pipeline.pipeline_rig import OPEN, PipelineRig
from tests.unit.pipeline.test_pipeline_runtime import TEXT, texts
from worker.engine.feedback import Compute, Consumed, FeedbackGate, FeedbackMismatch, fed_back

TOKEN_IN, FEEDBACK = 1, 4
FEEDING = msgspec.structs.replace(OPEN, feedback=True)


def token(at: int, value: int = 7) -> Record:
    return Record(at, at, encode_tokens([value]), end=True)


def over(at: int) -> Record:
    return Record(at, at, b"", end=True)


def prompt(at: int) -> Record:
    return Record(at, at, encode_tokens([1, 2]), begin=True, end=True)


def began(at: int = 0) -> FeedbackGate:
    gate = FeedbackGate(TOKEN_IN, FEEDBACK)
    assert gate.on_token_in(prompt(at)) == [Compute(TOKEN_IN, prompt(at))]
    return gate


def test_what_is_fed_runs_ahead_by_one_and_the_gateways_copy_confirms_it() -> None:
    gate = began()
    assert gate.on_feedback(token(1)) == [Compute(FEEDBACK, token(1))]
    assert gate.on_feedback(token(2)) == [], "the gateway has not said object 1 yet"
    assert gate.on_token_in(token(1)) == [Consumed(TOKEN_IN, token(1)), Compute(FEEDBACK, token(2))]


def test_the_gateway_may_be_first() -> None:
    gate = began()
    assert gate.on_token_in(token(1)) == [Compute(TOKEN_IN, token(1))]
    assert gate.on_feedback(token(1)) == [Consumed(FEEDBACK, token(1))]


@pytest.mark.parametrize("gateway_first", [True, False])
def test_two_that_differ_are_a_fault_with_both_tokens(gateway_first: bool) -> None:
    gate = began()
    steps = [lambda: gate.on_token_in(token(1, 8)), lambda: gate.on_feedback(token(1, 9))]
    first, second = steps if gateway_first else steps[::-1]
    first()
    with pytest.raises(FeedbackMismatch, match=r"object 1 is token \[8\] of the gateway and token \[9\] of the last"):
        second()


def test_the_end_stops_what_is_fed_and_the_next_sequence_does_not_see_it() -> None:
    gate = began()
    gate.on_feedback(token(1))
    gate.on_feedback(token(2))
    assert gate.on_token_in(over(1)) == [Consumed(TOKEN_IN, over(1)), Consumed(FEEDBACK, token(2))]
    assert gate.on_feedback(token(2)) == [Consumed(FEEDBACK, token(2))]
    assert gate.on_token_in(prompt(2)) == [Compute(TOKEN_IN, prompt(2))]
    assert gate.on_feedback(token(2)) == [Consumed(FEEDBACK, token(2))], "late, of the sequence before"
    assert gate.on_feedback(token(3)) == [Compute(FEEDBACK, token(3))]


def test_an_end_before_anything_ran_ahead_goes_through_the_pipeline() -> None:
    gate = began()
    assert gate.on_token_in(over(1)) == [Compute(TOKEN_IN, over(1))]
    assert gate.on_feedback(token(1)) == [Consumed(FEEDBACK, token(1))]


def test_the_last_stage_feeds_tokens_and_no_ends() -> None:
    assert fed_back(Record(4, 9, encode_tokens([5]))) == token(5, 5)
    assert fed_back(Record(4, 9, encode_tokens([2]), end=True)) is None and fed_back(Record(4, 9, b"")) is None


@settings(max_examples=300)
@given(st.data())
def test_in_any_order_each_object_is_computed_once_as_the_gateway_says(data: st.DataObject) -> None:
    gate = FeedbackGate(TOKEN_IN, FEEDBACK)
    to_first: deque[Record] = deque()
    fed: deque[Record] = deque()
    to_gateway: deque[Record] = deque()
    computed: list[Record] = []
    said: dict[int, bytes] = {}
    next_in, out_expected = 0, 0

    def inject(record_of: Record) -> None:
        nonlocal next_in
        assert record_of.object_id == next_in
        said[next_in] = record_of.payload
        to_first.append(record_of)
        next_in += 1

    def perform(steps: list[Compute | Consumed]) -> None:
        gate.check()
        for step in steps:
            if isinstance(step, Compute):
                computed.append(step.record)
                eos = data.draw(st.integers(0, 9)) == 0
                alive = bool(step.record.payload)
                payload = encode_tokens([2 if eos else 50 + step.record.object_id]) if alive else b""
                out = Record(step.record.object_id, step.record.object_id, payload, end=eos and alive)
                if (back := fed_back(out)) is not None:
                    fed.append(back)
                to_gateway.append(out)

    for _ in range(data.draw(st.integers(1, 3))):
        left, is_open = data.draw(st.integers(1, 5)), True
        first = next_in
        inject(prompt(next_in))
        while is_open:
            queues = [queue for queue in (to_first, fed, to_gateway) if queue]
            queue = data.draw(st.sampled_from(queues))
            record = queue.popleft()
            if queue is to_first:
                perform(gate.on_token_in(record))
            elif queue is fed:
                perform(gate.on_feedback(record))
            else:
                assert record.object_id == out_expected
                out_expected += 1
                if record.object_id < first:
                    continue
                left -= 1
                if record.end:
                    is_open = False
                elif not left:
                    inject(over(next_in))
                    is_open = False
                else:
                    inject(token(next_in, decode_tokens(record.payload)[0]))
    while to_first:
        perform(gate.on_token_in(to_first.popleft()))
    while fed:
        perform(gate.on_feedback(fed.popleft()))
    assert [record.object_id for record in computed] == list(range(next_in))
    for record in computed:
        assert said[record.object_id] in (record.payload, b""), "only an end may differ from what ran ahead"


# --- the gateway's part -------------------------------------------------------------------------------------------
def ends(rig: PipelineRig) -> list[int]:
    return [record.object_id for record in rig.injected if not record.payload]


@pytest.mark.parametrize(
    ("options", "text", "closed"),
    [({}, TEXT, []), ({"max_tokens": 2}, "10 11 ", [2]), ({"stop": ["12"]}, "10 11 ", [4])],
)
def test_the_gateway_says_the_end_of_a_sequence_but_for_eos(
    options: dict[str, object], text: str, closed: list[int]
) -> None:
    """A stop string is seen one decode late: the token that ran on is fed back before it, and is dropped."""
    rig = PipelineRig().open(FEEDING)
    conn = rig.connect()
    rig.ask(conn, 1, "hello", **options)
    *deltas, done = rig.lines(conn)
    assert done["final_text"] == texts(deltas) == text and ends(rig) == closed
    rig.ask(conn, 2, "next")
    assert rig.lines(conn)[-1]["final_text"] == TEXT, "what ran ahead was dropped"


def test_a_cancel_says_the_end_too() -> None:
    rig = PipelineRig("encode begin decode cancel").open(FEEDING)
    conn = rig.connect()
    rig.ask(conn, 1, "hello")
    rig.step("token")
    rig.close(conn, "reset")
    assert ends(rig) == [2]
    rig.auto.add("token")
    other = rig.connect()
    rig.ask(other, 2, "next")
    assert rig.lines(other)[-1]["final_text"] == TEXT
