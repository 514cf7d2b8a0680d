"""Two ends on real sockets with a real child: join, name, request, reply, death (rust-swactor.md 10.3: t_actor,
t_cluster; S2 1, 2, 4, 6.1, 6.2, 7.5).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.bus import mint_keypair
from common.messages.inference import InferenceFault, InferenceNotReady, InferenceResponse
from tests.unit.agent.real_worker import is_gone
from tests.unit.gpu_node.ends import ECHO, Cluster
from worker.gpu_node.events import Close, ProcessSpec, Stop
from worker.gpu_node.process_actor import ProcessActor


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def _pid(cluster: Cluster) -> int:
    actor = cluster.node.end.host.node.system.actor(cluster.node.inference.process_addr)
    assert isinstance(actor, ProcessActor) and actor.pid
    return actor.pid


@pytest.mark.spec("S2 4.1", "S2 3.3", "S2 3.5")
def test_started_then_ready_with_a_living_pid(cluster: Cluster) -> None:
    cluster.ready()
    assert cluster.node.inference.worker_pid == _pid(cluster)
    os.kill(_pid(cluster), 0)


@pytest.mark.spec("S2 6.2", "S2 2.1", "S2 2.2", "S2 3.6")
def test_both_are_members_and_the_name_leads_to_the_bridge(cluster: Cluster) -> None:
    client = cluster.client()
    assert cluster.joined(client) == cluster.node.bridge_addr
    cluster.until(lambda: cluster.node.end.state(client.key) == "alive")
    own = {type(client.host.node.system.actor(address)).__name__ for address, *_ in client.host.node.system.addresses()}
    assert own == {"Inbox", "SwimActor", "ObserverActor"}, "the client spawns no business actors"


@pytest.mark.spec("S2 4.2", "S2 6.1", "S2 6.4")
@pytest.mark.parametrize(
    ("prompt", "answer"), [("hi", "hi 5 0.5"), ("__noise__", "after noise"), ("__pieces__", "in pieces, ä")]
)
def test_a_request_gets_its_reply(cluster: Cluster, prompt: str, answer: str) -> None:
    client = cluster.client()
    cluster.ready()
    cluster.ask(client, 3, prompt, max_tokens=5, temperature=0.5)
    assert cluster.heard(client) == [InferenceResponse(request_id=3, text=answer)]


def test_a_very_long_prompt_goes_there_and_back(cluster: Cluster) -> None:
    client, long = cluster.client(), 'aé\n"' * 100_000
    cluster.ready()
    cluster.ask(client, 1, long)
    assert cluster.heard(client) == [InferenceResponse(request_id=1, text=f"{long} 64 0.0")]


@pytest.mark.spec("S2 4.3")
def test_overlapping_requests_of_two_clients(cluster: Cluster) -> None:
    one, two = cluster.client(0), cluster.client(1)
    cluster.ready()
    for number in range(10):
        cluster.ask(one, number, f"one{number}")
        cluster.ask(two, number, f"two{number}")
    for end, name in ((one, "one"), (two, "two")):
        assert cluster.heard(end, 10) == [
            InferenceResponse(request_id=number, text=f"{name}{number} 64 0.0") for number in range(10)
        ]


@pytest.mark.spec("S2 4.4", "S2 7.3.2")
def test_a_crash_answers_everybody_and_leaves_the_node_usable(cluster: Cluster) -> None:
    client = cluster.client()
    cluster.ready()
    pid = _pid(cluster)
    for number, prompt in enumerate(("__crash__", "x", "y")):
        cluster.ask(client, number, prompt)
    faults = cluster.heard(client, 3)
    why = "the worker exited with status 7; its last words: about to crash"
    assert faults == [InferenceFault(request_id=number, error=why) for number in range(3)]
    cluster.until(lambda: cluster.node.worker_gone)
    assert is_gone(pid)
    cluster.ask(client, 9, "again")
    assert cluster.heard(client) == [InferenceFault(request_id=9, error=why)]
    assert client.state(cluster.keys.public) == "alive", "SWIM goes on"


@pytest.mark.spec("S2 4.5", "S2 7.3.4", "S2 7.3.3")
def test_not_ready_at_once_and_an_error_line_is_a_fault(tmp_path: Path) -> None:
    cluster = Cluster(spec=ProcessSpec(ECHO.command, {"ECHO_READY_FILE": str(tmp_path / "ready")}))
    client = cluster.client()
    cluster.ask(client, 1, "early")
    assert cluster.heard(client) == [InferenceNotReady(request_id=1)]
    assert not cluster.node.ready
    (tmp_path / "ready").touch()
    cluster.ready()
    cluster.ask(client, 2, "__error__")
    cluster.ask(client, 3, "fine")
    assert cluster.heard(client, 2) == [
        InferenceFault(request_id=2, error="generation failed: as asked"),
        InferenceResponse(request_id=3, text="fine 64 0.0"),
    ]
    cluster.close()


@pytest.mark.spec("S2 7.5.4")
def test_a_key_that_was_not_let_in_never_joins_and_cannot_submit(cluster: Cluster) -> None:
    stranger, client = cluster.client(keys=mint_keypair()), cluster.client()
    cluster.ready()
    bridge = cluster.joined(client)
    stranger.send(cluster.keys.public, bridge, _request(stranger.inbox_addr))
    for _ in range(500):
        cluster.pump()
    assert stranger.state(cluster.keys.public) == "unknown" and not stranger.host.node.link.up
    assert cluster.node.inference._next_id == 0, "nothing of it arrived"


@pytest.mark.spec("S2 7.5.4", "S2 4.2")
def test_a_reply_goes_to_the_node_that_asked_and_nowhere_else(cluster: Cluster) -> None:
    """Row 37: a client that names another's inbox neither floods it nor takes over its answers."""
    victim, liar = cluster.client(0), cluster.client(1)
    cluster.ready()
    cluster.ask(liar, 1, "for the victim", reply_to=victim.inbox_addr)
    cluster.ask(victim, 2, "mine")
    assert cluster.heard(victim) == [InferenceResponse(request_id=2, text="mine 64 0.0")]
    for _ in range(200):
        cluster.pump()
    assert victim.inbox.drain() == []


