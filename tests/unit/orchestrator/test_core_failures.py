"""Every way a run fails: the sentence, the record of the phase, what is still stopped (S1 10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.addresses import Role
from common.effects import SendFailed
from common.limits import WORKER_SILENT_MS_SERVING, WORKER_SILENT_MS_STARTUP
from common.messages.config import ConfigFailed, ConfigGet
from common.messages.node_agent import ProvisionStage, RuntimeReadyAck, StopRun
from common.messages.orchestrator import EndpointWire, ObserveNodeRuntimeReadyAck
from common.messages.provision import (
    BootstrapCompleted,
    NodeExited,
    NodeFailed,
    ProviderPrepareFailed,
    StopNodes,
)
from common.messages.serve import CloseRpc, OpenPromptRpc, PromptRpcFailed, ServingFailed
from common.messages.service import ServiceFailed
from common.messages.stream import ExpectFlow
from services.orchestrator.base import Phase
from services.orchestrator.core import ServiceLost, ServiceRestarted, StopLine
from tests.unit.orchestrator.playbook import ADDRESS, NODE_ID, NONCE, Play, TwoWorkers

TAIL = ["loading", "Segmentation fault", ""]


def exited(play: Play) -> None:
    play.exited(status=139, tail=TAIL)


def undelivered(message: Any, reason: str = "unroutable") -> Callable[[Play], None]:
    def happens(play: Play) -> None:
        play.out_of_reach(play.node_actor(), message, WORKER_SILENT_MS_STARTUP, reason)

    return happens


FAILURES: list[tuple[Phase, Callable[[Play], None], str, str]] = [
    (
        Phase.SERVICES,
        lambda play: play.tell(ServiceFailed(service="datastream_collector", phase="frame_archive", error="disk full")),
        "frame_archive",
        "datastream_collector: disk full",
    ),
    (
        Phase.SERVICES,
        lambda play: play.tell(StopLine("stop")),
        "services",
        "shutdown requested while waiting for services (the configuration, config_resolver, provisioner, membership, "
        "prompt_gateway, datastream_collector)",
    ),
    (
        Phase.PROVIDER,
        lambda play: play.provisioner(ProviderPrepareFailed(error="worker binary /x is missing")),
        "node_provisioner",
        "provider process: worker binary /x is missing",
    ),
    (
        Phase.PROVIDER,
        lambda play: play.harness.advance(120_000),
        "node_provisioner",
        "provider process was not ready within 120 s",
    ),
    (
        Phase.PROVIDER,
        lambda play: play.tell(StopLine("quit")),
        "node_provisioner",
        "shutdown requested while waiting for the provider",
    ),
    (
        Phase.START,
        lambda play: play.provisioner(NodeFailed(node_id=NODE_ID, stage_index=0, error="no such file")),
        "provider_start",
        f"node {NODE_ID} did not start: no such file",
    ),
    (
        Phase.START,
        lambda play: play.harness.advance(120_000),
        "provider_start",
        f"provider start: node {NODE_ID} was not started by provider process in 120 s",
    ),
    (
        Phase.READINESS,
        exited,
        "node_runtime_ready",
        f"node {NODE_ID} exited before ready: exit status 139; its last line was: Segmentation fault",
    ),
    (
        Phase.READINESS,
        lambda play: play.tell(StopLine("stop")),
        "node_runtime_ready",
        "shutdown requested while waiting for node ready",
    ),
    (
        Phase.READINESS,
        lambda play: play.harness.advance(60_000),
        "node_runtime_ready",
        f"no worker readiness for 60 s (node {NODE_ID}: no runtime-ready report, not alive in SWIM, "
        "no route to its node actor)",
    ),
    (
        Phase.ACK,
        lambda play: play.harness.advance(60_000),
        "runtime_ready_ack",
        f"runtime-ready acknowledgement did not come within 60 s: node {NODE_ID} stage 0 readiness 1",
    ),
    (
        Phase.ACK,
        undelivered(RuntimeReadyAck(run_id=7, node_id=3, stage_index=0, readiness_id=1)),
        "runtime_ready_ack",
        f"RuntimeReadyAck to node {NODE_ID} could not be delivered: unroutable",
    ),
    (
        Phase.ACK,
        exited,
        "runtime_ready_ack",
        f"node {NODE_ID} exited before ready: exit status 139; its last line was: ",
    ),
    (
        Phase.BOOTSTRAP,
        lambda play: play.provisioner(BootstrapCompleted(error="ssh: refused")),
        "complete_bootstrap",
        "complete_bootstrap failed: ssh: refused",
    ),
    (
        Phase.BOOTSTRAP,
        lambda play: play.harness.advance(120_000),
        "complete_bootstrap",
        "complete_bootstrap was not answered by the provisioner within 120 s",
    ),
    (
        Phase.WEIGHTS,
        lambda play: play.faulted("WorkerCrashed: out of memory"),
        "weights_loaded",
        f"node {NODE_ID} stage 0 faulted while loading weights: WorkerCrashed: out of memory",
    ),
    (
        Phase.WEIGHTS,
        exited,
        "weights_loaded",
        f"node {NODE_ID} exited while loading weights: exit status 139; its last",
    ),
    (
        Phase.WEIGHTS,
        lambda play: play.tell(StopLine("shutdown")),
        "weights_loaded",
        "shutdown requested while waiting for weights",
    ),
    (
        Phase.WEIGHTS,
        lambda play: play.harness.advance(120_000),
        "weights_loaded",
        f"weights: node {NODE_ID} stage 0 made no progress in stage provisioning for 120 s",
    ),
    (
        Phase.WEIGHTS,
        lambda play: play.reported(readiness_id=2),
        "weights_loaded",
        f"node {NODE_ID} lost its runtime while loading weights: it reports readiness 2 after readiness 1 "
        "was acknowledged",
    ),
    (
        Phase.RPC,
        lambda play: play.gateway(PromptRpcFailed(error="the prompt RPC cannot be bound at 127.0.0.1:1: in use")),
        "prompt_rpc",
        "prompt RPC: the prompt RPC cannot be bound at 127.0.0.1:1: in use",
    ),
    (
        Phase.RPC,
        lambda play: play.harness.advance(120_000),
        "prompt_rpc",
        "the prompt gateway did not open the prompt RPC within 120 s",
    ),
    (
        Phase.RPC,
        exited,
        "prompt_rpc",
        f"node {NODE_ID} exited while the prompt RPC was opened: exit status 139; its last",
    ),
    (
        Phase.SERVING,
        exited,
        "serve_prompts",
        f"node {NODE_ID} exited while serving prompts: exit status 139; its last line was: Segmentation fault",
    ),
    (
        Phase.SERVING,
        lambda play: play.faulted("WorkerCrashed: killed"),
        "serve_prompts",
        f"node {NODE_ID} stage 0 faulted while serving prompts: WorkerCrashed: killed",
    ),
    (
        Phase.SERVING,
        lambda play: play.gateway(ServingFailed(error="token sequence violation")),
        "serve_prompts",
        "prompt serving failed: token sequence violation",
    ),
    (
        Phase.SERVING,
        lambda play: play.tell(ServiceLost(Role.GATEWAY, "was killed by SIGKILL")),
        "serve_prompts",
        "the prompt gateway was killed by SIGKILL",
    ),
    (
        Phase.SERVING,
        lambda play: play.service_ready(Role.GATEWAY, boot=2),
        "serve_prompts",
        "the prompt gateway was restarted in the middle of the run",
    ),
    (
        Phase.SERVING,
        lambda play: play.tell(ServiceLost(Role.ROUTER, "was killed by SIGKILL too often")),
        "serve_prompts",
        "the router was killed by SIGKILL too often",
    ),
    (
        Phase.SERVING,
        lambda play: play.reported(readiness_id=2),
        "serve_prompts",
        f"node {NODE_ID} lost its runtime while serving prompts: it reports readiness 2",
    ),
]


@pytest.mark.spec(
    "S1 10.1", "S1 10.5", "S1 10.6", "S1 10.7", "S1 10.8", "S1 10.12", "S1 10.14", "S1 10.15", "S1 9.15", "S1 4.13"
)
@pytest.mark.parametrize(("phase", "event", "record_phase", "sentence"), FAILURES)
def test_failure_is_one_sentence_one_record_and_everything_is_stopped(
    phase: Phase, event: Callable[[Play], None], record_phase: str, sentence: str
) -> None:
    play = Play().until(phase)
    touched = phase is not Phase.SERVICES
    event(play)
    record = play.failure()
    assert record["phase"] == record_phase
    assert record["detail"]["error"].startswith(sentence)
    assert record["node_id"] in (1, NODE_ID)
    assert record["detail"]["provider"] == ("process" if touched else None)
    rpc_opened = play.run.rpc_open
    said: list[Any] = play.said()
    play.rpc_closed()
    play.stage_stopped()
    said += play.said()
    kinds = [type(message).__name__ for message in said]
    assert kinds.count("StopNodes") == touched
    assert ("CloseRpc" in kinds) == rpc_opened
    assert "OpenPromptRpc" not in kinds
    play.nodes_stopped()
    play.flushed()
    over = play.over()
    assert over.status == 1 and over.error.startswith(sentence)
    exit_record = play.exit_record or play.records()[-1]
    assert (exit_record["phase"], exit_record["status"]) == ("orch_exit", "failed")
    assert exit_record["detail"]["phase"] == record_phase


@pytest.mark.spec("S1 10.1")
def test_error_of_the_configuration_ends_a_hosted_run_before_any_worker() -> None:
    play = Play()
    play.services_ready()
    play.said()
    play.from_service(Role.RESOLVER, ConfigFailed(error="[provider] kind 'x' is unknown"))
    assert play.failure()["phase"] == "config"
    assert "StopNodes" not in play.names()
    play.from_service(Role.RESOLVER, ConfigFailed(error="[provider] kind 'x' is unknown"))
    play.flushed()
    assert (play.over().status, play.run.result.text) == (1, "[provider] kind 'x' is unknown")
    play.configure()
    play.harness.advance(600_000)
    play.not_over()


def test_services_that_do_not_come_are_named_after_60_seconds() -> None:
    play = Play()
    play.configure()
    for role in (Role.RESOLVER, Role.PROVISIONER, Role.COLLECTOR):
        play.service_ready(role)
    play.harness.advance(59_999)
    assert play.at(Phase.SERVICES)
    play.harness.advance(1)
    assert play.failure()["detail"]["error"] == (
        "not all services were ready within 60 s: still waiting for services (membership, prompt_gateway)"
    )
    play.flushed()
    assert play.over().status == 1


@pytest.mark.spec("S1 10.6")
def test_workers_that_started_before_a_failed_one_are_stopped_before_the_error_is_returned() -> None:
    play = Play(TwoWorkers(NONCE)).until(Phase.START)
    play.started(0)
    play.provisioner(NodeFailed(node_id=NODE_ID + 1, stage_index=1, error="no space"))
    assert play.failure()["node_id"] == NODE_ID + 1
    assert len(play.said(StopNodes)) == 1
    play.started(1)  # it came too late: the provisioner stops it with the others
    assert play.at(Phase.STOPPING_NODES)
    play.not_over()
    play.nodes_stopped()
    play.flushed()
    assert play.over().error == f"node {NODE_ID + 1} did not start: no space"


@pytest.mark.spec("S1 10.3", "S1 10.15")
def test_what_the_launcher_cannot_start_is_told_once_it_can_be_archived() -> None:
    play = Play()
    play.configure()
    play.tell(ServiceFailed(service="orchestrator", phase="metrics", error="the address is in use"))
    assert play.at(Phase.SERVICES)
    play.service_ready(Role.COLLECTOR)
    assert not play.run.active
    assert ("metrics", "failed") in play.transitions()
    slow = Play()
    slow.tell(ServiceFailed(service="orchestrator", phase="metrics", error="the address is in use"))
    slow.harness.advance(60_000)
    assert slow.run.result.error == "orchestrator: the address is in use", "nobody is waited for without end"


@pytest.mark.spec("S1 10.1", "S1 10.13")
def test_first_error_is_kept_and_a_stop_error_follows_it() -> None:
    play = Play().until(Phase.SERVING)
    play.faulted("first")
    play.exited()
    play.gateway(ServingFailed(error="third"))
    play.tell(ServiceFailed(service="membership", phase="x", error="fourth"))
    play.rpc_closed()
    play.nodes_stopped("node 3: cannot be killed")
    play.flushed()
    assert play.over().error.endswith("first")
    assert play.run.result.stop_error == "provider stop: node 3: cannot be killed"


def test_last_lines_of_a_worker_that_exits_after_its_fault_are_in_the_exit_record() -> None:
    play = Play().until(Phase.SERVING)
    play.faulted()
    play.exited(tail=["the real cause"])
    play.rpc_closed()
    play.nodes_stopped()
    assert play.records()[-1]["detail"]["stderr_tail"] == ["the real cause"]


# --- what may go wrong without an end ---------------------------------------------------------------------------
@pytest.mark.parametrize("role", [Role.MEMBERSHIP, Role.COLLECTOR, Role.RESOLVER])
def test_restart_of_a_service_without_run_state_is_survived(role: Role) -> None:
    play = Play().until(Phase.SERVING)
    play.tell(ServiceRestarted(role, "was killed by SIGKILL"))
    play.service_ready(role, boot=2)
    assert play.at(Phase.SERVING)
    assert play.names() == (["ExpectFlow", "DatastreamSubscribe"] if role is Role.COLLECTOR else [])


def test_restart_of_the_gateway_before_the_run_began_is_none_of_its_business() -> None:
    play = Play()
    play.configure()
    play.service_ready(Role.GATEWAY, boot=1)
    play.service_ready(Role.GATEWAY, boot=2)
    play.services_ready()
    assert play.at(Phase.PROVIDER)


def test_services_are_reached_while_the_router_restarts() -> None:
    play = Play().until(Phase.ACK)
    play.unroute(*ADDRESS.values())
    play.acked()
    ((dst, _),) = play.harness.sent()
    assert dst == ADDRESS[Role.PROVISIONER]


@pytest.mark.parametrize("dst", [ADDRESS[Role.RESOLVER], b"\x77" * 32])
def test_what_is_not_needed_may_fail_to_be_sent(dst: bytes) -> None:
    """A question that is asked again, or a word to a worker that was replaced or left out."""
    play = Play().until(Phase.SERVING)
    message = ConfigGet(part="orchestrator") if dst == ADDRESS[Role.RESOLVER] else StopRun(run_id=7)
    play.out_of_reach(dst, message, 2 * WORKER_SILENT_MS_SERVING)
    assert play.at(Phase.SERVING)


@pytest.mark.spec("S1 10.12")
def test_failed_subscription_is_recorded_only() -> None:
    play = Play().until(Phase.ACK)
    play.tell(
        SendFailed(
            ADDRESS[Role.COLLECTOR], ExpectFlow(flow_id=b"f" * 16, token=b"t" * 16, node_id=3, run_id=7), "peer_lost"
        )
    )
    assert play.transitions() == [("datastream_subscribe", "failed")]
    assert play.at(Phase.ACK)


# --- limits (design.md 6 row 14) --------------------------------------------------------------------------------
def test_each_new_fact_extends_the_readiness_limit_but_flapping_does_not() -> None:
    play = Play().until(Phase.READINESS)
    play.harness.advance(50_000)
    play.reported()
    play.harness.advance(50_000)
    play.member()
    for _ in range(5):
        play.harness.advance(10_000)
        play.member(state="suspect")
        play.member()
    assert play.at(Phase.READINESS)
    play.harness.advance(10_000)
    assert play.failure()["detail"]["error"] == (
        f"no worker readiness for 60 s (node {NODE_ID}: no route to its node actor)"
    )


@pytest.mark.spec("S1 9.7")
def test_progress_extends_the_limit_of_loading() -> None:
    play = Play().until(Phase.WEIGHTS)
    for done in range(5):
        play.harness.advance(119_000)
        play.progressed(done=done)
    assert play.at(Phase.WEIGHTS)
    play.harness.advance(120_000)
    assert "made no progress in loading_weights for 120 s" in play.failure()["detail"]["error"]


def test_progress_of_ten_hertz_is_recorded_once_a_second() -> None:
    play = Play().until(Phase.WEIGHTS)
    for done in range(100):
        play.progressed(done=done)
        play.harness.advance(100)
    waits = [phase for phase, _ in play.transitions() if phase == "stage_provision_wait"]
    assert len(waits) == 10


# --- a worker that reports again --------------------------------------------------------------------------------
@pytest.mark.spec("S1 4.7")
def test_new_readiness_before_the_acknowledgement_starts_over_within_its_limit() -> None:
    play = Play().until(Phase.ACK)
    play.harness.advance(30_000)
    play.reported(readiness_id=2, node_actor=b"\x77" * 32)
    play.said()
    play.harness.advance(1_000)
    assert play.said(RuntimeReadyAck) == []  # no route to the new actor yet
    play.acked(readiness_id=2)
    assert play.at(Phase.ACK)  # nothing was acknowledged to it
    play.route(b"\x77" * 32, node=play.key())
    play.harness.advance(250)
    assert [ack.readiness_id for ack in play.said(RuntimeReadyAck)] == [2]
    play.acked(readiness_id=1)
    assert play.at(Phase.ACK)
    play.harness.advance(28_000)
    play.acked(readiness_id=2)
    assert play.at(Phase.BOOTSTRAP)


@pytest.mark.parametrize("phase", [Phase.READINESS, Phase.ACK, Phase.WEIGHTS, Phase.SERVING])
def test_repeated_report_changes_nothing(phase: Phase) -> None:
    play = Play().until(phase)
    play.reported()
    play.said()
    play.records()
    play.reported()
    assert (play.run.phase, play.names(), play.records()) == (phase, [], [])


def test_membership_restart_during_the_acknowledgement_does_not_hold_it_up() -> None:
    play = Play().until(Phase.ACK)
    play.membership_restarts()
    play.harness.advance(250)
    assert len(play.said(RuntimeReadyAck)) == 1
    play.acked()
    assert play.at(Phase.BOOTSTRAP)


def test_membership_restart_does_not_hold_up_a_worker_that_starts_over_either() -> None:
    play = Play().until(Phase.ACK)
    play.membership_restarts()
    play.reported(readiness_id=2)
    play.said()
    play.harness.advance(250)
    assert [ack.readiness_id for ack in play.said(RuntimeReadyAck)] == [2]


# --- context (6.12, 9.19) ---------------------------------------------------------------------------------------
@pytest.mark.spec("S1 6.12", "S1 9.19")
def test_foreign_reports_change_nothing() -> None:
    play = Play().until(Phase.READINESS)
    play.member()
    play.routed()
    play.records()
    play.reported(run_id=8)
    play.reported(node_id=9)
    play.reported(stage_index=1)
    play.reported(node=b"\xee" * 32)
    assert (play.run.phase, play.records()) == (Phase.READINESS, [])
    play.reported()
    foreign = ObserveNodeRuntimeReadyAck(run_id=8, node_id=NODE_ID, stage_index=0, readiness_id=1)
    play.worker(foreign)
    assert play.at(Phase.ACK)
    play.acked()
    play.completed()
    play.loaded(stage=1)
    play.stage_ready(stage=1)
    play.faulted(stage=1)
    play.exited(stage=1)
    play.provisioner(NodeExited(node_id=NODE_ID, stage_index=5, status=1))
    play.provisioner(NodeFailed(node_id=9, stage_index=0, error="x"))
    assert play.at(Phase.WEIGHTS)


@pytest.mark.spec("S1 9.19", "S1 9.5")
def test_endpoint_of_another_node_is_no_readiness() -> None:
    play = Play().until(Phase.READINESS)
    play.member()
    play.routed()
    play.reported(endpoint=EndpointWire(node_key=b"\xee" * 32))
    assert play.at(Phase.READINESS)


@pytest.mark.spec("S1 9.4", "S1 9.7")
def test_answers_of_another_phase_change_nothing() -> None:
    play = Play().until(Phase.READINESS)
    play.completed()
    play.loaded()
    play.stage_ready()
    play.opened()
    play.nodes_stopped()
    play.rpc_closed()
    play.flushed()
    play.prepared()
    play.started()
    assert play.at(Phase.READINESS)
    assert play.said(ProvisionStage, OpenPromptRpc, CloseRpc) == []
    play.until(Phase.SERVING)
    play.opened()
    play.rpc_closed()
    play.gateway(PromptRpcFailed(error="late"))
    assert (play.run.phase, play.transitions()) == (Phase.SERVING, [])
