"""Playbooks of the provisioner's actor: preparing, starting, and what the workers do."""

from __future__ import annotations

import pytest

from common.addresses import Role
from common.config_slices import ProvisionerSlice
from common.effects import SendFailed
from common.limits import STDERR_TAIL_LINES
from common.messages.bus import Admit, Admitted, Revoke, Revoked
from common.messages.config import ConfigGet
from common.messages.provision import (
    BootstrapCompleted,
    CompleteBootstrap,
    NodeExited,
    NodeFailed,
    PrepareProvider,
    ProviderPrepared,
    ProviderPrepareFailed,
)
from common.messages.service import ServiceReady
from services.provisioner.plugin import (
    DatastreamFrame,
    Exited,
    Failed,
    PluginNodeHandle,
    ProviderLine,
    StderrLine,
    StdoutLine,
)
from services.provisioner.state import Minted, Prepared
from services.provisioner.unsaid import UNSAID_MS
from tests.unit.provisioner.playbook import ORCHESTRATOR, RESOLVER, ROUTER, RUN, Play, start_node, started


# --- prepare ----------------------------------------------------------------------------------------------------
def test_the_service_asks_for_its_slice_and_is_ready_with_it() -> None:
    play = Play(configured=False)
    play.harness.advance(600)
    assert set(play.sent(RESOLVER)) == {ConfigGet(part=Role.PROVISIONER)}
    play.configure()
    assert play.sent() == [ServiceReady(service="provisioner", boot=7)]


@pytest.mark.spec("S1 7.5")
def test_prepare_builds_the_provider_and_is_answered_again(play: Play) -> None:
    play.order(PrepareProvider(run_id=1, provider="process"))
    job = play.job("prepare")
    assert job.args == {"config": ProvisionerSlice(provider="process", worker_bin="/bin/worker")}
    play.order(PrepareProvider(run_id=1, provider="process"))
    play.done(job, Prepared(2, ("a problem",)))
    assert play.sent() == [ProviderPrepared(provider="process", reconciled=2)]
    play.order(PrepareProvider(run_id=1, provider="process"))
    assert play.sent() == [ProviderPrepared(provider="process", reconciled=2)]
    assert play.effects() == []


@pytest.mark.spec("S1 10.5")
def test_a_preparation_error_stops_startup_before_any_worker(play: Play) -> None:
    play.order(PrepareProvider(run_id=1, provider="process"))
    play.done(play.job("prepare"), error="worker binary /x does not exist")
    assert play.sent() == [ProviderPrepareFailed(error="worker binary /x does not exist")]
    play.order(start_node(1))
    assert play.sent() == [NodeFailed(node_id=1, stage_index=0, error="the provider is not prepared")]
    assert play.effects() == []


def test_another_provider_than_configured_is_refused(play: Play) -> None:
    play.order(PrepareProvider(run_id=1, provider="docker"))
    (answer,) = play.sent()
    assert isinstance(answer, ProviderPrepareFailed) and "configuration says process" in answer.error


def test_prepare_waits_for_the_configuration() -> None:
    play = Play(configured=False)
    play.order(PrepareProvider(run_id=1, provider="process"))
    assert play.effects() == []
    play.configure()
    play.job("prepare")


# --- start ------------------------------------------------------------------------------------------------------
@pytest.mark.spec("S1 4.5", "S1 5.4", "S1 8.6")
def test_a_worker_is_minted_admitted_started_in_this_order(ready: Play) -> None:
    ready.order(start_node(2))
    job = ready.job("mint")
    assert job.args["run"] == RUN and job.args["orchestrator"] == ORCHESTRATOR
    assert ready.events() == [(2, "ProvisionStart")]
    minted = Minted(b"\x02" * 32, "h2", "launch")
    ready.done(job, minted)
    assert ready.effects() == []
    admit = Admit(key=b"\x02" * 32, role=Role.AGENT, run=RUN, node_id=2, stage_index=1, logical_id="node 2")
    assert ready.sent(ROUTER) == [admit]
    ready.harness.tell(Admitted(key=b"\x02" * 32), src=ROUTER)
    start = ready.job("start_node")
    assert start.pool == "start" and start.args["minted"] == minted
    ready.done(start, PluginNodeHandle("h2", 77))
    assert ready.sent() == [started(2)]
    ready.order(CompleteBootstrap())
    complete = ready.job("complete_bootstrap")
    assert complete.args["handles"] == (PluginNodeHandle("h2", 77),)
    ready.done(complete)
    assert ready.sent() == [BootstrapCompleted()]
    assert ready.events() == [(2, "NodeLive")]


