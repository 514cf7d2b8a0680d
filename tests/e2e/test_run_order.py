"""One run from launch to exit with a real worker and the real model, judged by the archive (S1 3, 4, 5, 9)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.prompt_gateway.wire import DoneLine, FaultLine, QueuedLine, TextDeltaLine
from tests.e2e.stack import (
    COLOURS,
    COLOURS_TOKENS,
    LONG,
    READY_S,
    Record,
    Stack,
    StackError,
    assert_right,
    held_worker,
    wait_for,
)
from tools.prompt_client import PromptClient, PromptClientError

LOOKS = 20
MARKED = 4711  # a request id that no other prompt has
SECRET = "hf_thisMustNeverBeSeenAnywhere00"

ORDER = [
    ("config", "ready"),
    ("orchestrator_report_actor", "ready"),
    ("orchestrator_actor", "ready"),
    ("services", "ready"),
    ("node_provisioner", "ready"),
    ("node_spec", "ready"),
    ("provider_start", "started"),
    ("provider_start", "ready"),
    ("node_runtime_ready", "started"),
    ("node_runtime_ready", "ready"),
    ("node_route", "ready"),
    ("runtime_ready_ack", "sent"),
    ("runtime_ready_ack", "ready"),
    ("stage_provision", "started"),
    ("weights_loaded", "started"),
    ("stage_provision_send", "sent"),
    ("weights_loaded", "observed"),
    ("weights_loaded", "ready"),
    ("prompt_rpc", "started"),
    ("prompt_rpc", "ready"),
    ("prompt_loop", "ready"),
    ("serve_prompts", "started"),
]
"""S1 4's phases. SWIM's fact (node_swim) may come before or after the report; it is before the acknowledgement."""

STOP_ORDER = [
    ("shutdown", "started"),
    ("provider_stop", "started"),
    ("provider_stop", "ready"),
    ("orch_exit", "ready"),
]


@pytest.fixture(scope="module")
def run() -> Iterator[Stack]:
    """Serving; the first asker waits for it."""
    with Stack(environ={"HF_TOKEN": SECRET}) as stack:
        yield stack


def first_seen(records: list[Record], steps: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The order in which these steps were recorded first."""
    seen: list[tuple[str, str]] = []
    for record in records:
        if record.step in steps and record.step not in seen:
            seen.append(record.step)
    return seen


@pytest.mark.spec("S1 9.4", "S1 4.10")
def test_no_prompt_rpc_before_weights(run: Stack, tmp_path: Path) -> None:
    """However long they take: until the weights are loaded no process of the run listens on TCP at all."""
    with Stack(args=held_worker(tmp_path, "weights_loaded")) as held:
        assert held.process is not None
        looks, until = 0, time.monotonic() + READY_S
        while looks < LOOKS:
            assert time.monotonic() < until and held.process.poll() is None, held.stderr
            assert not listening({process.pid for process in held.left()})
            looks += held.archive.find("stage_provision_send", "sent") is not None
            time.sleep(0.1)
    host, _, port = run.addr().rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) in listening({run.pid("prompt_gateway")})


@pytest.mark.spec("S1 4", "S1 4.2", "S1 4.3", "S1 4.5", "S1 4.6", "S1 4.7", "S1 4.8", "S1 4.9", "S1 4.10", "S1 5.4")
@pytest.mark.spec("S1 5", "S1 5.2", "S1 5.5", "S1 7", "S1 9", "S1 9.5", "S1 9.6", "S1 9.7")
def test_phases_come_in_order(run: Stack) -> None:
    """Record by record, and each with what belongs to it."""
    run.addr()
    run.wait_record("serve_prompts", "started")
    archive = run.archive
    records = archive.lifecycle()
    assert first_seen(records, ORDER) == ORDER
    assert records[0].step == ("config", "ready")
    # The router counts from its own start on, whatever the run does.
    assert {r.channel for r in archive.records() if r.seq < records[0].seq} <= {"mvp.bus.envelopes"}
    assert all(record.body["run_id"] == 1 for record in records)
    assert all(record.body["node_id"] == 1 for record in records if record.phase != "worker_datastream")
    assert not [record for record in records if record.status == "failed"]

    # On a busy machine a worker that has just been seen may be suspected and seen again.
    swim = archive.find("node_swim", "ready")
    assert archive.one("provider_start", "ready").seq < swim.seq < archive.find("runtime_ready_ack", "sent").seq  # type: ignore[union-attr]

    spec = archive.one("node_spec", "ready").detail
    assert (spec["provider"], spec["worker_count"], spec["worker_node_ids"]) == ("process", 1, [1])
    ready, ack = archive.one("node_runtime_ready", "ready").detail, archive.one("runtime_ready_ack", "ready").detail
    assert ready["readiness_id"] == ack["readiness_id"] >= 1
    assert archive.one("node_route", "ready").detail["node_actor"] == ready["node_actor"]
    stage = archive.one("stage_provision", "started").detail
    assert stage["stages"][0]["layer_range"] == {"start": 0, "end_exclusive": None}
    assert stage["stage_count"] == 1


