"""`mvp-orchestrator doctor`: with everything there, and with things really missing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.config import resolve
from common.config_model import ProviderKind, SocketAddr
from common.security import SOCKET_PATH_BYTES_MAX, SecurityError, init, socket_path_bytes
from services.orchestrator.doctor import engine, machine, run
from services.orchestrator.doctor.findings import Check, Finding, ok, results
from services.orchestrator.plan_command import stage_size
from services.orchestrator.planner import PlanError
from services.provisioner.ledger import ledger_folder
from tests.support.hub import Hub
from tests.unit.engine.tiny_model import TinySpec, write_model
from tests.unit.planner.test_plan_command import planned

PROGRAM_LIMIT_S = 180
GPU_0 = [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]


def configured(folder: Path, model: Path, rpc: str = "127.0.0.1:0", more: str = "") -> Path:
    toml = folder / "run.toml"
    toml.write_text(
        f'[provider]\nkind = "process"\n[model]\nid = "tiny"\ngguf_local_path = {json.dumps(str(model))}\n'
        f"[prompt]\nrpc_addr = {json.dumps(rpc)}\n{more}"
    )
    return toml


def doctor(
    toml: Path, environ: Mapping[str, str] = {}, *arguments: str
) -> tuple[int, dict[str, list[dict[str, Any]]], str]:
    """(exit status, findings by check, stderr) of the program with --json; environ is laid over ours."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "services.orchestrator", "doctor", "--config", str(toml), "--json", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        cwd=toml.parent,
        timeout=PROGRAM_LIMIT_S,
        check=False,
    )
    told = json.loads(done.stdout)
    assert told["ok"] == (done.returncode == 0)
    found: dict[str, list[dict[str, Any]]] = {}
    for row in told["checks"]:
        assert row["do"] or row["status"] in ("ok", "skip"), f"no way out: {row}"
        found.setdefault(row["name"], []).append(row)
    return done.returncode, found, done.stderr


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_model(path, TinySpec(layers=2))
    return path