@pytest.mark.spec("S2 7.5.3", "S2 3.6")
def test_addresses_are_32_random_bytes_that_say_nothing_of_keys_or_endpoints(cluster: Cluster) -> None:
    client = cluster.client()
    addresses = {cluster.joined(client), client.inbox_addr, cluster.node.inference_addr, cluster.node.end.inbox_addr}
    assert len(addresses) == 4 and all(len(address) == 32 for address in addresses)
    assert not addresses & {client.key, cluster.keys.public}


@pytest.mark.spec("S2 3.3")
def test_stopping_the_actor_kills_the_child(cluster: Cluster) -> None:
    cluster.ready()
    pid = _pid(cluster)
    cluster.node.end.host.node.system.stop(cluster.node.inference_addr)
    cluster.until(lambda: not cluster.node._children[cluster.node.inference.process_addr].pid)
    assert is_gone(pid)


@pytest.mark.spec("S2 3.3")
@pytest.mark.parametrize("command", [Close(), Stop()])
def test_close_lets_it_finish_and_stop_ends_it(cluster: Cluster, command: object) -> None:
    cluster.ready()
    cluster.node.end.host.deliver(cluster.node.inference.process_addr, command)
    cluster.until(lambda: cluster.node.worker_gone)
    closed = "exited with status 0" in cluster.node.worker_gone
    assert closed or ("signal 15" in cluster.node.worker_gone and isinstance(command, Stop))


@pytest.mark.spec("S2 3.3", "S2 4.4")
def test_a_worker_that_is_not_there(tmp_path: object) -> None:
    cluster = Cluster(spec=ProcessSpec((f"{tmp_path}/no-such-worker",)))
    cluster.until(lambda: cluster.node.worker_gone)
    assert cluster.node.worker_gone == f"the worker failed: {tmp_path}/no-such-worker: No such file or directory"
    client = cluster.client()
    cluster.ask(client, 1, "x")
    assert [type(message) for message in cluster.heard(client)] == [InferenceFault]
    cluster.close()


@pytest.mark.spec("S2 3.3")
def test_a_child_that_ignores_everything_is_killed_and_a_flood_of_output_is_read() -> None:
    stubborn = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "sys.stdout.write('x' * 99 + '\\n' * 2 + 'y' * 5_000_000 + '\\n')\n"
        'print(\'{"status": "ready", "pid": 5}\', flush=True)\ntime.sleep(60)\n'
    )
    cluster = Cluster(spec=ProcessSpec((sys.executable, "-c", stubborn)))
    cluster.ready()
    cluster.node.end.host.deliver(cluster.node.inference.process_addr, Stop())
    cluster.until(lambda: cluster.node.worker_gone)
    assert "signal 9" in cluster.node.worker_gone
    cluster.close()


def _request(reply_to: bytes) -> object:
    from common.messages.inference import InferenceRequest

    return InferenceRequest(request_id=1, prompt="let me in", reply_to=reply_to)