@pytest.mark.spec("S1 3", "S1 3.9", "S1 3.11", "S1 4.2")
def test_every_source_is_in_the_archive(run: Stack) -> None:
    """The orchestrator, SWIM, the provisioner and the worker's own stream; positions without a hole."""
    run.addr()
    wanted = {"mvp.orch.bootstrap", "mvp.swim.membership", "mvp.orch.stage_route", "mvp.provisioning.events"}
    wanted |= {"mvp.node.bootstrap", "mvp.node.stage"}
    wait_for("every source", lambda: wanted <= {record.channel for record in run.archive.records()}, 60)
    # The last one may be on its way into the file.
    frames = [json.loads(line) for line in run.archive.path.read_bytes().split(b"\n")[:-1]]
    assert [frame["arrival_seq"] for frame in frames] == list(range(len(frames)))
    positions: dict[tuple[str, str], list[int]] = {}
    for frame in frames:
        positions.setdefault((frame["source"], frame["stream"]), []).append(frame["position"])
    for stream, found in positions.items():
        assert found == list(range(found[0], found[0] + len(found))), stream
    assert {source for source, _ in positions} == {"orchestrator", "node_cluster"}


@pytest.mark.spec("S1 2", "S1 5.7", "S1 9.10", "S1 2.5")
def test_an_answer_streams_and_is_deterministic(run: Stack) -> None:
    """Several text_delta, then one done with the text of all of them; twice the same."""
    with run.client() as client:
        answers = []
        for _ in range(2):
            events = list(client.submit(COLOURS, max_tokens=COLOURS_TOKENS))
            deltas = [event.text for event in events if isinstance(event, TextDeltaLine)]
            assert len(deltas) > 2 and isinstance(events[-1], DoneLine) and len(events) == len(deltas) + 1
            assert "".join(deltas) == events[-1].final_text
            assert events[-1].tokens_generated <= COLOURS_TOKENS and events[-1].finish_reason in ("stop", "length")
            answers.append((events[-1].final_text, events[-1].tokens_generated, events[-1].prompt_tokens))
    assert answers[0] == answers[1]
    assert_right(answers[0][0])


@pytest.mark.spec("S1 2.5")
def test_max_tokens_is_honoured(run: Stack) -> None:
    """Exactly so many tokens, and the reason says so."""
    done = run.ask(LONG, max_tokens=7)
    assert (done.tokens_generated, done.finish_reason) == (7, "length")


@pytest.mark.spec("S1 9.9", "S1 4.11")
def test_a_second_client_waits_for_the_first(run: Stack) -> None:
    """One active prompt; the other one is queued and gets its answer after the first one's end."""
    with run.client() as first, run.client() as second:
        engine = run.pid("engine")
        ended = len(run.archive.prompts("prompt_complete"))
        os.kill(engine, signal.SIGSTOP)  # the first answer lasts until the second prompt is there
        try:
            stream = first.submit(LONG, max_tokens=100, request_id=MARKED)
            wait_for("the first one is active", lambda: MARKED in sent_to_worker(run), 60)
            waiting = second.submit(COLOURS, max_tokens=COLOURS_TOKENS, queued_events=True)
            assert isinstance(next(waiting), QueuedLine)
        finally:
            os.kill(engine, signal.SIGCONT)
        events, later = list(stream), list(waiting)
    assert isinstance(events[-1], DoneLine) and events[-1].tokens_generated == 100
    assert isinstance(later[-1], DoneLine)
    assert_right(later[-1].final_text)
    wait_for("both ends on record", lambda: len(run.archive.prompts("prompt_complete")) >= ended + 2, 60)
    sent, done = run.archive.prompts("node_prompt_send"), run.archive.prompts("prompt_complete")
    assert sent[-1].seq > done[-2].seq, "sent to the worker after the end of the first"
    dispatched = [record.detail["prompt_id"] for record in sent]
    assert dispatched == sorted(dispatched)


@pytest.mark.spec("S1 2.5", "S1 4.11")
def test_a_disconnect_frees_the_worker(run: Stack) -> None:
    """The engine stops the orphaned answer at once: the next prompt is answered long before it could have ended."""
    client = run.client()
    stream = client.submit(LONG)
    assert isinstance(next(stream), TextDeltaLine)
    client.close()
    started = time.monotonic()
    run.assert_answers()
    assert time.monotonic() - started < 60  # of the story that nobody waits for, minutes would be left

    def cancelled() -> list[Record]:
        return [record for record in run.archive.prompts() if record.status == "cancelled"]

    assert len(wait_for("the record", cancelled, 60)) == 1


