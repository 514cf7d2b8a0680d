"""Playbooks of the gateway: opening, direct prompts, the one-active rule, cancel, protocol errors, closing."""

from __future__ import annotations

import pytest

from common.addresses import Role
from common.effects import Exit, OwnerGone, StopSignal
from common.limits import (
    CLIENT_BUFFER_BYTES_MAX,
    LEASE_TTL_MS,
    PROMPT_CANCEL_MS,
    PROMPT_QUEUE_LEN_MAX,
    RPC_CLOSED_MS,
    RPC_CONNECTIONS_MAX,
)
from common.messages.node_agent import Sampling
from common.messages.serve import (
    CloseRpc,
    OpenPromptRpc,
    PromptRpcFailed,
    PromptRpcReady,
    RpcClosed,
    ServingFailed,
    ShutdownRequested,
)
from common.messages.service import Lease, LeaseKept, RunEnded
from services.prompt_gateway.core import RpcState
from services.prompt_gateway.tcp import ListenFailed, Listening, ListenTcp, StopListening
from tests.unit.prompt_gateway.rig import AGENT, OPEN, ORCHESTRATOR, PORT, Rig


def kinds(lines: list[dict[str, object]]) -> list[object]:
    return [line["type"] for line in lines]


# --- opening ----------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 4.10", "S1 9.4")
def test_the_listener_is_bound_only_when_the_orchestrator_says_so() -> None:
    rig = Rig()
    assert rig.other == []
    rig.tell(OPEN, src=ORCHESTRATOR)
    assert rig.other == [ListenTcp("127.0.0.1", PORT)]
    assert rig.reports() == []
    rig.tell(Listening("127.0.0.1", PORT))
    assert rig.reports() == [PromptRpcReady(addr=f"127.0.0.1:{PORT}")]
    rig.tell(OPEN, src=ORCHESTRATOR)
    assert rig.reports() == [PromptRpcReady(addr=f"127.0.0.1:{PORT}")]
    assert rig.other == [ListenTcp("127.0.0.1", PORT)]


def test_port_zero_is_answered_with_the_real_port() -> None:
    rig = Rig(rpc_bind="[::1]:0")
    rig.tell(OPEN, src=ORCHESTRATOR)
    rig.tell(Listening("::1", 40001))
    assert rig.reports() == [PromptRpcReady(addr="[::1]:40001")]


@pytest.mark.spec("S1 4.10", "S1 10.9")
def test_a_bind_failure_is_a_start_up_failure_that_names_the_way_out() -> None:
    rig = Rig()
    rig.tell(OPEN, src=ORCHESTRATOR)
    rig.tell(ListenFailed("Address already in use", True))
    (failed,) = rig.reports()
    assert isinstance(failed, PromptRpcFailed)
    assert f"127.0.0.1:{PORT}" in failed.error
    assert "[prompt] rpc_addr" in failed.error
    # And the next run may try again.
    rig.open()
    assert isinstance(rig.reports()[0], PromptRpcReady)


@pytest.mark.parametrize(
    ("rig", "msg", "names"),
    [
        (Rig(rpc_bind="0.0.0.0:1"), OPEN, "allow_remote = true"),
        (Rig(rpc_bind="example.org:1"), OPEN, "neither an IP address"),
        (
            Rig(),
            OpenPromptRpc(**{**{f: getattr(OPEN, f) for f in OPEN.__struct_fields__}, "mode": "batch"}),
            "'batch'",
        ),
    ],
)
def test_what_cannot_be_opened(rig: Rig, msg: OpenPromptRpc, names: str) -> None:
    rig.tell(msg, src=ORCHESTRATOR)
    (failed,) = rig.reports()
    assert isinstance(failed, PromptRpcFailed)
    assert names in failed.error
    assert rig.other == []


def test_remote_binds_are_possible_on_purpose() -> None:
    rig = Rig(rpc_bind="0.0.0.0:1", allow_remote=True)
    rig.tell(OPEN, src=ORCHESTRATOR)
    assert rig.other == [ListenTcp("0.0.0.0", 1)]


def test_two_runs_do_not_share_the_rpc() -> None:
    rig = Rig().open()
    other = OpenPromptRpc(
        run_id=2, node_id=1, mode="direct", encode_actor=AGENT, decode_actor=AGENT, nodes=[], eos_tokens=[]
    )
    rig.reports()
    rig.tell(other, src=ORCHESTRATOR)
    (failed,) = rig.reports()
    assert isinstance(failed, PromptRpcFailed)
    assert "run 1" in failed.error