def test_a_machine_that_has_it_all(tmp_path: Path, model: Path) -> None:
    status, found, errors = doctor(configured(tmp_path, model))
    assert (status, errors) == (0, ""), found
    assert set(found) == {
        *("config", "python", "device", "kernels", "compiler", "docker", "swarm", "ssh"),
        *("ports", "model", "memory", "disk"),
    }
    assert {row["status"] for name in ("python", "device", "model", "memory") for row in found[name]} == {"ok"}
    assert "2 layers" in found["model"][0]["says"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.toml", "tiny.gguf"], "nothing was written"


def test_everything_missing_at_once_is_all_said(tmp_path: Path) -> None:
    """An empty PATH, a taken port, no model, no engine, an archive where nothing can be written."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        addr = f"127.0.0.1:{taken.getsockname()[1]}"
        (tmp_path / "file").write_text("")
        archive = json.dumps(str(tmp_path / "file" / "frames.jsonl"))
        toml = configured(
            tmp_path, tmp_path / "tiny.gguf", addr, f"[observability]\ndatastream_frame_log = {archive}\n"
        )
        (tmp_path / "tiny.gguf").write_text("no model at all")
        environ = {"PATH": "", "DOCKER_HOST": f"unix://{tmp_path}/nothing.sock", "SMQ_ENGINE_KERNELS": "portable"}
        status, found, _ = doctor(toml, environ)
    assert status == 1
    (port,) = found["ports"]
    assert port["status"] == "fail"
    assert f"{addr} is in use by process {os.getpid()}" in port["says"], port
    assert "set [prompt] rpc_addr" in port["do"]
    assert found["model"][0]["status"] == "fail" and "GGUF" in found["model"][0]["says"]
    assert found["memory"][0]["status"] == "skip"
    assert any(row["status"] == "fail" and "frame archive" in row["says"] for row in found["disk"]), found["disk"]
    assert found["docker"][0]["status"] == "skip", "provider process needs none"
    assert found["kernels"][0]["do"] == "unset SMQ_ENGINE_KERNELS"
    assert found["compiler"][0]["status"] == "ok", "the zig of the environment is found without a PATH"


def test_a_model_that_is_not_there_is_a_wrong_configuration(tmp_path: Path) -> None:
    status, found, _ = doctor(configured(tmp_path, tmp_path / "none.gguf"))
    assert status == 1
    assert found["config"][0]["status"] == "fail" and "none.gguf" in found["config"][0]["says"]
    assert found["ports"][0]["says"] == "no configuration"
    assert found["python"][0]["status"] == "ok", "the machine is looked at all the same"


def test_docker_that_is_needed_and_gone_fails(tmp_path: Path, model: Path) -> None:
    toml = configured(tmp_path, model)
    toml.write_text(toml.read_text().replace("gguf_local_path", "cached_path"))
    status, found, _ = doctor(toml, {"DOCKER_HOST": f"unix://{tmp_path}/nothing.sock"}, "--provider", "docker")
    assert status == 1
    (docker,) = found["docker"]
    assert docker["status"] == "fail" and "no engine answers at unix://" in docker["says"]
    assert "docker info" in docker["do"]


def test_for_people_and_for_help(tmp_path: Path, model: Path) -> None:
    program = [sys.executable, "-P", "-m", "services.orchestrator", "doctor"]
    done = subprocess.run([*program, "--help"], capture_output=True, text=True, timeout=PROGRAM_LIMIT_S, check=True)
    assert "example: mvp-orchestrator doctor --config" in done.stdout
    command = [*program, f"--config={configured(tmp_path, model)}"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_LIMIT_S, check=True).stdout
    assert "ok    model    " in told and told.endswith("this machine can do the configured run\n")


# --- the checks by themselves --------------------------------------------------------------------------------------
def test_a_check_that_hangs_or_breaks_hides_no_other() -> None:
    never = threading.Event()

    def hang() -> Finding:
        never.wait()
        return ok("")

    def broken() -> Finding:
        raise ValueError("bad luck")

    found = list(
        results([Check("hung", hang, 0.2, "turn it off"), Check("broken", broken), Check("well", lambda: ok("good"))])
    )
    never.set()
    assert [(one.name, one.finding.status) for one in found] == [("hung", "fail"), ("broken", "fail"), ("well", "ok")]
    assert found[0].finding.do == "turn it off" and "0.2 s" in found[0].finding.says
    assert "bad luck" in found[1].finding.says


def test_no_compiler_and_no_object_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("worker.engine.cpu_objects.zig", lambda: None)
    monkeypatch.setattr("worker.engine.cpu_objects.SHIPPED", tmp_path)
    assert machine.compiler().status == "warn"
    found = machine.kernels()
    assert found.status == "warn" and "install clang" in found.do
    monkeypatch.undo()
    monkeypatch.setattr("worker.engine.cpu_objects.SHIPPED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "it was tried" in machine.kernels().says
    assert not (tmp_path / "cache").exists(), "a look leaves nothing behind"


def test_the_ssh_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.ssh(needed=False, identity=None).status == "skip"
    key = tmp_path / "key"
    assert "ssh-keygen -t ed25519" in machine.ssh(needed=True, identity=key).do
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    assert machine.ssh(needed=True, identity=key).status == "ok"
    key.chmod(0o644)
    assert machine.ssh(needed=True, identity=key).do == f"chmod 600 {key}"
    key.unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(key)], check=True)
    assert "passphrase" in machine.ssh(needed=True, identity=key).says
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "openssh-client" in machine.ssh(needed=True, identity=key).do


def test_addresses_that_cannot_be_bound() -> None:
    assert run.port_problem(SocketAddr("127.0.0.1", 0)) == ""
    assert "is no address of this machine" in run.port_problem(SocketAddr("203.0.113.7", 1234))
    assert "above port 65535" in run.port_problem(SocketAddr("127.0.0.1", 70000))


def test_memory_counts_the_services_and_each_stage(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", TinySpec(layers=4, kind="Q8_0"))
    plan, part = planned(tmp_path)
    sizes = [stage_size(plan, stage) for stage in plan.stages]
    processes = run.SERVICES_BYTES + 2 * run.WORKER_BYTES
    packed = sum(size.packed + size.cache for size in sizes) + processes
    unpacked = sum(size.float16 + size.cache for size in sizes) + processes
    assert processes < packed < unpacked
    there = {unpacked: "ok", unpacked - 1: "warn", packed: "warn", packed - 1: "fail", 1: "fail", 0: "skip"}
    assert {size: run.memory(part, plan, size).status for size in there} == there
    assert "does not say" in run.memory(part, plan, 0).says
    assert "max_context" in run.memory(part, plan, 1).do
    assert run.memory(part, PlanError("no plan"), unpacked).status == "skip"
    rented = msgspec.structs.replace(part, provider=ProviderKind.VASTAI)
    assert run.memory(rented, plan, 1).status == "skip"


@pytest.mark.parametrize(
    ("wanted", "info", "statuses"),
    [
        ("none", {}, []),
        ("all", {"Runtimes": {"runc": {}, "nvidia": {}}}, []),
        ("all", {"Runtimes": {"runc": {}}, "CDISpecDirs": ["/etc/cdi", "/var/run/cdi"]}, ["fail"]),
        ("device=0,1", {"Runtimes": None}, ["fail"]),
        ("cdi:nvidia.com/gpu=all", {"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"nvidia": {}}}, ["warn"]),
        ("cdi:nvidia.com/gpu=all", {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]}, []),
        ("cdi:nvidia.com/gpu=0,nvidia.com/gpu=1", {"DiscoveredDevices": GPU_0}, ["fail"]),
        ("cdi:nvidia.com/gpu=0", {"DiscoveredDevices": GPU_0}, []),
        ("cdi:nvidia.com/gpu=0", {"DiscoveredDevices": []}, ["fail"]),
    ],
)
def test_gpus_that_the_engine_knows(wanted: str, info: dict[str, Any], statuses: list[str]) -> None:
    found = engine.gpus(wanted, info)
    assert [one.status for one in found] == statuses
    assert all(wanted in one.says and one.do for one in found)


def test_the_ledger_is_looked_for_where_it_will_be(tmp_path: Path, model: Path) -> None:
    words = [f"--runtime-config={configured(tmp_path, model)}"]
    config = resolve(words, {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}, tmp_path, executable=Path("x"))
    _, part = planned(tmp_path)

    def ledger(environ: Mapping[str, str]) -> Finding:
        return next(one for one in run.disk(config, part, PlanError("no plan"), environ) if "ledger" in one.says)

    for environ in ({"HOME": str(tmp_path)}, {"XDG_STATE_HOME": str(tmp_path / "state")}):
        assert f"{ledger_folder(environ)}," in ledger(environ).says and ledger(environ).status == "ok"
    nowhere = ledger({"XDG_STATE_HOME": ""})
    assert (nowhere.status, nowhere.do) == ("fail", "set HOME or XDG_STATE_HOME")


def test_missing_packages_are_named() -> None:
    assert machine.missing_packages(["pyzmq>=27", "no-such-package-of-ours>=1", 'other; extra == "dev"']) == [
        "no-such-package-of-ours"
    ]


# --- a model on a hub -----------------------------------------------------------------------------------------------
MODEL_CHECK = """
import json, os, sys
from dataclasses import asdict
from pathlib import Path
from common.config import resolve
from services.orchestrator.doctor import command
command.HUB_LIMIT_S = float(sys.argv.pop(1))
config = resolve(sys.argv[1:], os.environ, Path.cwd(), executable=Path("x"))
(check,) = [check for check in command._of_run(config, os.environ) if check.name == "model"]
(result,) = command.results([check])
print(json.dumps(asdict(result.finding)))
"""


def from_hub(folder: Path, provider: str = "process", file: str = "model.gguf") -> Path:
    toml = configured(folder, folder)
    text = toml.read_text().replace('"process"', f'"{provider}"')
    source = f'gguf_repo = "owner/repo"\ngguf_file = "{file}"'
    toml.write_text(text.replace(f"gguf_local_path = {json.dumps(str(folder))}", source))
    return toml


def of_hub(toml: Path, environ: Mapping[str, str], stages: int, limit_s: float = 20.0) -> dict[str, str]:
    """The finding; in a process of its own, because huggingface_hub reads its environment when it is imported."""
    arguments = [str(limit_s), "--runtime-config", str(toml), "--pipeline-stages", str(stages)]
    command = [sys.executable, "-P", "-c", MODEL_CHECK, *arguments]
    env = {**os.environ, **environ}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=PROGRAM_LIMIT_S, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_a_model_on_a_hub_is_looked_into_as_the_planner_does(tmp_path: Path, model: Path) -> None:
    with Hub(model.read_bytes()) as hub:
        environ = hub.environment(tmp_path / "home")
        status, found, errors = doctor(from_hub(tmp_path), environ, "--pipeline-stages", "2")
        assert (status, errors) == (0, ""), found
        (said,) = found["model"]
        assert said["status"] == "ok" and "owner/repo/model.gguf@main on Hugging Face: 2 layers" in said["says"]
        assert found["memory"][0]["status"] == "ok", "its size is known"
        assert "fetched models" in found["disk"][0]["says"]
        assert hub.wholes == 0 and len(set(hub.ranges)) == len(hub.ranges), "once for all checks"
        fetched = len(hub.ranges)
        one = of_hub(from_hub(tmp_path), environ, stages=1)
        assert one["status"] == "ok" and "2 layers" in one["says"] and len(hub.ranges) == fetched


@pytest.mark.parametrize(
    ("stages", "provider", "status", "says"),
    [
        (1, "process", "fail", "the hub {url} cannot be reached"),
        (2, "process", "fail", "planned execution needs to inspect the GGUF owner/repo/model.gguf@main"),
        (1, "external", "warn", "its worker, elsewhere, has to fetch it"),
    ],
)
def test_a_hub_that_is_not_there(tmp_path: Path, stages: int, provider: str, status: str, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    environ = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = of_hub(from_hub(tmp_path, provider), environ, stages)
    assert said["status"] == status and says.format(url=url) in said["says"] and "HF_ENDPOINT" in said["do"], said


def test_a_hub_that_lets_nobody_look_into_the_file_serves_one_worker_only(tmp_path: Path, model: Path) -> None:
    with Hub(model.read_bytes(), has_ranges=False) as hub:
        environ = hub.environment(tmp_path / "home")
        one, two = (of_hub(from_hub(tmp_path), environ, stages) for stages in (1, 2))
        other = of_hub(from_hub(tmp_path, file="other.gguf"), environ, 1)
    assert one["status"] == "ok" and "the worker fetches it whole" in one["says"]
    assert two["status"] == "fail" and "sends no byte ranges" in two["says"]
    assert other["status"] == "fail" and "has no such file" in other["says"]


def test_a_hub_that_is_too_slow_is_given_up(tmp_path: Path, model: Path) -> None:
    with Hub(model.read_bytes()) as hub:
        hub.pause_s = PROGRAM_LIMIT_S
        said = of_hub(from_hub(tmp_path), hub.environment(tmp_path / "home"), 2, limit_s=1.0)
    assert said["status"] == "fail" and "the hub" in said["says"], said


@pytest.mark.parametrize("spare", [0, -1])
def test_a_run_directory_is_too_long_for_the_doctor_where_it_is_for_the_run(tmp_path: Path, spare: int) -> None:
    length = SOCKET_PATH_BYTES_MAX - (socket_path_bytes(tmp_path / "x") - len("x")) - spare
    directory = tmp_path / ("x" * length)
    finding = run._run_directory(directory)
    assert (finding.status == "fail") == (spare < 0), finding
    if spare < 0:
        with pytest.raises(SecurityError, match="too long for sockets"):
            init(directory, relay=False)
    else:
        init(directory, relay=False)
