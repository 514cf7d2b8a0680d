"""Bad input and faults (issue 2 section 4): one clear line, the exit status, nothing left, an archive up to then."""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.prompt_gateway.wire import DoneLine, TextDeltaLine
from tests.e2e.stack import (
    COLOURS,
    GONE_S,
    LONG,
    READY_S,
    Asker,
    Stack,
    held_worker,
    model_file,
    wait_for,
    wait_taken_apart,
)

RESTART_S = 60.0
TRIES = 5
PARTS = ("router", "membership", "datastream_collector", "config_resolver", "provisioner", "prompt_gateway")


def assert_archive_tells(stack: Stack, phase: str, error: str) -> None:
    """The failure record of the phase, then the exit record, last; each with the sentence of the error line."""
    records = stack.archive.lifecycle()
    failed = [record for record in records if record.status == "failed"]
    assert failed, records
    assert failed[0].phase == phase, failed
    assert failed[0].detail["error"] == error
    assert records[-1].step == ("orch_exit", "failed"), records[-3:]
    assert (records[-1].detail["error"], records[-1].detail["phase"]) == (error, phase)


# --- configuration and launch ---------------------------------------------------------------------------------


@pytest.mark.spec("S1 9.1", "S1 4.1", "S1 3.1", "S1 10.1", "S1 10.2")
@pytest.mark.parametrize(
    ("text", "args", "says"),
    [
        ("[model\n", (), ["not valid TOML", "line 1"]),
        ('[model]\ngguf_local_pth = "x"\n', (), ["gguf_local_pth", "did you mean gguf_local_path?"]),
        ("[prompt]\nrpc_addr = 5\n", (), ["rpc_addr"]),
        ('[model]\ngguf_local_path = "/nope/x.gguf"\n', (), ["/nope/x.gguf", "does not exist", "fetch-model"]),
        (None, ("--worker-bin", "/nope/worker"), ["--worker-bin", "/nope/worker", "does not exist"]),
        (None, ("--pipeline-stages", "0"), ["pipeline"]),
        (None, ("--provider", "mock"), ["mock"]),
        (None, ("--frobnicate",), ["--frobnicate"]),
        (None, ("--worker-bin",), ["--worker-bin"]),
    ],
)
def test_a_wrong_configuration(text: str | None, args: tuple[str, ...], says: list[str]) -> None:
    """One sentence that names the place, before there is a run directory, an archive or a worker."""
    with Stack(text=text, args=args) as stack:
        error = stack.assert_failed()
        assert all(word in error for word in says), error
        assert not stack.archive.path.exists() and not stack.state.exists()


@pytest.mark.spec("S1 10.3", "S1 3.1")
def test_run_directory_that_cannot_be_made() -> None:
    """A file where the directory should be."""
    with Stack(run_dir=model_file() / "run") as stack:
        error = stack.assert_failed()
        assert "run directory" in error and "[runtime] run_dir" in error


@pytest.mark.spec("S1 10.3", "S1 10.11", "S1 3.11", "S1 10.15")
def test_archive_that_cannot_be_written() -> None:
    """A start-up failure that names the file; before any worker."""
    with Stack(archive=model_file() / "frames.jsonl") as stack:
        error = stack.assert_failed()
        assert "frames.jsonl" in error and "[observability] datastream_frame_log" in error


# --- the worker during start-up -------------------------------------------------------------------------------


@pytest.mark.spec("S1 10", "S1 10.6", "S1 9.15", "S1 10.15", "S1 4.13")
def test_a_worker_that_exits_at_once(tmp_path: Path) -> None:
    """Its last line is in the sentence, all its lines are in the archive."""
    script = tmp_path / "worker"
    script.write_text("#!/bin/sh\necho on stdout\necho 'no GPU found' >&2\nexit 3\n")
    script.chmod(stat.S_IRWXU)
    with Stack(args=("--worker-bin", str(script))) as stack:
        error = stack.assert_failed()
        # Whether it was started or has died already is a matter of milliseconds.
        phase = "provider_start" if "did not start" in error else "node_runtime_ready"
        assert error.startswith(("node 1 exited before ready: ", "node 1 did not start: "))
        assert "status 3" in error and "no GPU found" in error
        assert_archive_tells(stack, phase, error)
        lines = {r.channel: r.body["line"]["line"] for r in stack.archive.records() if "line" in r.body}
        assert lines["mvp.provisioning.logs.node.1.stdout"] == "on stdout"
        assert lines["mvp.provisioning.logs.node.1.stderr"] == "no GPU found"


