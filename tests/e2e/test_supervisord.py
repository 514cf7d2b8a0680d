"""The stack under supervisord, as config/supervisord.conf starts it (design.md 2, hosted; providers.md C)."""

from __future__ import annotations

import configparser
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xmlrpc.client import Fault, ServerProxy

import pytest
from supervisor.xmlrpc import SupervisorTransport

from common.addresses import SERVICES
from tests.e2e.stack import COLOURS, COLOURS_TOKENS, GONE_S, READY_S, Stack, assert_right, wait_for
from tools.prompt_client import PromptClient

CONF = Path(__file__).resolve().parents[2] / "config" / "supervisord.conf"


class Hosted(Stack):
    """supervisord in place of the launcher; the archive, the mark and the proof of the end are the same."""

    def start(self) -> Stack:
        """Keys first, then supervisord."""
        environ = self.environ | {"SMQ_RUN_DIR": str(self.run_dir), "SMQ_CONFIG": str(self.config_file)}
        init = [sys.executable, "-P", "-m", "common.security", "init", str(self.run_dir)]
        subprocess.run(init, check=True, stdout=subprocess.DEVNULL, cwd=self.home)
        with (self.home / "stdout").open("wb") as out, (self.home / "stderr").open("wb") as err:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name("supervisord")), "-c", str(CONF)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.home,
                env=environ,
                start_new_session=True,
            )
        wait_for("supervisord", (self.run_dir / "supervisor.sock").exists, 60)
        wait_for("its answer", self._answers, 60)  # it listens a moment after the name is there
        return self

    def _answers(self) -> bool:
        try:
            return bool(self.rpc.getState())
        except OSError:
            return False

    @property
    def rpc(self) -> Any:
        """supervisord's XML-RPC."""
        transport = SupervisorTransport(None, None, f"unix://{self.run_dir}/supervisor.sock")
        return ServerProxy("http://127.0.0.1", transport=transport).supervisor

    def log(self, program: str) -> str:
        """What a program printed."""
        return (self.run_dir / f"{program}.log").read_text(errors="replace")

    def assert_all_gone(self) -> None:
        """supervisord itself always exits 0, whatever its programs did."""
        assert self.wait(120) == 0
        wait_for("nothing of it", lambda: not self.left(), GONE_S)


EXTRAS = {"http_front": "http: http://127.0.0.1:8080/v1", "dashboard": "dashboard: http://127.0.0.1:8090/"}
"""Programs that are started on demand, and what they say then."""


@pytest.fixture(scope="module")
def hosted() -> Iterator[Hosted]:
    """All programs but the relay."""
    with Hosted() as stack:
        assert isinstance(stack, Hosted)
        yield stack


def test_the_file_names_every_service() -> None:
    """A program per service, started with its own bus file; only the orchestrator is never restarted."""
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";",))
    parser.read(CONF)
    programs = {name.removeprefix("program:"): parser[name] for name in parser if name.startswith("program:")}
    for name in EXTRAS:
        assert programs[name]["autostart"] == "false" and programs.pop(name)["priority"] == "75"
    assert set(programs) == {str(role) for role in SERVICES}
    for name, program in programs.items():
        assert f"-P -m services.{name} --bus %(ENV_SMQ_RUN_DIR)s/bus/{name}.json" in program["command"]
        assert ("HF_TOKEN" in program.get("environment", "")) == (name != "config_resolver")
        if name == "orchestrator":
            assert (program["autorestart"], program["startsecs"], program["startretries"]) == ("false", "0", "0")
        else:
            assert program["autorestart"] == "true" and int(program["startsecs"]) >= 3
    order = sorted(programs, key=lambda name: int(programs[name]["priority"]))
    assert order[0] == "router" and order[1] == "relay" and order[2] == "datastream_collector"
    assert order[-1] == "orchestrator"


