"""The jobs: the ledger is always ahead of the worker, secrets stand in the launch file only, nothing is left over."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.addresses import Plane, Role
from common.config_slices import ProvisionerSlice, encode_slice
from common.effects import JobDone, RunJob, ViewChanged
from common.launch_file import LaunchFile
from common.messages.bus import Admit, Admitted, RouteEntry, Snapshot
from common.messages.config import ConfigSlice
from common.messages.provision import (
    BootstrapCompleted,
    CompleteBootstrap,
    NodeExited,
    NodeProvisionSpec,
    NodesStopped,
    NodeStarted,
    PrepareProvider,
    ProviderPrepared,
    StartNode,
    StopNodes,
)
from services.provisioner import jobs as jobs_module
from services.provisioner import registry
from services.provisioner.core import ProvisionerActor
from services.provisioner.jobs import ProvisionerJobs, Surroundings
from services.provisioner.ledger import LedgerError
from services.provisioner.plugin import LeftBehind, Listing, MayBeLeft, PluginNodeHandle, ProviderError, Sink
from services.provisioner.sink import NodeSink
from tests.support.harness import Harness

RUN = b"\x01" * 16
SPEC = NodeProvisionSpec(run_id=1, node_id=2, stage_index=1, image="", env={"DEV": "CPU"})


class FakePlugin:
    """Does what the test says, and remembers what the ledger said at that moment."""

    name = "fake"

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger
        self.calls: list[tuple[str, list[str]]] = []
        self.error = ""
        self.found = False
        self.gate: threading.Event | None = None
        self.inside = threading.Event()

    def _note(self, call: str) -> None:
        lines = [line for path in self.ledger.glob("*.jsonl") for line in path.read_text().splitlines()]
        self.calls.append((call, [json.loads(line)["op"] for line in lines]))

    def prepare(self) -> None:
        if self.error:
            raise ProviderError(self.error)

    def start_node(self, handle_id: str, spec: NodeProvisionSpec, launch_file: Path, sink: Sink) -> PluginNodeHandle:
        self._note("start")
        assert LaunchFile.read(launch_file).node_id == spec.node_id
        self.inside.set()
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.error:
            raise ProviderError(self.error)
        return PluginNodeHandle(handle_id, 42, {"pid": 42})

    def complete_bootstrap(self, handle: PluginNodeHandle) -> None:
        self._note(f"complete {handle.id}")
        if self.error:
            raise ProviderError(f"{self.error} {handle.id}")

    def stop_node(self, handle: PluginNodeHandle, fast: bool) -> None:
        self._note("stop fast" if fast else "stop")
        if self.error:
            raise ProviderError(self.error)

    def stop_left_behind(self, left: LeftBehind) -> bool:
        self.calls.append((f"left {left.id}", []))
        if self.error:
            raise ProviderError(self.error)
        return self.found

    def list_owned(self) -> Listing:
        return Listing()


def idle_sink(handle_id: str) -> NodeSink:
    return NodeSink(handle_id, lambda call: call(), lambda _: None)


class Workshop:
    def __init__(self, tmp_path: Path, **config: Any) -> None:
        self.state = tmp_path / "state"
        self.nodes = tmp_path / "nodes"
        self.secrets: list[str] = []
        self.config = ProvisionerSlice(**({"provider": "fake"} | config))
        self.jobs = ProvisionerJobs(self.surroundings())

    def surroundings(self, make_sink: Callable[[str], NodeSink] = idle_sink) -> Surroundings:
        return Surroundings(
            environment={"XDG_STATE_HOME": str(self.state), "PATH": os.environ["PATH"]},
            nodes_dir=self.nodes,
            worker_key=b"\x0b" * 32,
            worker_endpoints={Plane.CONTROL: "ipc://c", Plane.PROMPT: "ipc://p"},
            make_sink=make_sink,
            add_secret=self.secrets.append,
        )

    @property
    def ledger(self) -> Path:
        return self.state / "swactor-mq" / "ledger"

    def mint(self) -> Any:
        return self.jobs.mint(SPEC, RUN, b"\x0c" * 32, b"\x0d" * 32)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePlugin:
    made = FakePlugin(tmp_path / "state" / "swactor-mq" / "ledger")
    monkeypatch.setitem(registry._PROVIDERS, "fake", lambda inputs: made)
    return made


@pytest.fixture
def workshop(tmp_path: Path, plugin: FakePlugin) -> Workshop:
    made = Workshop(tmp_path)
    made.jobs.prepare(made.config)
    return made


def test_the_intent_is_written_before_the_start_and_the_handle_after_it(workshop: Workshop, plugin: FakePlugin) -> None:
    handle = workshop.jobs.start_node(workshop.mint(), SPEC, RUN)
    workshop.jobs.stop_node(handle, False)
    assert plugin.calls == [("start", ["intent"]), ("stop", ["intent", "handle"])]
    workshop.jobs.close()
    assert list(workshop.ledger.iterdir()) == []


def test_the_launch_file_holds_what_a_worker_needs_and_goes_at_the_stop(workshop: Workshop) -> None:
    minted = workshop.mint()
    launch = LaunchFile.read(Path(minted.launch))
    assert (launch.run_id, launch.run, launch.node_id, launch.stage_index) == (1, RUN.hex(), 2, 1)
    assert launch.endpoints == {"control": "ipc://c", "prompt": "ipc://p"}
    assert (launch.broker_public_key, launch.public_key) == ("0b" * 32, minted.public_key.hex())
    assert (launch.orchestrator, launch.orchestrator_node) == ("0c" * 32, "0d" * 32)
    assert (launch.device, launch.profile, launch.hf_token) == ("CPU", "lan", "")
    assert minted.handle_id.startswith("01010101-2-")
    workshop.jobs.stop_node(workshop.jobs.start_node(minted, SPEC, RUN), False)
    assert list(workshop.nodes.iterdir()) == []


def test_the_wish_to_measure_reaches_the_launch_file(workshop: Workshop) -> None:
    spec = msgspec.structs.replace(SPEC, measure=True)
    minted = workshop.jobs.mint(spec, RUN, bytes([0x0C] * 32), bytes([0x0D] * 32))
    assert LaunchFile.read(Path(minted.launch)).measure
    assert not LaunchFile.read(Path(workshop.mint().launch)).measure


@pytest.mark.spec("S1 9.20")
def test_the_token_reaches_the_launch_file_and_the_redactor_and_nothing_else(
    tmp_path: Path, plugin: FakePlugin
) -> None:
    token = tmp_path / "hf_token"
    token.touch(0o600)
    token.write_text("hf_secret\n")
    workshop = Workshop(tmp_path, hf_token_file=str(token))
    workshop.jobs.prepare(workshop.config)
    minted = workshop.mint()
    assert LaunchFile.read(Path(minted.launch)).hf_token == "hf_secret"
    assert workshop.secrets == ["hf_secret"]
    workshop.jobs.start_node(minted, SPEC, RUN)
    (ledger,) = workshop.ledger.iterdir()
    assert "hf_secret" not in ledger.read_text() and "hf_secret" not in repr(minted)
    assert LaunchFile.read(Path(minted.launch)).secret_key not in ledger.read_text()
    workshop.jobs.close()


@pytest.mark.spec("S1 10.6")
def test_a_start_that_fails_settles_its_intent(workshop: Workshop, plugin: FakePlugin) -> None:
    minted = workshop.mint()
    plugin.error = "no room"
    with pytest.raises(ProviderError, match="no room"):
        workshop.jobs.start_node(minted, SPEC, RUN)
    workshop.jobs.discard(minted)
    workshop.jobs.close()
    assert list(workshop.ledger.iterdir()) == [] and list(workshop.nodes.iterdir()) == []


def test_a_handle_that_cannot_be_written_down_is_stopped_again(
    workshop: Workshop, plugin: FakePlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = jobs_module.Ledger.append

    def append(ledger: Any, record: Any) -> None:
        if record.op == "handle":
            raise LedgerError("cannot write the ledger: No space left on device")
        real(ledger, record)

    monkeypatch.setattr(jobs_module.Ledger, "append", append)
    with pytest.raises(LedgerError, match="No space left"):
        workshop.jobs.start_node(workshop.mint(), SPEC, RUN)
    assert [call for call, _ in plugin.calls] == ["start", "stop fast"]
    workshop.jobs.close()


def test_a_start_that_nobody_waits_for_any_more_is_stopped_when_it_ends(workshop: Workshop, plugin: FakePlugin) -> None:
    minted = workshop.mint()
    plugin.gate = threading.Event()
    errors: list[str] = []

    def start() -> None:
        try:
            workshop.jobs.start_node(minted, SPEC, RUN)
        except ProviderError as error:
            errors.append(str(error))

    late = threading.Thread(target=start)
    late.start()
    assert plugin.inside.wait(60)
    workshop.jobs.discard(minted)
    assert [call for call, _ in plugin.calls] == ["start"]
    plugin.gate.set()
    late.join(60)
    assert errors == ["the start was abandoned"]
    assert [call for call, _ in plugin.calls] == ["start", "stop fast"]
    workshop.jobs.close()
    assert list(workshop.ledger.iterdir()) == []


def test_a_start_that_was_called_off_before_never_begins(workshop: Workshop, plugin: FakePlugin) -> None:
    minted = workshop.mint()
    workshop.jobs.discard(minted)
    with pytest.raises(ProviderError, match="abandoned"):
        workshop.jobs.start_node(minted, SPEC, RUN)
    assert plugin.calls == []
    workshop.jobs.close()


def test_a_stop_that_fails_stays_in_the_ledger(workshop: Workshop, plugin: FakePlugin) -> None:
    handle = workshop.jobs.start_node(workshop.mint(), SPEC, RUN)
    plugin.error = "does not die"
    with pytest.raises(ProviderError, match="does not die"):
        workshop.jobs.stop_node(handle, False)
    workshop.jobs.close()
    assert len(list(workshop.ledger.iterdir())) == 1


@pytest.mark.spec("S1 7.6")
def test_complete_bootstrap_reaches_all_and_reports_the_first_error(workshop: Workshop, plugin: FakePlugin) -> None:
    plugin.error = "no"
    with pytest.raises(ProviderError, match="no a"):
        workshop.jobs.complete_bootstrap((PluginNodeHandle("a"), PluginNodeHandle("b")))
    assert [call for call, _ in plugin.calls] == ["complete a", "complete b"]
    workshop.jobs.close()


@pytest.mark.spec("S1 10.5")
def test_a_provider_that_this_build_lacks_or_that_is_not_ready_is_one_sentence(
    tmp_path: Path, plugin: FakePlugin
) -> None:
    workshop = Workshop(tmp_path)
    with pytest.raises(ProviderError, match=r"provider moon is not part of this build; it has .*process"):
        workshop.jobs.prepare(ProvisionerSlice(provider="moon"))
    plugin.error = "worker binary (none) does not exist"
    with pytest.raises(ProviderError, match="does not exist"):
        workshop.jobs.prepare(workshop.config)
    assert not workshop.ledger.exists()


class RealRun:
    """Core and jobs and real processes together; the test is the loop, the router and the orchestrator."""

    ORCHESTRATOR, ROUTER = b"o" * 32, b"r" * 32

    def __init__(self, workshop: Workshop, worker: str) -> None:
        self.harness = Harness(ProvisionerActor(), name=Role.PROVISIONER)
        self.calls: list[Callable[[], None]] = []
        self.woken = threading.Condition()
        self.jobs = ProvisionerJobs(workshop.surroundings(self.make_sink))
        self.observed: list[Any] = []
        routes = [
            RouteEntry(address=key, node=key, boot=1, generation=1, role=role, name=role)
            for key, role in ((self.ORCHESTRATOR, Role.ORCHESTRATOR), (self.ROUTER, Role.ROUTER))
        ]
        self.harness.views.routes.apply(Snapshot(view="routes", version=1, items=list(routes)))
        self.harness.tell(ViewChanged("routes"))
        config = ProvisionerSlice(provider="process", worker_bin=worker)
        self.harness.tell(ConfigSlice(part=Role.PROVISIONER, digest="d", slice_json=encode_slice(config)))

    def call_soon(self, call: Callable[[], None]) -> None:
        with self.woken:
            self.calls.append(call)
            self.woken.notify_all()

    def make_sink(self, handle_id: str) -> NodeSink:
        return NodeSink(handle_id, self.call_soon, self.harness.tell)

    def order(self, msg: Any) -> None:
        self.harness.tell(msg, src=self.ORCHESTRATOR, src_node=self.ORCHESTRATOR)

    def until(self, wanted: type) -> Any:
        """Turn until the orchestrator gets such a message."""
        for _ in range(600):
            for dst, msg in self.harness.sent():
                if isinstance(msg, Admit):
                    self.harness.tell(Admitted(key=msg.key), src=self.ROUTER)
                elif dst == self.ORCHESTRATOR and isinstance(msg, wanted):
                    return msg
            self.turn()
        raise AssertionError(f"no {wanted.__name__} came")

    def until_observed(self, text: bytes) -> None:
        for _ in range(600):
            if any(text in seen.payload for seen in self.observed):
                return
            self.turn()
        raise AssertionError(f"{text!r} was not observed")

    def turn(self) -> None:
        for effect in self.harness.effects():
            if isinstance(effect, RunJob):
                threading.Thread(target=self.work, args=(effect,)).start()
        with self.woken:
            self.woken.wait_for(lambda: self.calls, 0.1)
            calls, self.calls = self.calls, []
        for call in calls:
            call()
        self.observed += self.harness.observed()

    def work(self, job: RunJob) -> None:
        try:
            done = JobDone(job.kind, job.key, self.jobs.table()[job.kind](**job.args))
        except Exception as error:
            done = JobDone(job.kind, job.key, error=str(error))
        self.call_soon(lambda: self.harness.tell(done))


@pytest.mark.spec("S1 4.5", "S1 4.12", "S1 5.4", "S1 8.6", "S1 8.7")
def test_a_whole_run_with_two_real_workers(tmp_path: Path, stage: Any, worker_bin: Callable[[str], str]) -> None:
    workshop = Workshop(tmp_path, provider="process")
    run = RealRun(workshop, worker_bin("polite"))
    run.order(PrepareProvider(run_id=1, provider="process"))
    run.until(ProviderPrepared)
    handles = []
    for node_id in (1, 2):
        spec = NodeProvisionSpec(run_id=1, node_id=node_id, stage_index=node_id - 1, image="")
        run.order(StartNode(run=RUN, spec=spec, orchestrator=run.ORCHESTRATOR))
        handles.append(run.until(NodeStarted).handle)
    assert all(stage.alive_with(handle) for handle in handles)
    run.order(CompleteBootstrap())
    run.until(BootstrapCompleted)
    run.until_observed(b"ready")
    run.order(StopNodes())
    assert run.until(NodesStopped) == NodesStopped(stopped=[2, 1])
    assert not [pid for handle in handles for pid in stage.alive_with(handle)]
    run.jobs.close()
    assert list(workshop.ledger.iterdir()) == [] and list(workshop.nodes.iterdir()) == []
    records = [(seen.channel, json.loads(seen.payload)) for seen in run.observed + run.harness.observed()]
    kinds = [record["event"]["kind"] for _, record in records if "event" in record]
    assert kinds == ["ProvisionStart"] * 2 + ["NodeLive"] * 2 + ["NodeStopped"] * 2
    lines = {(channel, record["line"]["line"]) for channel, record in records if "line" in record}
    assert lines == {
        (f"mvp.provisioning.logs.node.{node}.{stream}", line)
        for node in (1, 2)
        for stream, line in (("stdout", "ready"), ("stderr", "careful"), ("stdout", "bye"))
    }


@pytest.mark.spec("S1 9.15")
def test_a_real_worker_that_dies_is_reported_with_its_last_words(
    tmp_path: Path, worker_bin: Callable[[str], str]
) -> None:
    workshop = Workshop(tmp_path, provider="process")
    run = RealRun(workshop, worker_bin("polite"))
    run.order(PrepareProvider(run_id=1, provider="process"))
    run.until(ProviderPrepared)
    run.order(StartNode(run=RUN, spec=SPEC, orchestrator=run.ORCHESTRATOR))
    run.until(NodeStarted)
    actor = run.harness.actor
    assert isinstance(actor, ProvisionerActor)
    handle = actor._run.nodes[2].handle
    assert handle is not None and handle.provider_process_id is not None
    run.until_observed(b"careful")
    os.kill(handle.provider_process_id, 9)
    exited = run.until(NodeExited)
    assert (exited.status, exited.reason, exited.stderr_tail) == (-9, "killed by signal 9 (SIGKILL)", ["careful"])
    run.order(StopNodes())
    assert run.until(NodesStopped) == NodesStopped(stopped=[2])
    run.jobs.close()


def test_a_start_that_nobody_answered_is_looked_for_again(
    workshop: Workshop, plugin: FakePlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unanswered(*_: Any) -> PluginNodeHandle:
        raise MayBeLeft("no answer")

    monkeypatch.setattr(plugin, "start_node", unanswered)
    minted = workshop.mint()
    with pytest.raises(MayBeLeft):
        workshop.jobs.start_node(minted, SPEC, RUN)
    assert workshop.jobs.recheck().owed == 1, "not there yet: it may still come"
    plugin.error = "the engine does not answer"
    again = workshop.jobs.recheck()
    assert again.owed == 1
    (problem,) = again.problems
    assert minted.handle_id in problem and plugin.error in problem and "mvp-orchestrator reconcile" in problem
    plugin.error, plugin.found = "", True
    assert workshop.jobs.recheck().owed == 0
    assert [call for call, _ in plugin.calls] == [f"left {minted.handle_id}"] * 3
    workshop.jobs.close()
    assert not list(workshop.ledger.glob("*.jsonl"))


def test_a_start_that_no_look_has_found_for_long_was_none(
    workshop: Workshop, plugin: FakePlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unanswered(*_: Any) -> PluginNodeHandle:
        raise MayBeLeft("no answer")

    monkeypatch.setattr(plugin, "start_node", unanswered)
    with pytest.raises(MayBeLeft):
        workshop.jobs.start_node(workshop.mint(), SPEC, RUN)
    monkeypatch.setattr(jobs_module, "OWED_LIMIT_MS", -1)
    assert workshop.jobs.recheck().owed == 0


def test_it_is_looked_for_from_the_end_of_a_long_start_on(
    workshop: Workshop, plugin: FakePlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The intent is as old as the start; the answer that did not come was its last step."""

    def unanswered(*_: Any) -> PluginNodeHandle:
        later = jobs_module._unix_ms() + 700_000
        monkeypatch.setattr(jobs_module, "_unix_ms", lambda: later)
        raise MayBeLeft("no answer")

    monkeypatch.setattr(plugin, "start_node", unanswered)
    with pytest.raises(MayBeLeft):
        workshop.jobs.start_node(workshop.mint(), SPEC, RUN)
    assert workshop.jobs.recheck().owed == 1