def test_the_first_bootstrap_error_is_reported_and_nobody_called_live(ready: Play) -> None:
    ready.live(1)
    ready.order(CompleteBootstrap())
    ready.done(ready.job("complete_bootstrap"), error="ssh is away")
    assert ready.sent() == [BootstrapCompleted(error="ssh is away")]
    assert ready.events() == []


def test_admit_is_repeated_until_admitted_and_again_after_a_router_restart(ready: Play) -> None:
    minted = ready.mint(1)
    assert len(ready.sent(ROUTER)) == 1
    ready.harness.advance(1000)
    assert [type(msg) for msg in ready.sent(ROUTER)] == [Admit, Admit]
    ready.harness.tell(Admitted(key=minted.public_key), src=ROUTER)
    ready.harness.tell(Admitted(key=minted.public_key), src=ROUTER)
    ready.done(ready.job("start_node"), PluginNodeHandle("h1"))
    ready.harness.advance(5000)
    assert ready.sent(ROUTER) == []
    ready.routes(router_boot=2)
    assert [type(msg) for msg in ready.sent(ROUTER)] == [Admit]
    ready.harness.advance(600)
    assert [type(msg) for msg in ready.sent(ROUTER)] == [Admit]
    ready.harness.tell(Admitted(key=minted.public_key), src=ROUTER)
    ready.harness.advance(5000)
    assert ready.sent(ROUTER) == [] and ready.effects() == []


def test_a_router_that_never_admits_fails_the_start() -> None:
    play = Play(router=False)
    play.prepare()
    play.mint(1)
    play.records()
    play.harness.advance(29_000)
    assert play.sent() == []
    play.harness.advance(2_000)
    assert play.sent() == [
        NodeFailed(node_id=1, stage_index=0, error="the router did not admit the worker within 30 s")
    ]
    assert play.job("discard").args["minted"].handle_id == "h1"
    assert play.events() == [(1, "ProvisionFailed")]


@pytest.mark.spec("S1 10.6", "S1 8.6")
def test_a_failed_start_is_reported_revoked_and_cleaned_up(ready: Play) -> None:
    job = ready.begin(1)
    ready.done(job, error="cannot start worker binary /x: it is not executable")
    failed = NodeFailed(node_id=1, stage_index=0, error="cannot start worker binary /x: it is not executable")
    everything = ready.harness.sent()
    assert (ORCHESTRATOR, failed) in everything and (ROUTER, Revoke(key=b"\x01" * 32)) in everything
    assert ready.job("discard").pool == "stop"
    assert ready.events() == [(1, "ProvisionStart"), (1, "ProvisionFailed")]
    ready.order(start_node(1))
    assert ready.sent() == [failed] and ready.effects() == []


@pytest.mark.spec("S1 10.6", "S1 10.12")
def test_what_could_not_be_delivered_is_said_again(ready: Play) -> None:
    """The router hung: the orchestrator would wait for this answer as long as a start may take."""
    failed = NodeFailed(node_id=1, stage_index=0, error="the router did not admit the worker")
    ready.harness.tell(SendFailed(ORCHESTRATOR, failed, "link_down"))
    assert ready.sent() == []
    ready.harness.advance(UNSAID_MS)
    assert ready.sent() == [failed]
    ready.harness.advance(10 * UNSAID_MS)
    assert ready.sent() == []
    ready.harness.tell(SendFailed(ORCHESTRATOR, failed, "peer_lost"))
    ready.harness.tell(SendFailed(ROUTER, failed, "link_down"))
    ready.harness.advance(10 * UNSAID_MS)
    assert ready.sent() == []


def test_revoke_is_repeated_until_revoked(ready: Play) -> None:
    ready.done(ready.begin(1), error="no")
    ready.harness.sent()
    ready.harness.advance(600)
    assert ready.sent(ROUTER) == [Revoke(key=b"\x01" * 32)]
    ready.harness.tell(Revoked(key=b"\x01" * 32), src=ROUTER)
    ready.harness.advance(20_000)
    assert ready.sent(ROUTER) == []