@pytest.mark.spec("S1 3.1", "S1 4.12")
def test_a_run_under_supervisord(hosted: Hosted) -> None:
    """Ready, an answer, stopped by supervisord: the orchestrator's exit status is 0, the services wait on."""
    hosted.assert_answers()

    def running() -> bool:
        """The stack may answer before supervisord's startsecs are over: it says STARTING until then."""
        states = {info["name"]: info["statename"] for info in hosted.rpc.getAllProcessInfo()}
        assert {states.pop(name) for name in ("relay", *EXTRAS)} == {"STOPPED"}
        assert set(states.values()) <= {"STARTING", "RUNNING"}, states
        return set(states.values()) == {"RUNNING"}

    wait_for("every program is RUNNING", running, 60)
    # Their ports are fixed ones: somebody on this machine may have them, and that is said in their logs.
    for name, line in EXTRAS.items():
        with contextlib.suppress(Fault):
            hosted.rpc.startProcess(name)
        # supervisord calls it started after startsecs, whether it has said anything by then or not.
        said = (line, "Address already in use")
        wait_for(f"{name} to say {line}", lambda: any(words in hosted.log(name) for words in said), 60)  # noqa: B023
        with contextlib.suppress(Fault):
            hosted.rpc.stopProcess(name)
    assert hosted.rpc.stopProcess("orchestrator")
    info = hosted.rpc.getProcessInfo("orchestrator")
    assert (info["exitstatus"], info["spawnerr"]) == (0, "")
    # The collector lives on, and need not have written what the orchestrator said last when that one has ended.
    wait_for("the end on record", lambda: hosted.archive.find("orch_exit", "ready"), 60)
    assert hosted.archive.one("shutdown", "started").detail["source"] == "SIGTERM"
    assert hosted.archive.one("orch_exit", "ready").detail == {"result": "ok"}
    assert hosted.log("orchestrator") == ""
    parts = {process.part for process in hosted.left()}
    assert not parts & {"agent", "engine", "orchestrator"}, parts
    assert {"router", "prompt_gateway", "provisioner"} <= parts


@pytest.mark.spec("S1 3.1", "S1 4.12", "S1 4.13")
def test_the_next_run_and_the_end(hosted: Hosted) -> None:
    """The same services serve a second orchestrator; supervisord's shutdown stops it first, then them, and all ends."""
    before = len(hosted.archive.lifecycle())
    assert hosted.rpc.startProcess("orchestrator", False)

    def ready_again() -> str:
        records = hosted.archive.lifecycle()[before:]
        return next((r.detail["addr"] for r in records if r.step == ("prompt_rpc", "ready")), "")

    wait_for("the second run", ready_again, READY_S)
    with PromptClient.connect(ready_again(), wait_s=10, read_timeout_s=150) as client:
        assert_right(client.complete(COLOURS, max_tokens=COLOURS_TOKENS).final_text)
    assert hosted.rpc.shutdown()
    hosted.assert_all_gone()
    second = hosted.archive.lifecycle()[before:]
    assert second[-1].step == ("orch_exit", "ready"), second[-3:]
    assert not [record for record in second if record.status == "failed"]


@pytest.mark.spec("S1 9.1", "S1 3.1", "S1 10.2")
def test_a_wrong_configuration_under_supervisord() -> None:
    """The resolver serves the error, the orchestrator prints it and ends with status 1; no worker was started."""
    with Hosted(text="[model\n") as stack:
        assert isinstance(stack, Hosted)
        wait_for("the end of the run", lambda: stack.rpc.getProcessInfo("orchestrator")["statename"] == "EXITED", 120)
        assert stack.rpc.getProcessInfo("orchestrator")["exitstatus"] == 1
        lines = stack.log("orchestrator").splitlines()
        assert len(lines) == 1 and lines[0].startswith("mvp-orchestrator: "), lines
        assert "not valid TOML" in lines[0]
        assert not stack.state.exists() or not list((stack.state / "swactor-mq" / "ledger").glob("*"))
        stack.rpc.shutdown()
        stack.assert_all_gone()