@pytest.mark.spec("S1 10.9")
def test_clients_that_misbehave_disturb_nobody(run: Stack) -> None:
    """Garbage, half a line, 10 MB without an end: an error for them, the right answer for everybody else."""
    host, _, port = run.addr().rpartition(":")
    with run.client() as honest:
        stream = honest.submit(LONG, max_tokens=60)
        assert isinstance(next(stream), TextDeltaLine)
        assert talk(host, int(port), b"\x00\xffGET / HTTP/1.1\r\n\r\n")["type"] == "error"
        assert talk(host, int(port), b'{"request_id":1}\n')["type"] == "error"
        with socket.create_connection((host, int(port))) as half:
            half.sendall(b'{"request_id":1,"prompt_')
        endless = talk(host, int(port), b"x" * 10_000_000)
        assert endless == {} or endless["type"] == "error"
        events = list(stream)
    assert isinstance(events[-1], DoneLine) and events[-1].tokens_generated == 60
    assert resident(run.pid("prompt_gateway")) < 150e6


@pytest.mark.spec("S1 3.2", "S1 7.14", "S1 8.8")
def test_nothing_is_printed(run: Stack) -> None:
    """stdout and stderr carry no status: whatever is printed becomes a record."""
    run.addr()
    assert (run.stdout, run.stderr) == ("", "")


@pytest.mark.spec("S1 9.20", "S1 10.16", "S1 8.14")
def test_secrets_stay_where_they_belong(run: Stack) -> None:
    """In no record, on no command line, and in the environment of the two that resolve the configuration alone."""
    run.addr()
    assert SECRET.encode() not in run.archive.path.read_bytes()
    for process in run.left():
        assert SECRET not in process.command
        environ = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert (SECRET.encode() in environ) == (process.part in ("orchestrator", "config_resolver")), process


@pytest.mark.spec("S1 7.16", "S1 9.17", "S1 4.12", "S1 5.10", "S1 10.14", "S1 3.1", "S1 4.13", "S1 9.16")
def test_a_stop_word_ends_the_run(run: Stack) -> None:
    """Other words and longer lines are no stop; a stop word is, in any case and with blanks around it."""
    run.addr()
    run.say("please stop\nstopp\n" + "stop" * 3000 + "\n\nexit\n")
    assert run.ask(COLOURS, max_tokens=3).tokens_generated == 3
    workers = [process.pid for process in run.left() if process.part in ("agent", "engine")]
    assert len(workers) == 2
    run.say(" \t ShutDOWN \r\n")
    run.assert_stopped("stdin")
    records = run.archive.lifecycle()
    assert first_seen(records, STOP_ORDER) == STOP_ORDER
    assert records[-1].step == ("orch_exit", "ready")
    assert not [record for record in records if record.status == "failed"]
    stopped = run.archive.find("provider_stop", "ready")
    assert stopped is not None and stopped.detail["node_id"] == 1
    assert not list((run.state / "swactor-mq" / "ledger").iterdir())


@pytest.fixture(scope="module")
def relayed() -> Iterator[Stack]:
    """The worker behind the relay, and no stdin at all."""
    with Stack(config='[relay]\nmode = "default"\n') as stack:
        assert stack.process is not None and stack.process.stdin is not None
        stack.process.stdin.close()
        yield stack


@pytest.mark.spec("S1 2.6", "S1 7.7", "S1 7.16")
def test_over_the_relay(relayed: Stack) -> None:
    """The same phases, the same answer; the end of stdin is no stop."""
    relayed.addr()
    relayed.wait_record("serve_prompts", "started")
    assert first_seen(relayed.archive.lifecycle(), ORDER) == ORDER
    assert relayed.pid("relay")
    relayed.assert_answers()


@pytest.mark.spec("S1 7.7", "S1 4.11")
def test_a_relay_that_dies_comes_back(relayed: Stack) -> None:
    """In the middle of an answer: nothing of it is lost, the worker is reachable over the new relay."""
    with relayed.client() as client:
        stream = client.submit(LONG, max_tokens=40)
        first = next(stream)
        assert isinstance(first, TextDeltaLine)
        relayed.kill("relay")
        events = [first, *stream]
    done = events[-1]
    assert isinstance(done, DoneLine) and done.tokens_generated == 40
    assert "".join(event.text for event in events if isinstance(event, TextDeltaLine)) == done.final_text
    relayed.assert_answers()


