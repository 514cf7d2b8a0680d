"""How a worker ends: teardown, crash, silence, lost lease, and whoever started it (S1 6.5, 9.16, 10.8)."""

from __future__ import annotations

import pytest

from common.actors import Inbox
from common.datastream import Drain
from common.effects import Exit, OwnerGone, StopSignal
from common.limits import LEASE_TTL_MS, STAGE_SILENCE_MS
from common.messages.engine import (
    Cancel,
    Cancelled,
    Fatal,
    Progress,
    Released,
    ReleaseRun,
    ResetRole,
    RoleReset,
    Shutdown,
)
from common.messages.node_agent import StopRun
from common.messages.orchestrator import ObserveNodeRuntimeReady, ObserveStageFault, ObserveStageStopped
from common.messages.prompt import Fault
from common.messages.service import Lease
from common.swim.actor import Leave
from tests.unit.agent.playbook import (
    ACK,
    ENGINE_READY,
    GATEWAY_INBOX,
    ORCHESTRATOR,
    RUN,
    STAGE,
    Agent,
    prompt,
    provision,
    ready_agent,
)
from worker.agent.events import EngineExited, EngineHungUp, KillEngine, PageRead, ReadPage, StopAsked
from worker.stage_controller import StageState

STOPPED = ObserveStageStopped(run_id=RUN, stage_index=STAGE)
KILLED = EngineExited("the engine was killed by SIGKILL", -9)


def exits(agent: Agent) -> list[Exit]:
    return [effect for effect in agent.effects() if isinstance(effect, Exit)]


@pytest.mark.spec("S1 6.5")
def test_the_teardown_is_performed_step_by_step_and_then_reported() -> None:
    agent = ready_agent()
    agent.tell(StopRun(run_id=RUN))
    assert agent.told() == [ReleaseRun(), ResetRole()]
    assert agent.sent() == []
    agent.engine(Released())
    assert agent.sent() == []
    agent.engine(RoleReset())
    assert agent.sent() == [(ORCHESTRATOR, STOPPED)]
    assert agent.events() == [("shutdown", "stop_run", "started"), ("shutdown", "stop_run", "ready")]
    agent.tell(StopRun(run_id=RUN))
    assert agent.sent() == [(ORCHESTRATOR, STOPPED)]
    assert agent.told() == []


@pytest.mark.spec("S1 6.5")
def test_nothing_is_released_while_a_generation_still_runs() -> None:
    agent = ready_agent()
    agent.tell(prompt(5))
    agent.told()
    agent.tell(StopRun(run_id=RUN))
    assert agent.told() == [Cancel(request_id=5)]
    assert agent.actor.core.state is StageState.STOPPING
    agent.engine(Cancelled(request_id=5))
    assert agent.told() == [ReleaseRun(), ResetRole()]


@pytest.mark.spec("S1 6.12", "S1 9.19")
def test_a_stop_of_another_run_is_dropped_with_a_record() -> None:
    agent = ready_agent()
    agent.tell(StopRun(run_id=2))
    assert (agent.told(), agent.sent(), agent.events()) == ([], [], [("stage", "message", "dropped")])


def test_a_stopped_worker_that_nobody_stops_goes_by_itself() -> None:
    agent = ready_agent()
    agent.tell(StopRun(run_id=RUN))
    agent.engine(Released(), RoleReset())
    agent.quiet()
    agent.advance(1999)
    assert agent.told() == []
    agent.advance(1)
    assert agent.told() == [Shutdown()]
    agent.tell(EngineExited("the engine exited with status 0", 0))
    agent.advance(0)
    assert exits(agent) == [Exit(0)]


