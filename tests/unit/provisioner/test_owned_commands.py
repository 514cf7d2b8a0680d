"""`mvp-orchestrator workers` and `reconcile`: real processes, a fake vast.ai, and nothing of others is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.launch_file import LaunchFile
from common.messages.provision import NodeProvisionSpec
from services.orchestrator import owned_command
from services.provisioner import processes, vastai_api
from services.provisioner.inventory import Providers, take_stock
from services.provisioner.ledger import Ledger, LedgerRecord, fleet_id, ledger_folder
from services.provisioner.process_provider import ProcessProvider
from tests.fakes.vastai.server import FakeVast
from tests.unit.provisioner.conftest import Watched, alive_with

BOOT = processes.boot_id()


class User:
    """A user with a state folder of his own, workers of his, and a way to ask the commands."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.environment = {"XDG_STATE_HOME": str(folder / "state"), "PATH": os.environ["PATH"], "HOME": str(folder)}
        # No engine is asked that the machine of this test may have.
        self.environment["DOCKER_HOST"] = f"unix://{folder}/no-docker.sock"
        self.fleet = fleet_id(self.environment)
        self._count = 0
        self.started: list[Any] = []

    def ledger(self, instance: str = "one") -> Ledger:
        return Ledger(ledger_folder(self.environment), instance)

    def handle_id(self) -> str:
        self._count += 1
        return f"cafe0123-{self._count}-{os.urandom(12).hex()}"

    def record(self, ledger: Ledger, handle_id: str, provider: str, **more: Any) -> None:
        ledger.append(
            LedgerRecord(op="intent", id=handle_id, provider=provider, run="ca" * 16, node_id=7, boot_id=BOOT, **more)
        )

    def process(self, worker: str, ledger: Ledger | None) -> str:
        handle_id = self.handle_id()
        provider = ProcessProvider(worker, os.environ, fleet=self.fleet)
        if ledger is not None:
            self.record(ledger, handle_id, "process")
        spec = NodeProvisionSpec(run_id=1, node_id=7, stage_index=0, image="")
        watched = Watched()
        handle = provider.start_node(handle_id, spec, Path("x"), watched)
        watched.wait(lambda seen: bool(seen))
        if ledger is not None:
            ledger.append(
                LedgerRecord(op="handle", id=handle_id, process_id=handle.provider_process_id, facts=dict(handle.facts))
            )
        self.started.append((provider, handle))
        return handle_id

    def ask(self, command: str, *words: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        run = {"workers": owned_command.workers, "reconcile": owned_command.reconcile}[command]
        status = run(words, self.environment)
        said = self._capsys.readouterr()
        return status, said.out, said.err


def die(ledger: Ledger) -> None:
    """As by SIGKILL: the lock is free, the file stays."""
    os.close(ledger._fd)
    ledger._fd = -1


@pytest.fixture
def user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[User]:
    made = User(tmp_path, capsys)
    yield made
    for provider, handle in made.started:
        provider.stop_node(handle, True)


@pytest.fixture
def fake(user: User, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVast]:
    # The distances between calls are those of the real vast.ai; the fake needs none.
    monkeypatch.setattr("services.provisioner.vastai_api.INTERVAL_S", dict.fromkeys(vastai_api.INTERVAL_S, 0.0))
    monkeypatch.setattr("services.provisioner.vastai_end.FIND_PAUSE_S", 0.1)
    made = FakeVast(real=False)
    user.environment |= {"VASTAI_BASE_URL": made.url, "VASTAI_API_KEY": made.key}
    yield made
    made.close()


@pytest.mark.spec("S1 9.16")
def test_workers_of_the_living_are_shown_and_left_those_of_the_dead_are_stopped(
    user: User, worker_bin: Callable[[str], str]
) -> None:
    dead, living = user.ledger("dead"), user.ledger("living")
    left, used = user.process(worker_bin("stubborn"), dead), user.process(worker_bin("polite"), living)
    lost = user.process(worker_bin("polite"), None)
    die(dead)
    status, out, error = user.ask("workers")
    assert (status, error) == (0, ""), error
    rows = {line.split()[-1]: line.split() for line in out.splitlines()}
    assert rows["left"][:4] == ["7", "process", "pid", str(user.started[0][1].provider_process_id)]
    assert rows["run"][4] == "running" and rows["run"][5].startswith("20") and rows["lost"][0] == "?"
    facts = {item["owner"]: item for item in json.loads(user.ask("workers", "--json")[1])}
    assert facts["left"]["id"] == left and facts["lost"]["id"] == lost and facts["run"]["dph"] is None
    assert facts["run"]["since_unix_ms"] > 1_600_000_000_000

    status, out, _ = user.ask("reconcile", "--dry-run")
    assert status == 0 and out.count("would be stopped\n") == 2 and "left alone, its orchestrator runs" in out
    assert len(alive_with(left)) == 3 and alive_with(lost)

    status, out, error = user.ask("reconcile")
    assert (status, error) == (0, ""), error
    assert (
        "(node 7): stopped\n" in out and "stopped, it was in no ledger\n" in out and out.endswith("2 stopped, 0 left\n")
    )
    assert not alive_with(left) and not alive_with(lost) and alive_with(used)
    assert user.ask("reconcile")[1].endswith("0 stopped, 0 left\n")
    assert [item["owner"] for item in json.loads(user.ask("workers", "--json")[1])] == ["run"]
    living.close()


@pytest.mark.spec("S1 9.16")
def test_rented_machines_by_ledger_and_by_listing(user: User, fake: FakeVast) -> None:
    fake.foreign(30)
    fake.foreign(1, f"smq-{'f' * 16}-cafe0123-1-0123")
    dead = user.ledger("dead")
    ids = [user.handle_id() for _ in range(3)]
    user.record(dead, ids[0], "vastai")
    (first,) = fake.foreign(1, f"smq-{user.fleet}-{ids[0]}")
    (orphan,) = fake.foreign(1, f"smq-{user.fleet}-{ids[1]}")
    living = user.ledger("living")
    user.record(living, ids[2], "vastai")
    (used,) = fake.foreign(1, f"smq-{user.fleet}-{ids[2]}")
    single = Ledger(ledger_folder(user.environment).with_name("ledger-single-gpu"), "sgi")
    single.append(LedgerRecord(op="intent", id="sgi-abc-1", provider="vastai"))
    (asked,) = fake.foreign(1, "sgi-abc-1")
    die(dead)
    die(single)
    status, out, _ = user.ask("workers")
    assert status == 0 and f"instance {first}" in out and "1.000" in out
    assert len(fake.created) == 0 and len(fake.instances) == 35
    status, out, error = user.ask("reconcile")
    assert (status, error) == (0, ""), error
    assert f"instance {orphan}: stopped, it was in no ledger" in out and "others: left alone" in out
    assert not {first, orphan, asked} & set(fake.instances) and used in fake.instances
    assert len(fake.instances) == 32
    living.close()


def test_an_unreadable_listing_is_unknown_and_stops_nothing_blindly(
    user: User, fake: FakeVast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.provisioner.vastai_api.READ_TRIES", 1)
    dead = user.ledger("dead")
    handle_id = user.handle_id()
    user.record(dead, handle_id, "vastai")
    die(dead)
    (mine,) = fake.foreign(1, f"smq-{user.fleet}-{handle_id}")
    fake.fault("list", "failed", 10)
    status, out, error = user.ask("workers")
    assert status == 1 and "unknown" in out and "what is owned at vastai is unknown" in error
    status, out, error = user.ask("reconcile")
    assert status == 1 and "is not stopped" in error and mine in fake.instances
    fake.faults.clear()
    assert user.ask("reconcile")[0] == 0 and not fake.instances


def test_a_provider_that_cannot_be_asked_is_named(user: User) -> None:
    status, out, error = user.ask("reconcile")
    assert (status, error) == (0, "")
    assert "docker was not looked at: cannot reach the Docker engine" in out
    assert "vastai was not looked at: VASTAI_API_KEY is not set" in out
    dead = user.ledger("dead")
    user.record(dead, user.handle_id(), "vastai")
    die(dead)
    status, _, error = user.ask("reconcile")
    assert status == 1 and "set VASTAI_API_KEY" in error


def test_a_dry_run_for_one_provider_says_what_the_real_one_does(user: User) -> None:
    """Its listing alone is read, but every entry of a dead orchestrator's ledger is settled."""
    dead = user.ledger("dead")
    user.record(dead, user.handle_id(), "process")
    die(dead)
    said = user.ask("reconcile", "--dry-run", "--provider", "external")[1]
    assert said.splitlines()[0].startswith("process: ") and "1 would be stopped or closed" in said
    assert user.ask("workers", "--provider", "external")[1] == "no workers\n"
    done = user.ask("reconcile", "--provider", "external")[1]
    assert done.splitlines()[0].startswith("process: ")
    assert "0 would be" in user.ask("reconcile", "--dry-run", "--provider", "external")[1]


def test_the_key_of_the_configuration_file_counts_and_a_model_is_not_needed(
    user: User, fake: FakeVast, tmp_path: Path
) -> None:
    user.environment.pop("VASTAI_API_KEY")
    config = tmp_path / "mine.toml"
    config.write_text(f'[vastai]\napi_key = "{fake.key}"\n')
    assert user.ask("workers", "--provider", "vastai")[:2] == (0, "no workers\n")
    assert take_stock(Providers(user.environment), ["vastai"]).notes == [
        "vastai was not looked at: VASTAI_API_KEY is not set"
    ]
    (orphan,) = fake.foreign(1, f"smq-{user.fleet}-{user.handle_id()}")
    status, out, error = user.ask("reconcile", "--provider", "vastai", "--runtime-config", str(config))
    assert (status, error) == (0, "") and f"instance {orphan}" in out and not fake.instances
    assert fake.key not in out


def test_words_that_mean_nothing_are_one_sentence(user: User) -> None:
    for command in ("workers", "reconcile"):
        status, out, error = user.ask(command, "--frobnicate")
        assert (
            (status, out) == (1, "")
            and error.startswith(f"mvp-orchestrator {command}: argument")
            and error.count("\n") == 1
        )
        status, out, error = user.ask(command, "--help")
        assert (status, error) == (0, "") and f"$ mvp-orchestrator {command}" in out
        assert user.ask(command, "--provider", "nowhere")[0] == 1


def test_a_fresh_machine_has_nothing_and_gets_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert owned_command.workers([], environment) == 0
    assert capsys.readouterr().out == "no workers\n" and not (tmp_path / "state").exists()
    assert Providers(environment).owner.fleet == ""


def test_launch_files_and_run_directories_of_the_killed_go(user: User, tmp_path: Path) -> None:
    runtime = tmp_path / "rt"
    runtime.mkdir()
    user.environment["XDG_RUNTIME_DIR"] = str(runtime)
    made = subprocess.run(
        [
            *("python3", "-c"),
            "import os,sys,fcntl\nd=sys.argv[1]\nos.mkdir(d,0o700)\nos.mkdir(d+'/keys')\n"
            "open(d+'/keys/k','w').write('secret')\n"
            "f=open(d+'/lock','w'); fcntl.flock(f,fcntl.LOCK_EX); f.write(str(os.getpid())); f.flush()\n"
            "os.kill(os.getpid(),9)",
            str(runtime / "smq-01234567"),
        ],
        check=False,
    )
    assert made.returncode == -signal.SIGKILL
    (runtime / "smq-89abcdef").mkdir()
    held = open(runtime / "smq-89abcdef" / "lock", "w")  # noqa: SIM115 - its lock is held
    import fcntl

    fcntl.flock(held, fcntl.LOCK_EX)
    held.write("1")
    held.flush()
    launch = tmp_path / "launch.json"
    hexes = dict.fromkeys(("broker_public_key", "public_key", "secret_key", "orchestrator"), "ab" * 32)
    LaunchFile(run_id=1, run="cd" * 16, node_id=7, endpoints={"control": "tcp://h:1"}, **hexes).write(launch)
    dead = user.ledger("dead")
    user.record(dead, user.handle_id(), "external", launch=str(launch), public_key="ab" * 32)
    die(dead)
    status, out, error = user.ask("reconcile")
    assert (status, error) == (0, "") and "smq-01234567: the run directory of a killed orchestrator is removed" in out
    assert sorted(path.name for path in runtime.iterdir()) == ["smq-89abcdef"] and not launch.exists()
    held.close()
