"""Where the campaign's cases happen: a real router, a real provisioner per case, real workers, and things of others.

The orchestrator, resolver and collector are hosts in this process; the provisioner is `tests.campaign.points`. A case
ends with a list of what is left; an empty one is what the ledger promises.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker.types

from common.addresses import Role
from common.bus import KeyPair
from common.config_slices import ProvisionerSlice, VastAiSlice, encode_slice
from common.host import Host
from common.launch_file import LaunchFile
from common.messages.provision import (
    BootstrapCompleted,
    CompleteBootstrap,
    NodeFailed,
    NodeProvisionSpec,
    NodesStopped,
    NodeStarted,
    PrepareProvider,
    ProviderPrepared,
    ProviderPrepareFailed,
    StartNode,
    StopNodes,
)
from common.messages.service import ServiceReady
from services.orchestrator import owned_command
from services.provisioner import processes
from services.provisioner import vastai_offers as offers
from services.provisioner.docker_spec import LABEL_FLEET
from services.provisioner.jobs import ProvisionerJobs, Surroundings
from services.provisioner.ledger import fleet_id, ledger_folder
from services.provisioner.service import cleanup
from services.provisioner.sink import NodeSink
from tests.campaign.cases import STOPPING, Case
from tests.campaign.points import speed_up
from tests.docker.engine import HABIT_IMAGE, SWARM_HABIT_IMAGE, TestEngine
from tests.fakes.vastai.server import FakeVast
from tests.support.bus import RealBus
from tests.unit.provisioner.conftest import HABITS
from tests.unit.provisioner.test_provisioner_process import Collector, Orchestrator, Resolver

STEP_S = 60.0
EXIT_S = 90.0
AGAIN_S = 90.0
SWARM_S = 90.0
OTHER_FLEET = "f" * 16
WORKER = "exec sh -c 'echo ready; while :; do sleep 1; done' worker"


class World:
    """Serves one case after the other. engine: for providers docker and swarm; swarm: it is a manager of one."""

    def __init__(self, engine: TestEngine | None = None, *, swarm: bool = False) -> None:
        speed_up()
        self.folder = Path(tempfile.mkdtemp(prefix="smq-campaign-", dir="/tmp"))
        self.engine, self.swarm = engine, swarm
        self.image = SWARM_HABIT_IMAGE if swarm else HABIT_IMAGE
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("VASTAI", "DOCKER"))},
            "XDG_STATE_HOME": str(self.folder / "state"),
            "XDG_RUNTIME_DIR": str(self.folder / "runtime"),
            "DOCKER_HOST": engine.host if engine is not None else f"unix://{self.folder}/none.sock",
            "SMQ_VALIDATE": "1",
        }
        (self.folder / "runtime").mkdir()
        self.fleet = fleet_id(self.environment)
        self.run_dir = self.folder / "run"
        self.run_dir.mkdir(mode=0o700)
        self.bus = RealBus(self.run_dir)
        self.resolver = Resolver(ProvisionerSlice(provider="process"))
        self.bus.service(Role.RESOLVER).spawn(self.resolver, name=Role.RESOLVER)
        self.bus.service(Role.COLLECTOR).spawn(Collector(), name=Role.COLLECTOR)
        self.orchestrator = Orchestrator()
        self.host = self.bus.service(Role.ORCHESTRATOR)
        self.address = self.host.spawn(self.orchestrator, name=Role.ORCHESTRATOR)
        for habit in ("polite", "stubborn"):
            path = self.folder / f"worker-{habit}"
            path.write_text(f"#!{sys.executable} -S\nimport os, sys\n{HABITS[habit]}")
            path.chmod(0o755)
        identity = self.folder / "identity"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(identity)], check=True)
        self.public = " ".join(identity.with_suffix(".pub").read_text().split()[:2])
        # A process that bears another fleet's marks.
        marks = {processes.MARK_VARIABLE: "somebody-elses", processes.FLEET_VARIABLE: OTHER_FLEET}
        self.innocent = subprocess.Popen(["sleep", "100000"], env={**os.environ, **marks})
        self._drop_foreign = self._foreign()

    # --- a case ---------------------------------------------------------------------------------------------------
    def play(self, case: Case) -> list[str]:
        """What is left, or went otherwise than it must; empty when all is well."""
        stage = Stage(self, case)
        try:
            stage.hurt()
            stage.follow_up()
            return stage.left()
        except AssertionError as error:
            said = (self.folder / "provisioner.log").read_text(errors="replace").splitlines()[-3:]
            return [
                f"did not happen: {error}; the provisioner said: {said}; {self.orchestrator.got}, "
                f"vast.ai was asked: {[f'{m} {p[:40]}' for m, p, _ in stage.fake.requests[-12:]] if stage.fake else []}"
            ]
        finally:
            stage.close()

    def close(self) -> None:
        """Nothing of the campaign is left."""
        self.innocent.kill()
        self.innocent.wait()
        self._drop_foreign()
        self.bus.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _foreign(self) -> Callable[[], None]:
        """A worker of another fleet on the engine; the call removes it."""
        if self.engine is None:
            return lambda: None
        labels = {"swactor-mq": "worker", "swactor-mq.handle": "theirs", LABEL_FLEET: OTHER_FLEET}
        api = self.engine.client()
        if self.swarm:
            secret = api.create_secret("theirs", b"theirs", labels=labels)["ID"]
            spec = docker.types.ContainerSpec(self.image, command=["sleep", "100000"], labels=labels)
            service = api.create_service(docker.types.TaskTemplate(spec), name="theirs", labels=labels)["ID"]

            def drop() -> None:
                api.remove_service(service)
                api.remove_secret(secret)

            return drop
        made = api.create_container(
            image=self.image, entrypoint=["sleep", "100000"], labels=labels, environment={"HABIT": "x"}
        )
        api.start(made["Id"])
        return lambda: api.remove_container(made["Id"], force=True)

    def on_engine(self) -> tuple[list[str], list[str]]:
        """(what of ours, what of the other fleet) the engine has, as kinds."""
        assert self.engine is not None
        api = self.engine.client()
        kinds = [("container", row.get("Labels") or {}) for row in self.engine.containers()]
        if self.swarm:
            for kind, rows in (("service", api.services()), ("secret", api.secrets())):
                kinds += [(kind, row["Spec"].get("Labels") or {}) for row in rows]
        owners = [(kind, labels.get(LABEL_FLEET)) for kind, labels in kinds]
        return (
            [kind for kind, fleet in owners if fleet == self.fleet],
            [kind for kind, fleet in owners if fleet == OTHER_FLEET],
        )

    def spawn(self, point: str, extra: dict[str, str]) -> tuple[subprocess.Popen[bytes], int]:
        """(the provisioner, the end of its pipe that is the orchestrator's life)."""
        owner, life = os.pipe()
        command = [sys.executable, "-P", "-m", "tests.campaign.points", "--bus", str(self.bus.files[Role.PROVISIONER])]
        process = subprocess.Popen(
            [*command, "--owner-fd", str(owner)],
            pass_fds=[owner],
            env={**self.environment, **extra, "SMQ_POINT": point},
            stderr=(self.folder / "provisioner.log").open("wb"),
            cwd=Path(__file__).resolve().parents[2],
        )
        os.close(owner)
        return process, life


class Stage:
    """One case under way."""

    def __init__(self, world: World, case: Case) -> None:
        self.world, self.case = world, case
        self.run = os.urandom(16)
        self.fake: FakeVast | None = None
        self.foreign: list[int] = []
        self.extra: dict[str, str] = {}
        self.agent: Host | None = None
        if case.provider == "vastai":
            self._market()
        world.environment.update(self.extra)
        world.resolver.slice = encode_slice(self._config())
        world.orchestrator.got.clear()
        self.process, self.life = world.spawn(case.point, self.extra)
        self.gone = False

    def _config(self) -> ProvisionerSlice:
        case, folder = self.case, self.world.folder
        habit = "stubborn" if case.wrong == "stubborn worker" else "polite"
        vastai = None
        if self.fake is not None:
            vastai = VastAiSlice(
                api_key_file=self._secret("key", self.fake.key),
                bootstrap_command_file=self._secret("bootstrap", WORKER),
                ssh_identity=str(folder / "identity"),
                ssh_public_key=self.world.public,
                disk_gb=50,
                ssh_user="root",
                confirm_lease=True,
                min_down_mbps=100.0,
                min_reliability=0.9,
                require_verified=False,
                poll_interval_secs=2,
            )
        return ProvisionerSlice(
            provider=case.provider,
            image=self.world.image,
            docker_gpus="none",
            docker_pull="never",
            worker_bin=str(folder / f"worker-{habit}") if case.provider == "process" else "",
            vastai=vastai,
        )

    def _secret(self, name: str, text: str) -> str:
        path = self.world.folder / name
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    def _market(self) -> None:
        fake = self.fake = FakeVast()
        fake.boot_reads = 1
        wrong = self.case.wrong
        self.foreign = fake.foreign(26 if wrong == "page 2" else 2)
        self.foreign += fake.foreign(1, f"smq-{OTHER_FLEET}-{self.run.hex()[:8]}-1-00")
        for price in (0.2, 0.3, 0.4):
            fake.offer(price=price)
        if wrong.startswith("ambiguous create"):
            fake.fault("create", "hang up after")
            fake.list_lag = 2 if wrong == "ambiguous create" else 6
        elif wrong == "429 storm":
            for op in ("search", "create", "show", "list", "destroy"):
                for kind in ("429 text", "429 detail", "429 json"):
                    fake.fault(op, kind)
        elif wrong == "destroy fails":
            fake.fault("destroy", "500", 2)
            fake.fault("destroy", "429 json", 1)
        elif wrong == "sold twice":
            fake.fault("create", "sold twice")
        elif wrong == "create with contract":
            fake.fault("create", "contract")
        self.extra = {"VASTAI_BASE_URL": fake.url, "VASTAI_API_KEY": fake.key}

    # --- up to the point, and the harm ----------------------------------------------------------------------------
    def hurt(self) -> None:
        """Bring the provisioner to the point and do there what the case says."""
        point = self.case.point
        self._until(ServiceReady)
        self._order(PrepareProvider(run_id=1, provider=self.case.provider))
        if self._reached():
            return
        answer = self._until(ProviderPrepared, ProviderPrepareFailed)
        assert isinstance(answer, ProviderPrepared), answer
        spec = NodeProvisionSpec(run_id=1, node_id=1, stage_index=0, image=self.world.image, env={"HABIT": "polite"})
        self._order(StartNode(run=self.run, spec=spec, orchestrator=self.world.address))
        if self.case.provider in ("external", "vastai"):
            # There is no answer before the worker comes, so a line of the ledger says that it is waited for.
            self._wait(lambda: self._frozen() or b'"handle"' in self._ledger())
            if not self._frozen() and point != "live":
                self._come()
        self._wait(lambda: self._frozen() or self._has(NodeStarted, NodeFailed) or self._waits_for_worker())
        if self._reached():
            return
        assert not self._has(NodeFailed), self.world.orchestrator.got
        self._serve_wrongs()
        if point == "completed":
            self._order(CompleteBootstrap())
            self._until(BootstrapCompleted)
        if point in ("live", "completed", "came"):
            self._harm()
            return
        assert point in STOPPING, f"{point} was passed"
        self._order(StopNodes())
        if point == "close:before":
            self._until(NodesStopped)
            self.process.terminate()
        self._wait(lambda: self._frozen() or self.process.poll() is not None)
        assert self._reached(), f"{point} was not reached"

    def _waits_for_worker(self) -> bool:
        """External and rented workers have started when they come; a case may not wait for that."""
        late = self.case.provider in ("external", "vastai") and self.case.point == "live"
        return late and b'"handle"' in self._ledger()

    def _come(self) -> None:
        """The worker whom somebody else starts."""
        launch = LaunchFile.read(self.world.run_dir / "nodes" / "1" / "launch.json")
        keys = KeyPair(bytes.fromhex(launch.public_key), bytes.fromhex(launch.secret_key))
        self.agent = self.world.bus.agent(keys=keys)

    def _reached(self) -> bool:
        """The point is a frozen process: harm it there."""
        frozen = self._frozen()
        if frozen:
            self._harm()
        return frozen

    def _frozen(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def _harm(self) -> None:
        engine, wrong = self.world.engine, self.case.wrong
        if engine is not None and wrong.startswith("engine"):
            engine.end(signal.SIGKILL if wrong == "engine killed" else signal.SIGTERM)
            engine.start()
        match self.case.event:
            case "kill":
                self.process.kill()
            case "gone" | "gone+kill":
                lines = self._ledger()
                self._end_life()
                self.process.send_signal(signal.SIGCONT)
                if self.case.event == "gone+kill":
                    self._wait(lambda: self._ledger() != lines or self.process.poll() is not None)
                    self.process.kill()
            case "term" | "int":
                self.process.send_signal(signal.SIGTERM if self.case.event == "term" else signal.SIGINT)
                self.process.send_signal(signal.SIGCONT)
            case "stop":
                self._order(StopNodes())
                self.world.bus.pump()
                self.process.send_signal(signal.SIGCONT)
                self._until(NodesStopped)
                self.process.terminate()
        self._wait(lambda: self.process.poll() is not None, EXIT_S)

    def _serve_wrongs(self) -> None:
        if self.case.wrong == "list broken" and self.fake is not None:
            self.fake.fault("list", "failed", 400)
        if self.case.wrong == "tunnel half-open":
            tunnels = self._tunnels()
            assert tunnels, "there is no tunnel"
            for pid in tunnels:
                os.kill(pid, signal.SIGSTOP)

    # --- afterwards -----------------------------------------------------------------------------------------------
    def follow_up(self) -> None:
        """The next start, or reconcile: as the case says."""
        self._end_life()
        if self.fake is not None:
            self.fake.faults.clear()
        environment = self.world.environment
        status, until = 1, time.monotonic() + AGAIN_S
        while status and time.monotonic() < until:
            # What may have been rented a moment ago is looked for again until it is certain (a scaled three minutes).
            quiet, status = self._follow_up(environment)
            time.sleep(1 if status else 0)
        assert status == 0, f"{self.case.after} ended with {status}: {quiet[-400:]}"

    def _follow_up(self, environment: dict[str, str]) -> tuple[str, int]:
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            match self.case.after:
                case "cleanup":
                    status = cleanup(environment)
                case "reconcile":
                    status = owned_command.reconcile(["--provider", self.case.provider], environment)
                case _:
                    status = self._next_start()
        return quiet.getvalue(), status

    def _next_start(self) -> int:
        here = Surroundings(
            environment=self.world.environment,
            nodes_dir=self.world.run_dir / "nodes",
            worker_key=bytes(32),
            worker_endpoints={},
            make_sink=lambda handle: NodeSink(handle, lambda call: call(), lambda _: None),
        )
        jobs = ProvisionerJobs(here)
        prepared = jobs.prepare(self._config())
        jobs.close()
        return 1 if prepared.problems else 0

    def left(self) -> list[str]:
        """Everything of ours that is still there, and everything of others that is not."""
        world = self.world
        found = []
        if workers := processes.marked_with(processes.FLEET_VARIABLE, world.fleet):
            found.append(f"worker processes {workers}")
        if tunnels := self._tunnels():
            found.append(f"processes of the run {tunnels}")
        found += [f"ledger {path.name}" for path in ledger_folder(world.environment).iterdir()]
        found += [f"launch file {path}" for path in (world.run_dir / "nodes").rglob("launch.json")]
        found += [f"host key {path.name}" for path in (world.folder / "state" / "swactor-mq").glob("known-hosts-*")]
        if self.fake is not None:
            rows = list(self.fake.instances.values())
            found += [f"instance {row.id}" for row in rows if offers.handle_of(row.label, world.fleet)]
            found += [f"foreign instance {id} is gone" for id in self.foreign if id not in self.fake.instances]
        if world.engine is not None:
            found += self._left_on_engine()
        if world.innocent.poll() is not None:
            found.append("a foreign process is gone")
        return found

    def _left_on_engine(self) -> list[str]:
        world = self.world
        until = time.monotonic() + (SWARM_S if world.swarm else 0.0)
        while True:
            ours, theirs = world.on_engine()
            # The swarm removes a container by itself some seconds after its service.
            if set(ours) != {"container"} or time.monotonic() > until:
                break
            time.sleep(0.5)
        wanted = {"service", "secret"} if world.swarm else {"container"}
        return [f"{kind} of ours" for kind in ours] + [f"a foreign {kind} is gone" for kind in wanted - set(theirs)]

    def _tunnels(self) -> list[int]:
        run = self.run.hex()[:8]
        own = os.getpid()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != own:
                mark = processes.marks_of(int(entry.name))
                if mark and mark.startswith(f"{run}-") and processes.start_time(int(entry.name)) is not None:
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        """Whatever the outcome, the next case begins clean."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._end_life()
        for pid in self._tunnels():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.fake is not None:
            self.fake.close()
        for name in self.extra:
            self.world.environment.pop(name, None)
        if self.agent is not None:
            self.world.bus.hosts.remove(self.agent)
            self.agent.close()
        shutil.rmtree(self.world.run_dir / "nodes", ignore_errors=True)
        for path in ledger_folder(self.world.environment).glob("*"):
            path.unlink()
        for path in (self.world.folder / "state" / "swactor-mq").glob("known-hosts-*"):
            path.unlink()

    def _end_life(self) -> None:
        if not self.gone:
            self.gone = True
            os.close(self.life)

    # --- the bus --------------------------------------------------------------------------------------------------
    def _order(self, msg: Any) -> None:
        self.world.host.deliver(self.world.address, msg)

    def _has(self, *kinds: type) -> bool:
        return any(isinstance(msg, kinds) for msg in self.world.orchestrator.got)

    def _until(self, *kinds: type) -> Any:
        self._wait(lambda: self._has(*kinds))
        got = self.world.orchestrator.got
        found = next(msg for msg in got if isinstance(msg, kinds))
        got.remove(found)
        return found

    def _wait(self, fact: Callable[[], object], limit_s: float = STEP_S) -> None:
        until = time.monotonic() + limit_s
        while not fact():
            assert time.monotonic() < until, f"not within {limit_s:g} s at {self.case}"
            assert self.process.poll() is None or fact(), f"the provisioner ended with {self.process.returncode}"
            for host in self.world.bus.hosts:
                host.loop.turn(2)
                host.pump()

    def _ledger(self) -> bytes:
        return b"".join(path.read_bytes() for path in ledger_folder(self.world.environment).glob("*.jsonl"))
