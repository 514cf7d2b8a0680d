"""Any order of orders, job results, exits and ends: whatever was started is stopped, and it always gets there."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.effects import Exit, OwnerGone, RunJob, StopSignal
from common.messages.bus import Admit, Admitted
from common.messages.provision import CompleteBootstrap, PrepareProvider, StopNodes
from common.messages.service import Lease, RunEnded
from services.provisioner.plugin import Exited, PluginNodeHandle
from services.provisioner.state import Minted, NodeObserved, Prepared, Rechecked
from tests.unit.provisioner.playbook import ORCHESTRATOR, ROUTER, Play, start_node

OTHER = b"p" * 32
NODES = st.integers(1, 3)


class ProvisionerMachine(RuleBasedStateMachine):
    """The test is the jobs' threads: it ends them in any order, well or badly."""

    def __init__(self) -> None:
        super().__init__()
        self.play = Play()
        self.jobs: list[RunJob] = []
        self.admits: list[bytes] = []
        self.minted = 0
        self.running: set[str] = set()
        """Workers that a start job has started and no stop or discard job has ended."""
        self.exit: Exit | None = None
        self.owner = ORCHESTRATOR

    def gather(self) -> None:
        for dst, msg in self.play.harness.sent():
            if isinstance(msg, Admit) and dst == ROUTER:
                self.admits.append(msg.key)
        for effect in self.play.effects():
            if isinstance(effect, RunJob):
                self.jobs.append(effect)
            elif isinstance(effect, Exit):
                self.exit = effect

    @rule()
    def prepare(self) -> None:
        self.play.order(PrepareProvider(run_id=1, provider="process"), src=self.owner)

    @rule()
    def another_orchestrator(self) -> None:
        self.owner = OTHER if self.owner == ORCHESTRATOR else ORCHESTRATOR
        self.play.order(PrepareProvider(run_id=1, provider="process"), src=self.owner)

    @rule(node_id=NODES)
    def start(self, node_id: int) -> None:
        self.play.order(start_node(node_id), src=self.owner)

    @rule()
    def complete(self) -> None:
        self.play.order(CompleteBootstrap(), src=self.owner)

    @rule(fast=st.booleans())
    def stop(self, fast: bool) -> None:
        self.play.order(StopNodes(fast=fast), src=self.owner)

    @rule()
    def run_ended(self) -> None:
        self.play.order(RunEnded(status=0), src=self.owner)

    @rule()
    def lease(self) -> None:
        self.play.order(Lease(ttl_ms=3000), src=self.owner)

    @rule(ms=st.sampled_from([100, 1000, 4000, 12_000]))
    def time_passes(self, ms: int) -> None:
        self.play.harness.advance(ms)

    @rule(data=st.data())
    def a_worker_exits(self, data: st.DataObject) -> None:
        if self.running:
            handle = data.draw(st.sampled_from(sorted(self.running)))
            self.play.harness.tell(NodeObserved(handle, (Exited(1, "exited with status 1"),)))

    @precondition(lambda self: self.admits)
    @rule()
    def the_router_admits(self) -> None:
        self.play.harness.tell(Admitted(key=self.admits.pop(0)), src=ROUTER)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), works=st.sampled_from([True, True, True, False]))
    def a_job_ends(self, data: st.DataObject, works: bool) -> None:
        self.finish(self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1))), works)

    def finish(self, job: RunJob, works: bool) -> None:
        result: object = None
        match job.kind:
            case "prepare":
                result = Prepared(0)
            case "mint":
                self.minted += 1
                result = Minted(self.minted.to_bytes(32, "big"), f"h{self.minted}", "launch")
            case "start_node":
                handle_id = job.args["minted"].handle_id
                result = PluginNodeHandle(handle_id)
                if works:
                    self.running.add(handle_id)
            case "discard":
                self.running.discard(job.args["minted"].handle_id)
            case "recheck":
                result = Rechecked()
            case "stop_node":
                # Attempted is all that is asked for: a stop that fails stays in the ledger.
                self.running.discard(job.args["handle"].id)
        self.play.done(job, result if works else None, "" if works else "it failed")

    @invariant()
    def everything_is_gathered(self) -> None:
        self.gather()

    def teardown(self) -> None:
        """However it stands: SIGTERM, and every job ends. Then nothing runs, and it has exited."""
        self.play.harness.tell(OwnerGone())
        self.play.harness.tell(StopSignal("SIGTERM", 2))
        self.gather()
        while self.jobs:
            self.finish(self.jobs.pop(0), True)
            self.gather()
        assert self.exit is not None
        assert not self.running


ProvisionerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestProvisionerMachine = ProvisionerMachine.TestCase