@pytest.mark.spec("S1 10.6", "S1 10.5", "S1 10.15")
def test_a_worker_that_is_no_program(tmp_path: Path) -> None:
    """exec fails: the provisioner says why."""
    script = tmp_path / "worker"
    script.write_bytes(b"\x7fELF nonsense")
    script.chmod(stat.S_IRWXU)
    with Stack(args=("--worker-bin", str(script))) as stack:
        error = stack.assert_failed()
        assert "node 1 did not start" in error and str(script) in error
        assert_archive_tells(stack, "provider_start", error)


@pytest.mark.spec("S1 10.8", "S1 4.9", "S1 9.7", "S1 10.15", "S1 9.4")
@pytest.mark.parametrize(("size", "says"), [(0, "not a GGUF file"), (1_000_000, "truncated")])
def test_a_damaged_model(size: int, says: str, tmp_path: Path) -> None:
    """The stage faults while it loads weights; the prompt RPC is never opened."""
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(model_file().read_bytes()[:size] or b"<html>404</html>")
    with Stack(model=damaged) as stack:
        error = stack.assert_failed()
        assert error.startswith("node 1 stage 0 faulted while loading weights: ")
        assert says in error and "damaged.gguf" in error and "[model]" in error
        assert_archive_tells(stack, "weights_loaded", error)
        assert stack.archive.find("prompt_rpc", "started") is None


@pytest.mark.spec("S1 9.15", "S1 10.8", "S1 10.15", "S1 4.9")
@pytest.mark.parametrize(("part", "how"), [("agent", "exited"), ("engine", "stage 0 faulted")])
def test_a_worker_killed_while_loading(part: str, how: str, tmp_path: Path) -> None:
    """The provider's word, or the stage's, is enough: the run ends at once, without waiting for SWIM."""
    with Stack(args=held_worker(tmp_path, "weights_loaded")) as stack:
        stack.wait_record("stage_provision_send", "sent")
        stack.kill(part)
        error = stack.assert_failed()
        assert error.startswith(f"node 1 {how} while loading weights: ") and "SIGKILL" in error
        assert_archive_tells(stack, "weights_loaded", error)
        assert stack.archive.find("prompt_rpc", "started") is None


@pytest.mark.spec("S1 4.6", "S1 4.9")
def test_services_killed_during_start_up() -> None:
    """Those that can come back do, and the start goes on."""
    with Stack() as stack:
        stack.wait_record("node_runtime_ready", "started")
        for part in ("membership", "router", "datastream_collector"):
            stack.kill(part)
            time.sleep(0.3)
        stack.assert_answers()
        wanted = {"membership", "router", "datastream_collector"}
        # The collector is back when it is back; nobody's answer waits for it.
        wait_for("all restarts on record", lambda: wanted <= restarted(stack), RESTART_S)
        assert restarted(stack) == wanted
        stack.say("stop\n")
        stack.assert_stopped("stdin")


@pytest.mark.spec("S1 4.1", "S1 4.3")
def test_the_config_resolver_killed_before_its_slices_are_served() -> None:
    """Somebody still needs it, so it is started again, with the same configuration; later nobody would miss it."""
    assert any(play_a_kill_of_the_resolver() for _ in range(TRIES)), "each kill came after the slices"


def play_a_kill_of_the_resolver() -> bool:
    """False where everybody had his slice already."""
    with Stack() as stack:
        once_there(stack, "router")
        stack.kill("config_resolver")
        stack.assert_answers()
        if not restarts(stack, "config_resolver"):
            return False
        assert restarts(stack, "config_resolver") == 1
        stack.kill("config_resolver")
        stack.assert_answers()
        assert restarts(stack, "config_resolver") == 1
        stack.say("stop\n")
        stack.assert_stopped("stdin")
    return True