# --- a prompt ---------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 4.11", "S1 5.7", "S1 6.9", "S1 7.8", "S1 7.9", "S1 9.10", "S1 9.11")
def test_a_direct_prompt_streams_and_ends_with_done() -> None:
    rig = Rig().open()
    conn = rig.connect()
    rig.ask(conn, request_id=77, prompt="Name three colors.", max_tokens=9, stop=["\n"], sampling={"top_k": 3})
    (infer,) = rig.prompts()
    assert (infer.prompt, infer.max_tokens, infer.stop, infer.raw) == ("Name three colors.", 9, ["\n"], False)
    assert infer.sampling == Sampling(top_k=3)
    assert infer.request_id != 77
    assert infer.reply_to not in (rig.h.address, AGENT)
    rig.delta(infer, "red")
    assert rig.lines(conn) == [{"type": "text_delta", "request_id": 77, "text": "red"}]
    rig.delta(infer, ", blue")
    rig.done(infer, "red, blue")
    assert rig.lines(conn) == [
        {"type": "text_delta", "request_id": 77, "text": ", blue"},
        {
            "type": "done",
            "request_id": 77,
            "final_text": "red, blue",
            "tokens_generated": 2,
            "elapsed_ms": 30,
            "prompt_tokens": 5,
            "finish_reason": "stop",
        },
    ]
    # The response stream is complete, whatever else comes; the connection serves the next prompt.
    rig.delta(infer, "late")
    rig.done(infer)
    assert rig.lines(conn) == []
    rig.ask(conn, request_id=77)
    (again,) = rig.prompts()
    assert again.request_id not in (infer.request_id, 77)
    rig.fault(again, "out of memory")
    assert rig.lines(conn) == [{"type": "fault", "request_id": 77, "error": "out of memory"}]
    assert rig.cancels() == []
    assert rig.reports()[1:] == []


@pytest.mark.spec("S1 8.5")
def test_records_of_a_prompt_hold_counts_and_never_its_text() -> None:
    rig = Rig().open()
    conn = rig.connect()
    rig.ask(conn, request_id=5, prompt="sécret", max_tokens=4)
    (infer,) = rig.prompts()
    rig.delta(infer, "hidden é", tokens=2)
    rig.done(infer, "hidden é")
    rig.delta(infer, "late")
    records = rig.records()
    assert all(record["type"] == "OrchPromptEvent" and record["run_id"] == 1 for record in records)
    assert all(record["request_id"] == 5 for record in records)
    assert all(record["detail"]["prompt_id"] == infer.request_id for record in records)
    assert all(record["detail"]["unix_ms"] >= 1_800_000_000_000 for record in records), "when, by the gateway's clock"
    own = {"prompt_id", "unix_ms"}
    seen = [(r["phase"], r["status"], {k: v for k, v in r["detail"].items() if k not in own}) for r in records]
    sent = {"node_actor": AGENT[:8].hex(), "reply_to": infer.reply_to[:8].hex()}
    counts = {"tokens_generated": 2, "prompt_tokens": 5, "elapsed_ms": 30, "finish_reason": "stop"}
    assert seen == [
        ("prompt_work", "observed", {"prompt_bytes": 7, "max_tokens": 4}),
        ("node_prompt_send", "started", sent),
        ("node_prompt_send", "ready", sent),
        (
            "node_prompt_event",
            "observed",
            {"event": "text_delta", "terminal": False, "text_bytes": 9, "tokens": 2},
        ),
        ("node_prompt_event", "observed", {"event": "done", "terminal": True, "final_text_bytes": 9, **counts}),
        ("prompt_complete", "ready", {**counts, "deltas": 1, "tokens": 2, "text_bytes": 9}),
        (
            "node_prompt_event",
            "dropped",
            {"reason": "no_active_prompt", "event": "text_delta", "active_request_id": None},
        ),
    ]
    assert "hidden" not in str(records)
    assert "cret" not in str(records)