@pytest.mark.spec("S1 6.5", "S1 10.8")
@pytest.mark.parametrize("how", ["exit", "fatal"])
def test_a_dead_engine_is_one_stage_fault_one_request_fault_and_exit_1(how: str) -> None:
    agent = ready_agent()
    agent.tell(prompt(5))
    agent.quiet()
    if how == "fatal":
        agent.engine(Fatal(error="the engine was killed by SIGKILL"))
        assert ("stage", "stage", "failed") in agent.events()
        agent.tell(EngineExited("the engine exited with status 1", 1))
    else:
        agent.tell(KILLED)
    assert agent.sent() == [
        (
            ORCHESTRATOR,
            ObserveStageFault(run_id=RUN, stage_index=STAGE, reason="WorkerCrashed: the engine was killed by SIGKILL"),
        ),
        (GATEWAY_INBOX, Fault(request_id=5, error="the engine was killed by SIGKILL", lost=True)),
    ]
    agent.advance(499)
    assert exits(agent) == []
    agent.advance(1)
    assert exits(agent) == [Exit(1, "node 4: the engine was killed by SIGKILL")]


@pytest.mark.spec("S1 10.8")
def test_an_engine_that_cannot_load_is_a_stage_fault_with_its_sentence() -> None:
    agent = Agent()
    agent.engine(ENGINE_READY)
    agent.tell(ACK)
    agent.tell(provision())
    agent.quiet()
    agent.engine(Fatal(error="/m.gguf: No such file or directory"))
    ((_, fault),) = agent.sent()
    assert isinstance(fault, ObserveStageFault)
    assert fault.reason == "WorkerCrashed: /m.gguf: No such file or directory"


def test_an_engine_that_hangs_up_but_stays_is_killed() -> None:
    agent = ready_agent()
    agent.tell(EngineHungUp())
    agent.advance(999)
    assert agent.effects() == []
    agent.advance(1)
    assert agent.effects() == [KillEngine()]


def test_an_engine_that_never_starts_is_a_stage_fault_too() -> None:
    agent = Agent()
    agent.quiet()
    agent.tell(EngineExited("the engine could not be started: python: No such file or directory", None))
    assert [type(message) for _, message in agent.sent()] == [ObserveStageFault]
    agent.advance(500)
    assert exits(agent)[0].status == 1


@pytest.mark.spec("S1 6.5")
def test_an_engine_that_dies_during_the_teardown_has_released_everything() -> None:
    agent = ready_agent()
    agent.tell(prompt(5))
    agent.tell(StopRun(run_id=RUN))
    agent.quiet()
    agent.tell(KILLED)
    assert agent.sent() == [(ORCHESTRATOR, STOPPED)]
    agent.advance(500)
    assert exits(agent) == [Exit(0)]