def test_what_is_left_of_an_attempt_leaves_the_launch_file_of_the_next_alone(
    workshop: Workshop, plugin: FakePlugin
) -> None:
    """Both attempts at a node have the same path; the first may be cleaned up while the second one starts."""
    first = workshop.mint()
    second = workshop.mint()
    assert first.launch == second.launch
    workshop.jobs.discard(first)
    handle = workshop.jobs.start_node(second, SPEC, RUN)
    third = workshop.mint()
    workshop.jobs.stop_node(handle, False)
    assert LaunchFile.read(Path(third.launch)).public_key == third.public_key.hex()
    workshop.jobs.discard(third)
    assert not Path(third.launch).exists()


def test_a_stop_that_was_not_confirmed_is_tried_again(workshop: Workshop, plugin: FakePlugin) -> None:
    handle = workshop.jobs.start_node(workshop.mint(), SPEC, RUN)
    plugin.error = "it does not die"
    with pytest.raises(ProviderError):
        workshop.jobs.stop_node(handle, False)
    assert workshop.jobs.recheck().owed == 1
    plugin.error = ""
    # The next run of the same process begins: nothing of the one before is left behind it.
    workshop.jobs.prepare(workshop.config)
    assert workshop.jobs.recheck().owed == 0
    workshop.jobs.close()
    assert not list(workshop.ledger.glob("*.jsonl"))


def test_nothing_is_started_while_it_is_unknown_what_there_is(
    workshop: Workshop, plugin: FakePlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Listing:
        raise ProviderError("the list is broken")

    monkeypatch.setattr(plugin, "list_owned", broken)
    with pytest.raises(ProviderError, match="what is owned at fake is unknown: the list is broken"):
        workshop.jobs.prepare(workshop.config)