@pytest.mark.spec("S1 10.6")
def test_a_worker_that_exits_while_it_starts_never_counts_as_started(ready: Play) -> None:
    job = ready.begin(1)
    ready.see(1, StderrLine("cannot: no such model"), StderrLine(""), Exited(3, "exited with status 3"))
    assert ready.sent() == []
    ready.done(job, PluginNodeHandle("h1"))
    (failed,) = ready.sent()
    assert failed.error == ("worker exited with status 3 before it was ready; its last words: cannot: no such model")
    ready.job("discard")


def test_a_repeat_is_answered_again_and_not_executed_again(ready: Play) -> None:
    ready.order(start_node(1))
    job = ready.job("mint")
    ready.order(start_node(1))
    assert ready.effects() == [] and ready.sent() == []
    ready.done(job, Minted(b"\x01" * 32, "h1", "launch"))
    ready.harness.tell(Admitted(key=b"\x01" * 32), src=ROUTER)
    ready.order(start_node(1))
    ready.done(ready.job("start_node"), PluginNodeHandle("h1"))
    assert ready.sent() == [started(1)]
    ready.order(start_node(1))
    assert ready.sent() == [started(1)] and ready.effects() == []
    ready.see(1, Exited(1, "exited with status 1"))
    ready.sent()
    ready.order(start_node(1))
    assert [type(msg) for msg in ready.sent()] == [NodeExited]


def test_another_runs_worker_is_refused(ready: Play) -> None:
    ready.live(1)
    ready.order(start_node(2, run=b"\x02" * 16))
    (failed,) = ready.sent()
    assert "run 0101010101010101 is active" in failed.error


# --- what the worker does ---------------------------------------------------------------------------------------
@pytest.mark.spec("S1 2.7", "S1 8.7", "S1 8.9")
def test_every_observation_becomes_the_record_of_the_specification(ready: Play) -> None:
    ready.live(2)
    ready.see(
        2,
        StdoutLine("out"),
        StderrLine("err"),
        ProviderLine("pulled"),
        DatastreamFrame("worker.load", b"\x00raw"),
        Exited(0, "exited with status 0"),
    )

    def line(stream: str, text: str) -> dict[str, object]:
        return {"line": {"run_id": 1, "node_id": 2, "stream": stream, "line": text}}

    event = {"run_id": 1, "node_id": 2, "kind": "NodeStopped", "provider": "process", "message": "exited with status 0"}
    assert ready.records() == [
        ("mvp.provisioning.logs.node.2.stdout", line("Stdout", "out"), "node_bootstrap_stdio"),
        ("mvp.provisioning.logs.node.2.stderr", line("Stderr", "err"), "node_bootstrap_stdio"),
        ("mvp.provisioning.logs.node.2.provider", line("Provider", "pulled"), ""),
        ("worker.load", b"\x00raw", "node_bootstrap_stdio"),
        ("mvp.provisioning.events", {"event": event}, ""),
    ]


@pytest.mark.spec("S1 8.9")
def test_a_provider_that_loses_the_worker_is_a_failed_event_and_an_exit(ready: Play) -> None:
    ready.live(1)
    ready.see(1, Failed("the container engine is away"))
    assert ready.events() == [(1, "ProvisionFailed")]
    (exited,) = [msg for msg in ready.sent() if isinstance(msg, NodeExited)]
    assert exited == NodeExited(node_id=1, stage_index=0, reason="the container engine is away")


@pytest.mark.spec("S1 9.15")
def test_an_unexpected_exit_is_told_with_the_last_lines_and_the_key_is_revoked(ready: Play) -> None:
    ready.live(1)
    ready.see(1, *(StderrLine(f"line {number}") for number in range(60)))
    ready.see(1, Exited(-9, "killed by signal 9 (SIGKILL)"))
    everything = ready.harness.sent()
    # Its word comes before the end of its routes, by which others learn of the loss, and not how it came.
    assert [dst for dst, _ in everything] == [ORCHESTRATOR, ROUTER]
    (_, exited), (_, revoke) = everything
    assert revoke == Revoke(key=b"\x01" * 32) and isinstance(exited, NodeExited)
    assert (exited.status, exited.reason) == (-9, "killed by signal 9 (SIGKILL)")
    assert exited.stderr_tail == [f"line {number}" for number in range(60 - STDERR_TAIL_LINES, 60)]


@pytest.mark.spec("S1 9.15")
def test_lines_alone_are_no_failure(ready: Play) -> None:
    ready.live(1)
    ready.see(1, StderrLine("FATAL ERROR"), ProviderLine("failed"), StdoutLine("panic"))
    assert ready.sent() == [] and ready.effects() == []