@pytest.mark.spec("S1 2.5", "S1 7.8")
@pytest.mark.parametrize(
    ("default", "asked", "sent"), [(0, None, 0), (0, 0, 0), (50, None, 50), (50, 0, 50), (50, 9, 9)]
)
def test_max_tokens(default: int, asked: int | None, sent: int) -> None:
    rig = Rig(max_tokens=default).open()
    rig.ask(rig.connect(), max_tokens=asked)
    assert rig.prompts()[0].max_tokens == sent


@pytest.mark.spec("S1 6.12", "S1 5.7", "S1 6.9")
def test_events_of_another_request_are_dropped_with_a_record() -> None:
    rig = Rig().open()
    conn = rig.connect()
    rig.ask(conn, request_id=1)
    (first,) = rig.prompts()
    rig.done(first)
    rig.lines(conn)
    rig.ask(conn, request_id=2)
    (second,) = rig.prompts()
    rig.records()
    rig.delta(first, "stale")
    rig.fault(first)
    rig.cancelled(first.request_id)
    assert rig.lines(conn) == []
    dropped = rig.records()
    assert [(r["status"], r["request_id"], r["detail"]["reason"]) for r in dropped] == [
        ("dropped", 1, "request_mismatch")
    ] * 3
    assert {r["detail"]["active_request_id"] for r in dropped} == {2}
    rig.done(second)
    assert kinds(rig.lines(conn)) == ["done"]


# --- one active prompt --------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 9.9", "S1 4.11", "S1 7.9")
def test_other_connections_wait_in_order() -> None:
    rig = Rig().open()
    conns = [rig.connect() for _ in range(4)]
    for conn in conns:
        rig.ask(conn, request_id=1, prompt=f"p{conn}", **({"events": ["queued"]} if conn == conns[3] else {}))
    (infer,) = rig.prompts()
    order = []
    for _ in conns:
        order.append(infer.prompt)
        assert rig.prompts() == []
        rig.done(infer)
        infer = next(iter(rig.prompts()), infer)
    assert order == [f"p{conn}" for conn in conns]
    assert [kinds(rig.lines(conn)) for conn in conns[:3]] == [["done"]] * 3
    last = rig.lines(conns[3])
    assert kinds(last) == ["queued", "queued", "queued", "done"]
    assert [line["position"] for line in last[:3]] == [3, 2, 1]


@pytest.mark.spec("S1 9.10")
def test_a_full_queue_is_a_fault_and_the_connection_lives() -> None:
    rig = Rig().open()
    conns = [rig.connect() for _ in range(PROMPT_QUEUE_LEN_MAX + 2)]
    for conn in conns:
        rig.ask(conn)
    (infer,) = rig.prompts()
    (fault,) = rig.lines(conns[-1])
    assert fault["type"] == "fault"
    assert str(fault["error"]).startswith("queue full")
    rig.done(infer)
    rig.ask(conns[-1], request_id=2)
    assert rig.lines(conns[-1]) == []


@pytest.mark.spec("S1 2.5")
def test_a_second_prompt_on_a_busy_connection_is_a_protocol_error() -> None:
    rig = Rig().open()
    conn, other = rig.connect(), rig.connect()
    rig.ask(conn, request_id=1)
    rig.ask(other, request_id=9)
    (infer,) = rig.prompts()
    rig.delta(infer, "a")
    rig.ask(conn, request_id=2)
    lines = rig.lines(conn)
    assert kinds(lines) == ["text_delta", "fault", "error"]
    assert lines[1]["request_id"] == 1
    assert "request 2" in lines[2]["error"]
    assert conn in rig.closing
    # Nobody else is disturbed, but the slot is free only when the worker says so.
    assert rig.prompts() == []
    assert rig.cancels() == [infer.request_id]
    rig.cancelled(infer.request_id)
    (waiting,) = rig.prompts()
    rig.done(waiting)
    assert kinds(rig.lines(other)) == ["done"]


@pytest.mark.spec("S1 2.5")
def test_a_second_prompt_while_the_first_waits_in_the_queue() -> None:
    rig = Rig().open()
    busy, conn = rig.connect(), rig.connect()
    rig.ask(busy)
    rig.ask(conn, request_id=1)
    rig.say(conn, b'{"request_id":2,"prompt_text":"x"}\n{"request_id":3,"prompt_text":"x"}\n')
    assert kinds(rig.lines(conn)) == ["fault", "error"]
    assert rig.cancels() == []
    assert len(rig.gateway.loop.queue) == 0  # type: ignore[union-attr]