@pytest.mark.spec("S1 9.17", "S1 10.14", "S1 9.10")
def test_sigint_ends_the_run_and_the_active_prompt(relayed: Stack) -> None:
    """Ctrl-C while an answer streams: that request gets one fault, the exit status is 0."""
    relayed.addr()
    assert relayed.process is not None
    with relayed.client() as client:
        stream = client.submit(LONG)
        assert isinstance(next(stream), TextDeltaLine)
        os.kill(relayed.process.pid, signal.SIGINT)
        events = list(stream)
        assert isinstance(events[-1], FaultLine) and "shutting down" in events[-1].error
    relayed.assert_stopped("SIGINT")


@pytest.mark.spec("S1 2.5", "S1 9.10", "S1 4.12")
def test_shutdown_over_the_rpc() -> None:
    """Everybody who waits gets his one terminal event, then the run ends with status 0."""
    with Stack() as stack, stack.client() as active, stack.client() as queued, stack.client() as control:
        stream = active.submit(LONG)
        assert isinstance(next(stream), TextDeltaLine)
        waiting = queued.submit(COLOURS, queued_events=True)
        assert isinstance(next(waiting), QueuedLine)
        control.shutdown_run()
        ends = [event for event in (*stream, *waiting) if isinstance(event, DoneLine | FaultLine)]
        assert [type(event) for event in ends] == [FaultLine, FaultLine]
        stack.assert_stopped("rpc")
        with pytest.raises((PromptClientError, StackError)):
            PromptClient.connect(active.addr)


# --- stops during start-up ------------------------------------------------------------------------------------


@pytest.mark.spec("S1 10.14", "S1 10.7", "S1 10.8", "S1 10.15", "S1 3.1", "S1 4.13")
@pytest.mark.parametrize(
    ("phase", "status", "how", "waiting_for"),
    [
        ("provider_start", "started", "stdin", "node ready|provider start"),
        ("weights_loaded", "started", "SIGTERM", "weights"),
    ],
)
def test_a_stop_during_start_up(phase: str, status: str, how: str, waiting_for: str, tmp_path: Path) -> None:
    """An error of the phase that waited: status 1, the workers are stopped (design.md 6 row 26)."""
    with Stack(args=held_worker(tmp_path, phase)) as stack:
        stack.wait_record(phase, status)
        if how == "stdin":
            stack.say("quit\n")
        else:
            assert stack.process is not None
            stack.process.send_signal(signal.SIGTERM)
        error = stack.assert_failed()
        assert error in [f"shutdown requested while waiting for {what}" for what in waiting_for.split("|")]
        assert stack.archive.one("shutdown", "started").detail["source"] == how
        failed = [record for record in stack.archive.lifecycle() if record.status == "failed"]
        assert failed[0].detail["error"] == error and failed[-1].step == ("orch_exit", "failed")
        assert stack.archive.find("prompt_rpc", "started") is None


@pytest.mark.spec("S1 10.14")
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.4, 1.2])
def test_a_stop_before_the_services_are_up(after_s: float, tmp_path: Path) -> None:
    """The launcher itself is interrupted: one sentence, status 1, nothing left. However late: no worker comes up."""
    with Stack(args=held_worker(tmp_path, "provider_start")) as stack:
        assert stack.process is not None
        # The interpreter needs a moment before anybody can take a signal.
        wait_for("the launcher", lambda: stack.left() and ready_for_signals(stack.process.pid), 60)  # type: ignore[union-attr]
        time.sleep(after_s)
        stack.process.send_signal(signal.SIGTERM)
        assert stack.assert_failed().startswith("shutdown requested while ")
        if records := stack.archive.lifecycle():
            assert stack.archive.one("shutdown", "started").detail["source"] == "SIGTERM", records


# --- helpers --------------------------------------------------------------------------------------------------


def sent_to_worker(run: Stack) -> list[object]:
    """The clients' ids of the prompts that were sent to the worker."""
    return [record.body["request_id"] for record in run.archive.prompts("node_prompt_send")]


def ready_for_signals(pid: int) -> bool:
    """Whether it catches SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def listening(pids: set[int]) -> set[int]:
    """TCP ports on which these processes listen."""
    inodes = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                inodes[f"socket:[{words[9]}]"] = int(words[1].rpartition(":")[2], 16)
    ports = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if (port := inodes.get(os.readlink(fd))) is not None:
                        ports.add(port)
    return ports


def talk(host: str, port: int, data: bytes) -> dict[str, Any]:
    """Send bytes; the first line that comes back, {} for a connection that is just closed."""
    with socket.create_connection((host, port), timeout=60) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
        answer = b""
        with contextlib.suppress(OSError):
            while b"\n" not in answer and (chunk := sock.recv(4096)):
                answer += chunk
    line = answer.partition(b"\n")[0]
    found: dict[str, Any] = json.loads(line) if line else {}
    return found


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
