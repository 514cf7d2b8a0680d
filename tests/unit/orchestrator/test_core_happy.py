"""The whole run as it should go: what is sent, recorded and answered, in S1's order (4.1-4.12)."""

from __future__ import annotations

import pytest

from common.addresses import Role
from common.effects import StopSignal
from common.messages.node_agent import ProvisionStage, RuntimeReadyAck, StopRun
from common.messages.provision import PrepareProvider, ProviderPrepared, StartNode
from common.messages.serve import CloseRpc, OpenPromptRpc, ShutdownRequested
from common.messages.service import Lease, RunEnded, ServiceReady
from common.records import CHANNEL_STAGE_ROUTE, CHANNEL_STDERR
from services.orchestrator.base import SERVICES_OF_A_RUN, Phase, RunOver
from services.orchestrator.core import StdioLine, StopLine
from tests.unit.orchestrator.playbook import ADDRESS, NODE_ID, NONCE, RUN_ID, Play, TwoWorkers

START_UP = [
    ("config", "ready"),
    ("orchestrator_report_actor", "ready"),
    ("orchestrator_actor", "ready"),
    ("services", "ready"),
    ("node_provisioner", "started"),
    ("node_provisioner", "ready"),
    ("node_spec", "ready"),
    ("provider_start", "started"),
    ("provider_start", "ready"),
    ("node_runtime_ready", "started"),
    ("run_command", "observed"),
    ("node_runtime_ready", "ready"),
    ("node_route", "ready"),
    ("node_swim", "ready"),
    ("runtime_ready_ack", "sent"),
    ("runtime_ready_ack", "ready"),
    ("complete_bootstrap", "started"),
    ("complete_bootstrap", "ready"),
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
SHUTDOWN = [
    ("shutdown", "started"),
    ("run_command", "observed"),
    ("run_lifecycle", "observed"),
    ("run_lifecycle", "observed"),
    ("provider_stop", "started"),
    ("provider_stop", "ready"),
    ("provider_stop", "ready"),
    ("orch_exit", "ready"),
]


@pytest.mark.spec("S1 3.4", "S1 4.5", "S1 4.6", "S1 4.7", "S1 4.8", "S1 4.9", "S1 4.10", "S1 4.12", "S1 5.10", "S1 8.4")
def test_whole_run_says_and_records_everything_in_order() -> None:
    play = Play()
    assert play.names() == ["ConfigGet"]
    play.configure()
    play.services_ready()
    assert [type(msg) for msg in play.said()] == [PrepareProvider]
    play.prepared()
    (start,) = play.said()
    assert isinstance(start, StartNode)
    assert (start.run, start.orchestrator, start.spec.node_id) == (NONCE, play.run.actor_address, NODE_ID)
    play.started()
    assert play.names() == []
    play.reported()
    play.routed()
    assert play.names() == []
    play.member()
    assert play.names() == ["ExpectFlow", "DatastreamSubscribe", "RuntimeReadyAck"]
    play.acked()
    assert play.names() == ["CompleteBootstrap"]
    play.completed()
    (provision,) = play.said()
    assert isinstance(provision, ProvisionStage)
    assert provision.provision.authorized_orchestrator == play.run.actor_address
    assert (provision.provision.layer_start, provision.provision.layer_end_exclusive) == (0, None)
    play.loaded()
    assert play.names() == []
    play.stage_ready()
    (opening,) = play.said()
    assert isinstance(opening, OpenPromptRpc)
    assert (opening.mode, opening.encode_actor, opening.nodes) == ("direct", play.node_actor(), [play.key()])
    play.opened()
    play.not_over()
    records = play.records()
    assert [(record["phase"], record["status"]) for record in records] == START_UP
    assert {record["run_id"] for record in records} == {RUN_ID}

    play.tell(StopSignal("SIGTERM", 1))
    assert [type(msg) for msg in play.said()] == [CloseRpc]
    play.rpc_closed()
    assert [type(msg) for msg in play.said()] == [StopRun]
    play.stage_stopped()
    assert play.names() == ["StopNodes"]
    play.node_stopped()
    play.nodes_stopped()
    assert play.names() == ["RunEnded"] * len(SERVICES_OF_A_RUN) + ["Flush"]
    play.not_over()
    play.flushed()
    assert play.over() == RunOver(0, "")
    ended = play.records()
    assert sorted((record["phase"], record["status"]) for record in ended) == sorted(SHUTDOWN)
    assert [record["phase"] for record in ended if record["phase"] in ("shutdown", "provider_stop", "orch_exit")] == [
        "shutdown",
        "provider_stop",
        "provider_stop",
        "provider_stop",
        "orch_exit",
    ]
    assert ended[0]["detail"]["source"] == "SIGTERM"
    lifecycle = [record["detail"]["event"] for record in ended if record["phase"] == "run_lifecycle"]
    assert lifecycle == ["RunOperatorStopped", "RunTornDown"]
    assert ended[-1]["detail"] == {"result": "ok"}


def test_config_record_carries_the_resolvers_detail_and_the_boot() -> None:
    play = Play()
    play.configure(notes=["a default was chosen"])
    record = play.records()[0]
    assert record["detail"] == {
        "provider": "process",
        "model_id": "smol",
        "boot": 7,
        "notes": ["a default was chosen"],
    }


def test_services_may_come_in_any_order_and_after_the_configuration() -> None:
    play = Play()
    for role in reversed(SERVICES_OF_A_RUN):
        play.service_ready(role)
        assert play.at(Phase.SERVICES)
    play.configure()
    assert play.at(Phase.PROVIDER)


def test_strange_services_are_not_counted() -> None:
    play = Play()
    play.configure()
    play.from_service(Role.GATEWAY, ServiceReady(service="router", boot=1))
    play.from_service(Role.GATEWAY, ServiceReady(service="nonsense", boot=1))
    assert play.run.services == {}


@pytest.mark.spec("S1 9.5", "S1 4.6")
@pytest.mark.parametrize(
    "order", [("reported", "routed", "member"), ("member", "routed", "reported"), ("routed", "member", "reported")]
)
def test_ready_is_only_who_has_all_three_facts(order: tuple[str, ...]) -> None:
    play = Play().until(Phase.READINESS)
    for fact in order:
        assert play.said(RuntimeReadyAck) == []
        getattr(play, fact)()
    assert len(play.said(RuntimeReadyAck)) == 1
    said = [phase for phase, _ in play.transitions()]
    assert sorted(said) == ["node_route", "node_runtime_ready", "node_swim", "runtime_ready_ack"]


@pytest.mark.spec("S1 9.5")
def test_route_must_lead_to_the_node_that_was_started_for_this_stage() -> None:
    play = Play().until(Phase.READINESS)
    play.reported()
    play.member()
    play.route(play.node_actor(), node=b"\xee" * 32)
    assert play.at(Phase.READINESS)
    play.routed()
    assert play.at(Phase.ACK)


@pytest.mark.spec("S1 9.5")
@pytest.mark.parametrize("state", ["suspect", "dead", "left", "unknown"])
def test_member_must_be_alive(state: str) -> None:
    play = Play().until(Phase.READINESS)
    play.reported()
    play.routed()
    play.member(state=state)
    assert play.at(Phase.READINESS)
    play.member()
    assert play.at(Phase.ACK)


@pytest.mark.spec("S1 4.6", "S1 9.5", "S1 9.6")
def test_every_worker_must_pass_the_barrier_and_confirm() -> None:
    play = Play(TwoWorkers(NONCE)).until(Phase.START)
    play.started(1)
    play.reported(1)
    play.started(0)
    assert play.at(Phase.READINESS)
    for stage in (0, 1):
        play.member(stage)
        play.routed(stage)
    assert play.at(Phase.READINESS)
    play.reported(0)
    acks = play.said(RuntimeReadyAck)
    assert [(ack.run_id, ack.node_id, ack.stage_index, ack.readiness_id) for ack in acks] == [
        (RUN_ID, NODE_ID, 0, 1),
        (RUN_ID, NODE_ID + 1, 1, 1),
    ]
    play.acked(1)
    assert play.at(Phase.ACK)
    play.harness.advance(250)
    assert [ack.stage_index for ack in play.said(RuntimeReadyAck)] == [0]
    play.acked(0)
    assert play.at(Phase.BOOTSTRAP)


@pytest.mark.spec("S1 4.9")
def test_stages_load_one_after_the_other_from_the_first() -> None:
    play = Play(TwoWorkers(NONCE)).until(Phase.START)
    for stage in (0, 1):
        play.started(stage)
        play.reported(stage)
        play.started(stage)
    for stage in (0, 1):
        play.reported(stage)
        play.member(stage)
        play.routed(stage)
    for stage in (0, 1):
        play.acked(stage)
    play.said()
    play.completed()
    assert [msg.provision.stage_index for msg in play.said(ProvisionStage)] == [0]
    play.loaded(0)
    assert [msg.provision.stage_index for msg in play.said(ProvisionStage)] == [1]
    play.stage_ready(0)
    play.loaded(1)
    assert play.at(Phase.WEIGHTS)
    play.harness.advance(1000)
    assert [msg.provision.stage_index for msg in play.said(ProvisionStage)] == [1]
    play.stage_ready(1)
    assert len(play.said(OpenPromptRpc)) == 1


@pytest.mark.spec("S1 9.6", "S1 4.7")
def test_acknowledgement_is_repeated_each_250_ms_until_confirmed() -> None:
    play = Play().until(Phase.ACK)
    play.harness.advance(1000)
    assert len(play.said(RuntimeReadyAck)) == 4
    play.acked(readiness_id=9)
    assert play.at(Phase.ACK)
    play.acked()
    assert play.at(Phase.BOOTSTRAP)
    play.said()
    play.harness.advance(2000)
    assert play.said(RuntimeReadyAck) == []


@pytest.mark.spec("S1 4.8", "S1 9.7")
def test_provision_is_repeated_each_second_to_the_same_words_until_weights() -> None:
    play = Play().until(Phase.WEIGHTS)
    play.harness.advance(30_000)
    sent = play.said(ProvisionStage)
    assert len(sent) == 30 and len({repr(message) for message in sent}) == 1
    routes = play.records(CHANNEL_STAGE_ROUTE)
    assert [record["detail"]["attempt"] for record in routes] == [15, 30]
    assert routes[0]["detail"]["route_matches_ready"] and routes[0]["detail"]["member_state"] == "alive"
    play.loaded()
    play.stage_ready()
    play.said()
    play.harness.advance(5_000)
    assert play.said(ProvisionStage) == []


def test_leases_go_to_provisioner_gateway_and_worker_each_five_seconds() -> None:
    play = Play().until(Phase.READINESS)
    play.reported()
    first = [(dst, msg) for dst, msg in play.harness.sent() if isinstance(msg, Lease)]
    assert [dst for dst, _ in first] == [play.node_actor()]
    play.harness.advance(5_000)
    holders = [dst for dst, msg in play.harness.sent() if isinstance(msg, Lease)]
    assert holders == [ADDRESS[Role.PROVISIONER], ADDRESS[Role.GATEWAY], play.node_actor()]


def test_a_rented_worker_is_leased_for_longer_the_services_here_are_not() -> None:
    play = Play()
    play.configure(provider="vastai")
    play.services_ready()
    play.provisioner(ProviderPrepared(provider="vastai"))
    play.started()
    play.reported()
    leases = {dst: msg.ttl_ms for dst, msg in play.harness.sent() if isinstance(msg, Lease)}
    assert leases[play.node_actor()] == 300_000
    play.harness.advance(5_000)
    leases = {dst: msg.ttl_ms for dst, msg in play.harness.sent() if isinstance(msg, Lease)}
    assert leases == {ADDRESS[Role.PROVISIONER]: 60_000, ADDRESS[Role.GATEWAY]: 60_000, play.node_actor(): 300_000}


@pytest.mark.spec("S1 9.17", "S1 4.11", "S1 10.14")
@pytest.mark.parametrize(
    ("event", "source"),
    [(StopLine("stop"), "stdin"), (StopSignal("SIGINT", 1), "SIGINT"), (ShutdownRequested(source="rpc"), "rpc")],
)
def test_stop_while_serving_is_a_success_and_names_its_source(event: object, source: str) -> None:
    play = Play().until(Phase.SERVING)
    play.tell(event)
    assert play.records()[0]["detail"] == {"source": source, "phase": "serve_prompts"}
    assert play.finish() == RunOver(0, "")


def test_run_ended_and_exit_status_reach_every_service() -> None:
    play = Play().until(Phase.SERVING)
    play.exited(status=9)
    play.rpc_closed()
    play.nodes_stopped()
    ended = play.said(RunEnded)
    assert {(msg.status, msg.error) for msg in ended} == {
        (1, f"node {NODE_ID} exited while serving prompts: exit status 9")
    }


def test_no_lease_after_the_run_ended() -> None:
    play = Play().until(Phase.SERVING)
    play.tell(StopLine("stop"))
    play.finish()
    play.harness.sent()
    play.harness.advance(60_000)
    assert play.said(Lease) == []


def test_captured_lines_are_log_records_of_the_run() -> None:
    play = Play().until(Phase.SERVING)
    play.tell(StdioLine("stderr", "careful"))
    play.tell(StdioLine("stderr", "hello", "prompt_gateway"))
    lines = [record["line"] for record in play.records(CHANNEL_STDERR)]
    assert [line["line"] for line in lines] == ["careful", "prompt_gateway: hello"]
    assert lines[0] == {"run_id": RUN_ID, "node_id": NODE_ID, "stream": "Stderr", "line": "careful"}
