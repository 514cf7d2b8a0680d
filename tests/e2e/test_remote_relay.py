"""One `mvp-relay` for several operators: real runs over it, a hostile operator beside them, and its restart."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.addresses import NO_RUN, Plane, Role
from common.bus import mint_keypair
from common.door import free_ports, remote_door
from common.messages.bus import Admit, Admitted, PeerUp, Ping, Revoke, Revoked, Undeliverable
from common.messages.node_agent import StopRun
from common.operator_key import operator_key
from tests.e2e.stack import Stack, wait_for
from tests.support.raw_peer import RawPeer

RELAY = str(Path(sys.executable).with_name("mvp-relay"))


class RemoteRelay:
    """`mvp-relay` as a child; its state file outlives it."""

    def __init__(self, folder: Path, operators: list[bytes]) -> None:
        self.state = folder / "relay.json"
        bind = f"127.0.0.1:{free_ports('127.0.0.1')}"
        allowed = [part for key in operators for part in ("--allow-operator", key.hex())]
        self._command = [RELAY, *allowed, "--state", str(self.state), "--bind", bind]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said, _, self.url = self.process.stdout.readline().strip().partition(" ")
        assert said == "relay"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def workers(self) -> dict[bytes, bytes]:
        """Worker → operator, as it has saved them."""
        saved = json.loads(self.state.read_text())
        return {bytes.fromhex(worker["key"]): bytes.fromhex(worker["operator"]) for worker in saved["workers"]}


def run_over(relay: RemoteRelay, home: Path, more: str = "", *args: str) -> Stack:
    """An operator's orchestrator, whose state is `home`."""
    stack = Stack(config=f'[relay]\nurl = "{relay.url}"\n{more}', args=args, environ={"XDG_STATE_HOME": str(home)})
    stack.state = home
    return stack


def key_of(home: Path) -> bytes:
    return operator_key(home / "swactor-mq" / "operator.key").public


@pytest.fixture
def homes(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in ("alice", "bob", "mallory")]


@pytest.fixture
def relay(homes: list[Path], tmp_path: Path) -> Iterator[RemoteRelay]:
    made = RemoteRelay(tmp_path, [key_of(home) for home in homes])
    yield made
    with contextlib.suppress(ProcessLookupError):
        made.kill()


@pytest.mark.spec("S1 2.1", "S1 2.6")
def test_two_operators_use_one_relay_and_a_hostile_one_reaches_neither(relay: RemoteRelay, homes: list[Path]) -> None:
    alice, bob, mallory = homes
    pipeline = '[pipeline]\nedges = "relay"\n'
    with run_over(relay, alice, pipeline, "--pipeline-stages", "2") as first, run_over(relay, bob) as second:
        first.assert_answers()
        second.assert_answers()
        owners = relay.workers()
        assert sorted(owners.values()) == sorted([key_of(alice), key_of(alice), key_of(bob)])
        door, pair = remote_door(relay.url), operator_key(mallory / "swactor-mq" / "operator.key")
        raw = RawPeer(door.dialled(), door.key, pair)
        spy_pair = mint_keypair()
        with contextlib.closing(raw):
            # Its own worker it may have; and it hears of no other.
            raw.say(Plane.CONTROL, Admit(key=spy_pair.public, role=Role.AGENT, run=NO_RUN, node_id=1), door.key)
            wait_for("Admitted", lambda: Admitted(key=spy_pair.public) in raw.listen(0.2), 60)
            spy = RawPeer(door.dialled(), door.key, spy_pair)
            with contextlib.closing(spy):
                assert {welcome.router_key for welcome in spy.welcomes.values()} == {pair.public}
                _attack(raw, spy, door.key, owners)
                heard = [message for _, _, message in raw.heard if isinstance(message, PeerUp)]
                assert {message.node for message in heard} <= {spy_pair.public}
        assert {key: owner for key, owner in relay.workers().items() if key in owners} == owners
        first.assert_answers()
        second.assert_answers()
        # A relay that is killed forgets nothing, and the runs go on.
        relay.kill()
        relay.start()
        first.assert_answers()
        second.assert_answers()
        for stack in (first, second):
            stack.say("stop\n")
            stack.assert_stopped("stdin")
    wait_for("both runs to have taken their workers off", lambda: set(relay.workers().values()) == {pair.public}, 90)
    assert relay.stop() == 0


def _attack(raw: RawPeer, spy: RawPeer, relay: bytes, owners: dict[bytes, bytes]) -> None:
    """Everything that an allowed operator and its worker can say, to everybody who is not theirs."""
    for key, operator in owners.items():
        for target in (key, operator):
            for plane in Plane:
                for name in (b"", operator, key):
                    raw.say(plane, StopRun(run_id=1), target, source=name, sequence=1)
                    raw.say(plane, Ping(), target, source=name)
                spy.say(plane, StopRun(run_id=1), target, sequence=1)
        raw.say(Plane.CONTROL, Revoke(key=key), relay)
        raw.say(Plane.CONTROL, Revoke(key=key), relay, source=operator)
        raw.say(Plane.CONTROL, Admit(key=key, role=Role.AGENT, run=NO_RUN, node_id=9), relay)
        raw.say(Plane.CONTROL, Admit(key=key, role=Role.AGENT, run=NO_RUN, node_id=9), relay, source=operator)
    answers = raw.listen(2)
    spy.listen(0.5)
    assert {message.reason for message in answers if isinstance(message, Undeliverable)} <= {"unbound", "refused"}
    assert not [message for message in answers if isinstance(message, Admitted) and message.key in owners]
    assert {message.key for message in answers if isinstance(message, Revoked)} <= owners.keys(), (
        "answered, without effect"
    )
    seen = {source for _, source, _ in (*raw.heard, *spy.heard)}
    assert seen <= {relay, raw.key, spy.key}, "it heard somebody who is not its own"


def test_a_stranger_is_not_let_in_and_one_key_serves_one_run(
    relay: RemoteRelay, homes: list[Path], tmp_path: Path
) -> None:
    with run_over(relay, tmp_path / "stranger") as stack:
        error = stack.assert_failed(120)
        assert "the relay is down, or does not allow this operator's key (see RELAY.md)" in error
    with run_over(relay, homes[0]) as first:
        first.addr()
        with run_over(relay, homes[0]) as second:
            assert second.wait(150) == 1
            assert "another run uses this operator key" in second.stderr and "XDG_STATE_HOME" in second.stderr
            first.assert_answers()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--state", "x"], "--state FILE and at least one --allow-operator KEY are needed"),
        (["--allow-operator", "12"], "is no operator key: it is 64 hex digits"),
        (["--state", "x", "--allow-operator", "ab" * 32, "--bind", "nowhere"], "is no host:port"),
        (
            ["--state", "{}/s", "--allow-operator", "ab" * 32, "--bind", "192.0.2.1:19800"],
            "cannot listen at tcp://192.0.2.1",
        ),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: list[str], says: str, tmp_path: Path) -> None:
    command = [RELAY, *(part.format(tmp_path) for part in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_the_operator_key_is_printed_and_lasts(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    printed = [
        subprocess.run([RELAY, "--operator-key"], capture_output=True, text=True, env=environ, timeout=60).stdout
        for _ in range(2)
    ]
    assert printed[0] == printed[1] == key_of(tmp_path).hex() + "\n"
    assert (tmp_path / "swactor-mq" / "operator.key").stat().st_mode & 0o777 == 0o600