def test_bytes_that_follow_a_prompt_wait_until_they_are_a_line() -> None:
    rig = Rig().open()
    conn = rig.connect()
    rig.say(conn, b'{"request_id":1,"prompt_text":"x"}\n{"request_id":2,')
    (infer,) = rig.prompts()
    rig.done(infer)
    rig.say(conn, b'"prompt_text":"y"}\n')
    assert rig.prompts()[0].prompt == "y"
    assert kinds(rig.lines(conn)) == ["done"]


@pytest.mark.spec("S1 2.5", "S1 10.9")
@pytest.mark.parametrize("line", [b"garbage\n", b"\n", b'{"request_id":1}\n', b"\xff\xfe\n", b"x" * 1_100_000])
def test_a_malformed_line_ends_only_its_connection(line: bytes) -> None:
    rig = Rig().open()
    conn, other = rig.connect(), rig.connect()
    rig.ask(conn, request_id=4)
    (infer,) = rig.prompts()
    rig.ask(other)
    rig.say(conn, line)
    assert kinds(rig.lines(conn)) == ["fault", "error"]
    assert conn in rig.closing
    rig.cancelled(infer.request_id)
    (next_one,) = rig.prompts()
    rig.done(next_one)
    assert kinds(rig.lines(other)) == ["done"]
    idle = rig.connect()
    rig.say(idle, line)
    assert kinds(rig.lines(idle)) == ["error"]
    assert [r for r in rig.reports() if not isinstance(r, PromptRpcReady)] == []


# --- cancel -------------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 2.5", "S1 9.9")
def test_a_disconnect_cancels_and_the_slot_waits_for_the_worker() -> None:
    rig = Rig().open()
    conn, other = rig.connect(), rig.connect()
    rig.ask(conn)
    (infer,) = rig.prompts()
    rig.ask(other)
    rig.records()
    rig.close(conn, "Connection reset by peer")
    assert rig.cancels() == [infer.request_id]
    rig.delta(infer, "still")
    assert rig.prompts() == []
    rig.cancelled(infer.request_id)
    assert len(rig.prompts()) == 1
    steps = [(r["phase"], r["status"]) for r in rig.records() if r["detail"]["prompt_id"] == infer.request_id]
    assert steps == [
        ("prompt_complete", "cancelled"),
        ("node_prompt_event", "observed"),
        ("node_prompt_event", "observed"),
    ]


@pytest.mark.parametrize("end", ["done", "fault"])
def test_a_cancel_may_lose_the_race_against_the_end(end: str) -> None:
    rig = Rig().open()
    conn, other = rig.connect(), rig.connect()
    rig.ask(conn)
    (infer,) = rig.prompts()
    rig.ask(other)
    rig.close(conn)
    getattr(rig, end)(infer)
    (second,) = rig.prompts()
    rig.cancelled(infer.request_id, known=False)
    assert rig.prompts() == []
    rig.done(second)
    assert kinds(rig.lines(other)) == ["done"]
    rig.advance(PROMPT_CANCEL_MS * 2)
    assert [r for r in rig.reports() if isinstance(r, ServingFailed)] == []


def test_a_waiting_prompt_of_a_client_that_left_is_never_sent() -> None:
    rig = Rig().open()
    busy, conn, last = rig.connect(), rig.connect(), rig.connect()
    rig.ask(busy)
    (infer,) = rig.prompts()
    rig.ask(conn)
    rig.ask(last, prompt="last", events=["queued"])
    rig.close(conn)
    assert [line["position"] for line in rig.lines(last)] == [2, 1]
    rig.done(infer)
    assert rig.prompts()[0].prompt == "last"
    assert rig.cancels() == []


@pytest.mark.spec("S1 10.10")
def test_a_worker_that_does_not_confirm_a_cancel_is_a_serving_failure() -> None:
    rig = Rig().open()
    conn, other = rig.connect(), rig.connect()
    rig.ask(conn)
    (infer,) = rig.prompts()
    rig.ask(other)
    rig.reports()
    rig.close(conn)
    rig.advance(PROMPT_CANCEL_MS - 1)
    assert rig.reports() == []
    rig.advance(1)
    (failed,) = rig.reports()
    assert isinstance(failed, ServingFailed)
    assert f"cancelled prompt {infer.request_id}" in failed.error
    assert kinds(rig.lines(other)) == ["fault"]
    # Later prompts get the same sentence at once, and only one failure is reported.
    rig.ask(other)
    assert rig.lines(other)[0]["error"] == failed.error
    rig.advance(60_000)
    assert rig.reports() == []


