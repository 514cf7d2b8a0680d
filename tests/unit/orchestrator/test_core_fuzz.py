"""Any order of anything: one end, in bounded time, with the workers stopped, and no prompt before its facts.

Two runs of events are mixed: those of a run that goes well, so that late phases are reached, and any others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.addresses import Role
from common.effects import SendFailed, StopSignal
from common.limits import FLUSH_MS, PROVIDER_STOP_LIMIT_MS, RPC_CLOSED_MS, STAGE_STOPPED_MS
from common.messages.config import ConfigFailed
from common.messages.provision import BootstrapCompleted, NodeFailed, PrepareProvider, ProviderPrepareFailed, StopNodes
from common.messages.serve import (
    CloseRpc,
    OpenPromptRpc,
    PromptRpcFailed,
    ServingFailed,
    ShutdownRequested,
)
from common.messages.service import ServiceFailed
from services.orchestrator.base import CLOSING, SERVICES_OF_A_RUN, Phase, RunOver
from services.orchestrator.core import RunActor, ServiceLost, ServiceRestarted, StdioLine, StopLine
from tests.unit.orchestrator.playbook import ADDRESS, NODE_ID, NONCE, Play, TwoWorkers

END_MS_MAX = RPC_CLOSED_MS + STAGE_STOPPED_MS + PROVIDER_STOP_LIMIT_MS + FLUSH_MS
START_UP_MS_MAX = 60_000 + 2 * 120_000 + 7 * 60_000 + 60_000 + 120_000 + 6 * 120_000 + 120_000
"""No phase waits for ever: the sum of all silence limits, each fact of two workers extending once."""

Act = Callable[[Play], None]
stages = st.integers(0, 1)
roles = st.sampled_from(SERVICES_OF_A_RUN)


def act(name: str, *args: Any, **kwargs: Any) -> Act:
    def do(play: Play) -> None:
        getattr(play, name)(*args, **kwargs)

    return do


def from_service(role: Role, message: Any) -> Act:
    return lambda play: play.from_service(role, message)


def undelivered(role: Role, message: Any, *phases: Phase) -> Act:
    """In a phase that says such a thing."""

    def happens(play: Play) -> None:
        if play.run.phase in phases:
            play.tell(SendFailed(ADDRESS[role], message, "peer_lost"))

    return happens


def in_worker(name: str, *args: Any, **kwargs: Any) -> Act:
    """Only once there is an orchestrator actor to tell it to."""
    return lambda play: getattr(play, name)(*args, **kwargs) if play.run.actor_address else None


good = st.one_of(
    st.just(act("configure")),
    st.just(act("services_ready")),
    st.just(act("prepared")),
    st.builds(lambda stage: act("started", stage), stages),
    st.builds(lambda stage: in_worker("reported", stage), stages),
    st.builds(lambda stage: act("routed", stage), stages),
    st.builds(lambda stage: act("member", stage), stages),
    st.builds(lambda stage: in_worker("acked", stage), stages),
    st.just(act("completed")),
    st.builds(lambda stage: in_worker("loaded", stage), stages),
    st.builds(lambda stage: in_worker("stage_ready", stage), stages),
    st.builds(lambda stage: in_worker("progressed", stage), stages),
    st.just(act("opened")),
    st.builds(lambda role: act("service_ready", role), roles),
)
closing = st.one_of(
    st.just(act("rpc_closed")),
    st.builds(lambda stage: in_worker("stage_stopped", stage), stages),
    st.just(act("node_stopped")),
    st.sampled_from([act("nodes_stopped"), act("nodes_stopped", "node 3: no")]),
    st.just(act("flushed")),
)
harmless = st.one_of(
    st.builds(lambda stage: in_worker("reported", stage, node=b"\xee" * 32), stages),
    st.just(in_worker("reported", run_id=9)),
    st.just(in_worker("reported", node_id=99)),
    st.just(in_worker("acked", readiness_id=9)),
    st.builds(lambda stage, state: act("member", stage, state), stages, st.sampled_from(["suspect", "alive"])),
    st.just(act("membership_restarts")),
    st.builds(lambda stage: lambda play: play.unroute(play.node_actor(stage)), stages),
    st.just(lambda play: play.unroute(*ADDRESS.values())),
    st.builds(lambda role: lambda play: play.route(ADDRESS[role], role, role), roles),
    st.builds(lambda ms: lambda play: play.harness.advance(ms), st.sampled_from([1, 250, 1_000, 5_000])),
    st.just(lambda play: play.tell(StdioLine("stderr", "x"))),
    st.just(lambda play: play.tell(ServiceRestarted(Role.MEMBERSHIP, "was killed"))),
    st.just(act("service_ready", Role.COLLECTOR, 2)),
    st.just(act("service_ready", Role.MEMBERSHIP, 2)),
)
bad = st.one_of(
    st.builds(lambda stage: act("exited", stage), stages),
    st.builds(lambda stage: in_worker("faulted", "x", stage), stages),
    st.builds(lambda stage: in_worker("reported", stage, 2), stages),
    st.builds(lambda stage, state: act("member", stage, state), stages, st.sampled_from(["dead", "left"])),
    st.just(from_service(Role.PROVISIONER, ProviderPrepareFailed(error="x"))),
    st.just(from_service(Role.PROVISIONER, NodeFailed(node_id=NODE_ID, stage_index=0, error="x"))),
    st.just(from_service(Role.PROVISIONER, BootstrapCompleted(error="x"))),
    st.just(from_service(Role.GATEWAY, PromptRpcFailed(error="x"))),
    st.just(from_service(Role.GATEWAY, ServingFailed(error="x"))),
    st.just(from_service(Role.COLLECTOR, ServiceFailed(service="datastream_collector", phase="x", error="x"))),
    st.just(from_service(Role.RESOLVER, ConfigFailed(error="x"))),
    st.builds(lambda role: act("service_ready", role, 2), st.sampled_from([Role.GATEWAY, Role.PROVISIONER])),
    st.builds(lambda role: lambda play: play.tell(ServiceLost(role, "ended")), roles),
    st.just(undelivered(Role.PROVISIONER, PrepareProvider(run_id=7, provider="process"), Phase.PROVIDER)),
    st.just(undelivered(Role.PROVISIONER, StopNodes(), *CLOSING)),
    st.just(undelivered(Role.GATEWAY, CloseRpc(reason="x"), *CLOSING)),
    st.just(lambda play: play.tell(StopLine("stop"))),
    st.just(lambda play: play.tell(ShutdownRequested(source="rpc"))),
    st.builds(lambda count: lambda play: play.tell(StopSignal("SIGTERM", count)), st.integers(1, 2)),
    st.builds(lambda ms: lambda play: play.harness.advance(ms), st.sampled_from([30_000, 60_000, 120_000])),
)


class Watched:
    """A play whose every message and effect is judged as it appears."""

    def __init__(self, actor: RunActor) -> None:
        self.play = Play(actor)
        self.overs: list[RunOver] = []
        self.said: list[Any] = []
        self.provisioner_lost = False

    def do(self, action: Act) -> None:
        action(self.play)
        self.look()

    def look(self) -> None:
        run = self.play.run
        messages = self.play.said()
        for message in messages:
            closing = any(isinstance(before, CloseRpc) for before in self.said)
            if isinstance(message, OpenPromptRpc):
                assert not closing, "a prompt RPC is opened after it was closed"
                workers = run.workers.values()
                assert workers and all(w.ready and w.acked and w.weights and w.stage_ready for w in workers)
            if isinstance(message, StopNodes):
                assert run.provider_touched
            if isinstance(message, CloseRpc):
                assert not any(isinstance(before, StopNodes) for before in self.said), "workers before the RPC"
            self.said.append(message)
        self.overs += [effect for effect in self.play.harness.effects() if isinstance(effect, RunOver)]
        assert len(self.overs) <= 1
        assert (run.phase is Phase.OVER) == bool(self.overs)
        assert run.result.status == 1 or not run.result.error

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.said)


def settle(watched: Watched, *, stop: bool) -> None:
    """Nobody says anything any more: it ends by its own limits, everything owed was done."""
    run = watched.play.run
    if stop and run.phase not in CLOSING:
        watched.do(lambda play: play.tell(StopLine("stop")))
        watched.do(lambda play: play.harness.advance(END_MS_MAX))
    elif run.phase in CLOSING:
        watched.do(lambda play: play.harness.advance(END_MS_MAX))
    elif run.phase is not Phase.SERVING:
        limit = watched.play.harness.now_ms + START_UP_MS_MAX + END_MS_MAX
        while run.phase is not Phase.OVER and watched.play.harness.now_ms < limit:
            watched.do(lambda play: play.harness.advance(60_000))
    if run.phase is Phase.SERVING:
        return
    (over,) = watched.overs
    assert over.status == (1 if over.error else 0)
    if watched.count(PrepareProvider) and not run._stop_unanswered:
        assert watched.count(StopNodes) >= 1
    if watched.count(OpenPromptRpc) and run.rpc_open:
        assert watched.count(CloseRpc) == 1
    watched.do(lambda play: play.harness.advance(10_000))


@pytest.mark.spec("S1 4.13", "S1 9.4", "S1 9.16", "S1 10.1", "S1 4.12")
@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    actions=st.lists(st.one_of(good, good, good, harmless, closing, bad), max_size=50),
    two=st.booleans(),
    stop=st.booleans(),
)
def test_any_order_of_events_ends_once(actions: list[Act], two: bool, stop: bool) -> None:
    watched = Watched(TwoWorkers(NONCE) if two else RunActor(NONCE))
    for action in actions:
        watched.do(action)
    settle(watched, stop=stop)


@pytest.mark.spec("S1 4.13", "S1 9.4", "S1 9.16", "S1 10.1")
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    phase=st.sampled_from([phase for phase in Phase if phase not in (*CLOSING, Phase.PLAN, Phase.RESTART)]),
    actions=st.lists(st.one_of(good, harmless, closing, bad), max_size=25),
    stop=st.booleans(),
)
def test_any_events_in_any_phase_end_once(phase: Phase, actions: list[Act], stop: bool) -> None:
    watched = Watched(RunActor(NONCE))
    watched.play.until(phase)
    # `until` forgets what was said; what is owed follows from the phase.
    for action in actions:
        watched.do(action)
    run = watched.play.run
    touched = run.provider_touched
    settle(watched, stop=stop)
    if touched and run.phase is Phase.OVER and not run._stop_unanswered:
        assert watched.count(StopNodes) >= 1
    if run.phase is Phase.OVER and phase is Phase.SERVING and run.rpc_open:
        assert watched.count(CloseRpc) == 1


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_harmless_events_never_end_a_run_that_goes_well(data: st.DataObject) -> None:
    play = Play()
    for phase in [phase for phase in Phase if phase not in (*CLOSING, Phase.SERVICES, Phase.PLAN, Phase.RESTART)]:
        play.until(phase)
        for action in data.draw(st.lists(harmless, max_size=3)):
            action(play)
        assert play.run.phase not in CLOSING
        for role in SERVICES_OF_A_RUN:
            play.route(ADDRESS[role], role, role)
        if phase is Phase.READINESS:
            for step in (play.reported, play.routed, play.member):
                step()
        if phase is not Phase.SERVING:
            assert play.run.phase in (phase, Phase.ACK)