@pytest.mark.spec("S1 10.9", "S1 4.10", "S1 9.4", "S1 10.15")
def test_a_port_that_is_taken() -> None:
    """The prompt RPC cannot be bound: a start-up failure after the weights, and the worker is stopped again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        addr = f"127.0.0.1:{server.getsockname()[1]}"
        with Stack(rpc_addr=addr) as stack:
            stack.wait_record("prompt_rpc", "started")
            error = stack.assert_failed()
            assert error.startswith("prompt RPC: ") and addr in error and "in use" in error
            assert_archive_tells(stack, "prompt_rpc", error)


# --- while serving --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    """A run that survives what should not end it; the last test ends it."""
    with Stack() as stack:
        stack.wait_record("serve_prompts", "started")
        yield stack


@pytest.mark.spec("S1 10.3")
def test_a_second_orchestrator_on_the_same_run_directory(served: Stack) -> None:
    """It says who holds it and ends; the first one does not notice."""
    assert served.process is not None
    with Stack(run_dir=served.home / "run") as second:
        assert second.process is not None
        assert second.process.wait(60) == 1
        assert second.stderr.count("\n") == 1 and second.stderr.startswith("mvp-orchestrator: run directory ")
        assert f"in use by another orchestrator (process {served.process.pid})" in second.stderr
        assert "[runtime] run_dir" in second.stderr
        wait_taken_apart(second.left)
        second.run_dir = second.home / "run"  # it is not this one's to remove
    assert served.run_dir.exists()
    served.assert_answers()


@pytest.mark.spec("S1 4.11", "S1 7.7")
@pytest.mark.parametrize("part", ["membership", "datastream_collector", "router", "config_resolver"])
def test_services_whose_loss_a_run_survives(served: Stack, part: str) -> None:
    """Killed in the middle of an answer (design.md 2): the answer goes on, the next one comes, the run goes on."""
    with served.client() as client:
        stream = client.submit(LONG, max_tokens=40)
        assert isinstance(next(stream), TextDeltaLine)
        old = served.kill(part)
        events = list(stream)
    assert isinstance(events[-1], DoneLine) and events[-1].tokens_generated == 40
    if part != "config_resolver":  # its slices are served: nobody needs it any more
        wait_for(f"{part} again", lambda: [p for p in served.left() if p.part == part and p.pid != old], RESTART_S)
        wait_for("the record", lambda: restarts(served, part), RESTART_S)
    served.assert_answers()
    assert served.process is not None and served.process.poll() is None


def once_there(stack: Stack, part: str) -> None:
    """Return as soon as that process exists."""
    until = time.monotonic() + READY_S
    while not any(process.part == part for process in stack.left()):
        assert time.monotonic() < until, f"no {part}: {stack.stderr}"
        time.sleep(0.005)


def restarts(stack: Stack, part: str) -> int:
    """How often the orchestrator has recorded a restart of this service."""
    found = [record for record in stack.archive.lifecycle() if record.phase == "service_restart"]
    return sum(record.detail["service"] == part for record in found)


def restarted(stack: Stack) -> set[str]:
    """The services that were, on record."""
    return {part for part in PARTS if restarts(stack, part)}


@pytest.mark.spec("S1 10.10", "S1 3.1", "S1 4.12", "S1 4.13", "S1 10.15", "S1 9.16")
def test_the_gateway_killed(served: Stack) -> None:
    """Fatal: the active request's connection ends, workers are stopped, status 1."""
    asker = Asker(served.addr(), LONG)
    asker.wait_text()
    served.kill("prompt_gateway")
    error = served.assert_failed()
    assert "gateway" in error and "SIGKILL" in error
    assert len(asker.terminals()) <= 1
    assert_archive_tells(served, "serve_prompts", error)