@pytest.mark.spec("S1 2.5")
def test_a_slow_client_is_cut_off_and_its_prompt_cancelled() -> None:
    rig = Rig().open()
    conn = rig.connect()
    rig.ask(conn)
    (infer,) = rig.prompts()
    rig.reads[conn] = False
    for _ in range(20):
        rig.delta(infer, "x" * 65_000)
    assert conn in rig.gone
    assert CLIENT_BUFFER_BYTES_MAX - 66_000 < len(rig.written[conn]) <= CLIENT_BUFFER_BYTES_MAX
    assert rig.cancels() == [infer.request_id]
    rig.cancelled(infer.request_id)
    rig.ask(rig.connect())
    assert len(rig.prompts()) == 1
    cancelled = [r for r in rig.records() if r["status"] == "cancelled"]
    assert [r["detail"]["reason"] for r in cancelled] == ["the client does not read its answer"]


def test_a_client_that_reads_gets_the_last_line_of_a_long_answer_with_its_last_text() -> None:
    rig = Rig().open()
    conn = rig.connect()
    rig.ask(conn)
    (infer,) = rig.prompts()
    rig.reads[conn] = False  # what comes in one turn is written before the kernel takes any of it
    rig.delta(infer, "x")
    rig.done(infer, "x" * CLIENT_BUFFER_BYTES_MAX)
    assert kinds(rig.lines(conn)) == ["text_delta", "done"]


def test_half_close_still_gets_the_answer_and_a_vanished_client_is_noticed() -> None:
    rig = Rig().open()
    conn = rig.connect()
    rig.say(conn, b'{"request_id":1,"prompt_text":"x"}')
    assert rig.prompts() == []
    rig.eof(conn)
    (infer,) = rig.prompts()
    assert rig.written[conn] == b" "
    rig.advance(1000)
    assert rig.written[conn] == b"   "
    rig.delta(infer, "a")
    rig.done(infer)
    assert kinds(rig.lines(conn)) == ["text_delta", "done"]
    assert conn in rig.closing
    gone = rig.connect()
    rig.ask(gone)
    (infer,) = rig.prompts()
    rig.eof(gone)
    rig.close(gone, "Broken pipe")
    assert rig.cancels() == [infer.request_id]
    idle = rig.connect()
    rig.eof(idle)
    assert idle in rig.closing


# --- limits of connections ----------------------------------------------------------------------------------------
def test_connections_over_the_limit_get_one_error_line() -> None:
    rig = Rig().open()
    conns = [rig.connect() for _ in range(RPC_CONNECTIONS_MAX)]
    over = rig.connect()
    (line,) = rig.lines(over)
    assert (line["type"], over in rig.closing) == ("error", True)
    rig.close(conns[0])
    assert rig.lines(rig.connect()) == []
    # Even those who never leave are bounded.
    for _ in range(2 * RPC_CONNECTIONS_MAX):
        conn = rig.next_conn
        rig.reads[conn] = False
        rig.connect()
    assert len(rig.gateway.connections) <= 2 * RPC_CONNECTIONS_MAX
    rig.advance(RPC_CLOSED_MS)
    assert len(rig.gateway.connections) == RPC_CONNECTIONS_MAX


# --- the end --------------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 2.5", "S1 9.17")
def test_a_shutdown_request_goes_to_the_orchestrator_once() -> None:
    rig = Rig().open()
    conn, other = rig.connect(), rig.connect()
    rig.ask(conn, request_id=3)
    (infer,) = rig.prompts()
    rig.reports()
    rig.say(conn, {"type": "shutdown"})
    rig.say(other, {"type": "shutdown"})
    assert rig.reports() == [ShutdownRequested(source="rpc")]
    rig.delta(infer, "a")
    rig.tell(CloseRpc(reason="shutdown requested by RPC"), src=ORCHESTRATOR)
    lines = rig.lines(conn)
    assert kinds(lines) == ["shutdown_accepted", "text_delta", "fault"]
    assert lines[2] == {"type": "fault", "request_id": 3, "error": "shutdown requested by RPC"}
    assert kinds(rig.lines(other)) == ["shutdown_accepted"]
    assert rig.reports() == [RpcClosed(settled=1)]