def silent_for(agent: Agent, ms: int) -> list[object]:
    effects: list[object] = []
    for _ in range(ms // 500):
        agent.advance(500)
        effects += agent.effects()
    return effects


def test_a_silent_engine_faults_the_stage_while_loading_and_the_phase_is_named() -> None:
    agent = Agent()
    agent.tell(Lease(ttl_ms=10_000_000))
    agent.engine(ENGINE_READY)
    agent.tell(ACK)
    agent.tell(provision())
    agent.tell(PageRead("warming_up", 17, 1))
    agent.quiet()
    effects = silent_for(agent, STAGE_SILENCE_MS - 500)
    assert set(effects) == {ReadPage()}
    agent.advance(500)
    assert KillEngine() in agent.effects()
    ((_, fault),) = agent.sent()
    assert isinstance(fault, ObserveStageFault)
    assert fault.reason == "WorkerCrashed: the engine made no progress for 120 s in phase warming_up"
    agent.tell(KILLED)
    agent.advance(500)
    assert exits(agent) == [Exit(1, "node 4: the engine made no progress for 120 s in phase warming_up")]


@pytest.mark.parametrize("moves", ["page", "progress"])
def test_a_page_that_moves_or_progress_that_comes_keeps_a_slow_engine_alive(moves: str) -> None:
    agent = Agent()
    agent.tell(Lease(ttl_ms=10_000_000))
    agent.engine(ENGINE_READY)
    agent.tell(ACK)
    agent.tell(provision())
    for step in range(40):
        assert KillEngine() not in silent_for(agent, STAGE_SILENCE_MS // 4)
        if moves == "page":
            agent.tell(PageRead("loading", step, step))
        else:
            agent.engine(Progress(phase="tensors", done=step, total=99))
    assert agent.actor.core.state is StageState.WAITING


def test_a_silent_engine_is_found_while_answering_but_not_while_idle() -> None:
    agent = ready_agent()
    agent.tell(Lease(ttl_ms=10_000_000))
    agent.advance(10 * STAGE_SILENCE_MS)
    assert agent.effects() == [], "an idle engine is not even looked at"
    agent.tell(prompt(5))
    agent.advance(STAGE_SILENCE_MS + 500)
    assert KillEngine() in agent.effects()
    assert agent.sent_to(GATEWAY_INBOX) == [
        Fault(request_id=5, error="the engine made no progress for 120 s in phase starting", lost=True)
    ]


@pytest.mark.parametrize("leases", [0, 5])
def test_without_a_lease_the_worker_ends_itself(leases: int) -> None:
    agent = ready_agent()
    for _ in range(leases):
        agent.advance(LEASE_TTL_MS - 1)
        agent.tell(Lease(ttl_ms=LEASE_TTL_MS))
    agent.advance(LEASE_TTL_MS - 1)
    assert exits(agent) == []
    agent.advance(2)
    (exit,) = exits(agent)
    assert exit.status == 1 and exit.error.startswith("node 4: no lease from the orchestrator")
    assert ("shutdown", "lease", "failed") in agent.events()


def test_a_rented_worker_gets_a_longer_lease() -> None:
    agent = ready_agent()
    agent.tell(Lease(ttl_ms=300_000))
    agent.advance(299_000)
    assert exits(agent) == []
    agent.advance(1000)
    assert exits(agent) != []


@pytest.mark.parametrize("event", [StopAsked("stdin said shutdown"), OwnerGone(), StopSignal("SIGTERM", 1)])
def test_whoever_started_the_worker_can_stop_it_with_status_0(event: object) -> None:
    agent = ready_agent()
    agent.tell(prompt(5))
    agent.quiet()
    agent.tell(event)
    assert agent.told() == [Cancel(request_id=5), Shutdown()]
    assert agent.sent() == [(GATEWAY_INBOX, Fault(request_id=5, error="the worker is shutting down", lost=True))]
    agent.tell(prompt(6))
    agent.sent()
    agent.tell(EngineExited("the engine exited with status 0", 0))
    agent.advance(0)
    assert exits(agent) == [Exit(0)]
    assert agent.sent() == []


def test_an_engine_that_does_not_leave_is_killed_within_the_provisioners_grace() -> None:
    agent = ready_agent()
    agent.tell(StopAsked("stdin is closed"))
    agent.quiet()
    agent.advance(1000)
    assert agent.effects() == [KillEngine()]
    agent.tell(KILLED)
    agent.advance(0)
    assert exits(agent) == [Exit(0)]


def test_a_second_request_to_stop_does_not_wait_any_more() -> None:
    agent = ready_agent()
    agent.tell(StopSignal("SIGTERM", 1))
    agent.quiet()
    agent.tell(StopSignal("SIGTERM", 2))
    agent.advance(0)
    assert exits(agent) == [Exit(0)]


def test_a_worker_that_is_told_to_stop_reports_no_readiness_and_leaves_the_cluster() -> None:
    agent = Agent()
    agent.engine(ENGINE_READY)
    agent.sent()
    inbox = Inbox(Leave, Drain)
    agent.actor.swim = agent.system.spawn(inbox)
    agent.tell(StopAsked("stdin said shutdown"))
    agent.advance(5000)
    heard = [message for _, message in inbox.drain()]
    assert heard == [Leave()]
    assert not any(isinstance(message, ObserveNodeRuntimeReady) for message in agent.sent_to(ORCHESTRATOR))


def test_a_crash_on_the_way_out_keeps_the_status_of_the_crash() -> None:
    agent = ready_agent()
    agent.tell(KILLED)
    agent.tell(StopAsked("stdin said shutdown"))
    agent.advance(0)
    assert [exit.status for exit in exits(agent)] == [1]