@pytest.mark.spec("S1 9.15", "S1 9.10", "S1 10.10", "S1 4.12", "S1 4.13", "S1 10.15")
@pytest.mark.parametrize(("part", "says"), [("agent", "SIGKILL"), ("engine", "")])
def test_a_worker_killed_while_answering(part: str, says: str) -> None:
    """The active request and the queued one get one fault each; the run ends with status 1."""
    with Stack() as stack:
        asker = Asker(stack.addr(), LONG)
        asker.wait_text()
        queued = Asker(stack.addr(), COLOURS, events=["queued"])
        wait_for("queued", lambda: queued.lines, 60)
        stack.kill(part)
        error = stack.assert_failed()
        assert "while serving prompts" in error and says in error, error
        for who in (asker, queued):
            assert [line["type"] for line in who.terminals()] == ["fault"], who.lines[-3:]
        assert_archive_tells(stack, "serve_prompts", error)


@pytest.mark.spec("S1 10.10", "S1 4.13", "S1 10.13", "S1 9.16", "S1 9.10")
def test_the_provisioner_killed() -> None:
    """Fatal: its workers end with it, by stdin's end or by the ledger; status 1."""
    with Stack() as stack:
        asker = Asker(stack.addr(), LONG)
        asker.wait_text()
        stack.kill("provisioner")
        error = stack.assert_failed()
        assert "provisioner" in error and "SIGKILL" in error
        assert [line["type"] for line in asker.terminals()] == ["fault"], asker.lines[-3:]
        assert_archive_tells(stack, "serve_prompts", error)
        ledger = stack.state / "swactor-mq" / "ledger"
        assert not ledger.exists() or not list(ledger.iterdir())


@pytest.mark.spec("S1 4.13")
def test_orchestrator_and_provisioner_killed() -> None:
    """Nobody is left to stop the worker: the end of its stdin does."""
    with Stack() as stack:
        stack.wait_record("node_runtime_ready", "ready")
        for pid in (stack.pid("provisioner"), stack.pid("orchestrator")):
            os.kill(pid, signal.SIGKILL)
        wait_for("all gone", lambda: not stack.left(), GONE_S)


@pytest.mark.spec("S1 4.13", "S1 9.16", "S1 9.10")
def test_the_orchestrator_killed(tmp_path: Path) -> None:
    """Everybody notices by himself: the active request is faulted, workers and services are gone within seconds."""
    with Stack() as stack:
        asker = Asker(stack.addr(), LONG)
        asker.wait_text()
        started = time.monotonic()
        stack.kill("orchestrator")
        wait_for("all gone", lambda: not stack.left(), GONE_S)
        print(f"gone after {time.monotonic() - started:.1f} s")
        assert [line["type"] for line in asker.terminals()] == ["fault"], asker.lines[-3:]
        assert stack.wait() == -signal.SIGKILL
        assert not stack.run_dir.exists()  # the last service has removed it
        again = Stack(run_dir=stack.run_dir, args=held_worker(tmp_path, "provider_start"))
        with again:
            again.wait_record("services", "ready")
            assert again.process is not None
            os.kill(again.process.pid, signal.SIGTERM)
            again.assert_failed()


@pytest.mark.spec("S1 9.1", "S1 10.2")
def test_a_configuration_that_was_changed_before_its_slices_were_served() -> None:
    """Two halves of a run must not work with two configurations: it ends at once, and says why."""
    assert any(play_a_change_of_the_configuration() for _ in range(TRIES)), "each change came after the slices"


def play_a_change_of_the_configuration() -> bool:
    """False where everybody had his slice already."""
    with Stack() as stack:
        assert stack.process is not None
        once_there(stack, "router")
        stack.config_file.write_text(stack.config_file.read_text().replace('id = "smollm2"', 'id = "other"'))
        stack.kill("config_resolver")
        ended, archive = stack.process.poll, stack.archive
        wait_for("its end", lambda: ended() is not None or archive.find("services", "ready"), READY_S)
        if archive.find("services", "ready"):
            return False
        error = stack.assert_failed()
        assert "the configuration was changed while the run was starting" in error
    return True