@pytest.mark.spec("S1 9.10", "S1 10.9")
def test_close_gives_active_and_queued_prompts_their_fault_and_forgets_the_run() -> None:
    rig = Rig().open()
    conns = [rig.connect() for _ in range(3)]
    for conn in conns:
        rig.ask(conn)
    (infer,) = rig.prompts()
    rig.reports()
    rig.tell(CloseRpc(reason="shutdown requested"), src=ORCHESTRATOR)
    assert [rig.lines(conn)[0]["error"] for conn in conns] == ["shutdown requested"] * 3
    assert rig.reports() == [RpcClosed(settled=3)]
    assert rig.cancels() == [infer.request_id]
    assert StopListening() in rig.other
    assert rig.gateway.state is RpcState.CLOSED
    rig.tell(CloseRpc(reason="again"), src=ORCHESTRATOR)
    assert rig.reports() == [RpcClosed(settled=3)]
    # The next run: ids go on, so a late event of the run before matches nothing.
    rig.open()
    conn = rig.connect()
    rig.ask(conn)
    (later,) = rig.prompts()
    assert later.request_id > infer.request_id
    rig.done(infer)
    assert rig.lines(conn) == []


def test_close_does_not_wait_for_ever_for_a_client_that_does_not_read() -> None:
    rig = Rig().open()
    conn = rig.connect()
    rig.reads[conn] = False
    rig.ask(conn)
    rig.reports()
    rig.tell(CloseRpc(reason="bye"), src=ORCHESTRATOR)
    assert rig.reports() == []
    rig.advance(RPC_CLOSED_MS)
    assert rig.reports() == [RpcClosed(settled=1)]
    assert conn in rig.gone


def test_close_before_the_bind_is_answered() -> None:
    rig = Rig()
    rig.tell(OPEN, src=ORCHESTRATOR)
    rig.tell(CloseRpc(reason="bye"), src=ORCHESTRATOR)
    assert rig.reports() == [RpcClosed(settled=0)]
    assert rig.other == [ListenTcp("127.0.0.1", PORT), StopListening()]
    rig.tell(Listening("127.0.0.1", PORT))
    assert rig.reports() == []


@pytest.mark.parametrize("event", [OwnerGone(), StopSignal("SIGTERM", 1)], ids=["owner", "signal"])
def test_when_nobody_is_left_to_serve_for_prompts_are_faulted_and_the_process_ends(event: object) -> None:
    rig = Rig().open()
    conn = rig.connect()
    rig.ask(conn)
    rig.tell(event)
    assert kinds(rig.lines(conn)) == ["fault"]
    assert rig.other[-1] == Exit(0)
    idle = Rig()
    idle.tell(event)
    assert idle.other == [Exit(0)]


def test_a_second_signal_does_not_wait_for_clients() -> None:
    rig = Rig().open()
    conn = rig.connect()
    rig.reads[conn] = False
    rig.ask(conn)
    rig.tell(StopSignal("SIGTERM", 1))
    assert Exit(0) not in rig.other
    rig.tell(StopSignal("SIGTERM", 2))
    assert Exit(0) in rig.other


def test_a_lost_lease_settles_the_run_and_the_gateway_waits_for_the_next() -> None:
    rig = Rig().open()
    conn = rig.connect()
    rig.ask(conn)
    rig.reports()
    rig.tell(Lease(ttl_ms=LEASE_TTL_MS), src=ORCHESTRATOR)
    assert rig.reports() == [LeaseKept()]
    rig.advance(LEASE_TTL_MS - 1)
    assert rig.lines(conn) == []
    rig.advance(1)
    assert kinds(rig.lines(conn)) == ["fault"]
    (failed,) = rig.reports()
    assert isinstance(failed, ServingFailed)
    assert "lease" in failed.error
    assert Exit(0) not in rig.other
    rig.open()
    assert isinstance(rig.reports()[0], PromptRpcReady)


def test_the_end_of_the_run_settles_what_is_left() -> None:
    rig = Rig().open()
    conn = rig.connect()
    rig.ask(conn)
    rig.tell(RunEnded(status=1, error="worker exited"), src=ORCHESTRATOR)
    assert rig.lines(conn)[0]["error"] == "worker exited"
    assert rig.gateway.state is RpcState.CLOSED
    assert rig.gateway.ROLE is Role.GATEWAY
