"""Who speaks of another run, node, stage, request, edge or readiness, and who forges for somebody else (S1 6.12, 9.19).

All that is sent here must change nothing: the invariants of cluster_watch and the clients would see it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from common.addresses import NONCE_BYTES, Role
from common.codec import Message, encode_body
from common.datagram import datagram_frame
from common.edge_records import Record, encode_record, encode_tokens
from common.edges.core import EdgeConsumer
from common.messages.edge import EdgeCredit, EdgeData, EdgeHello, SequenceBegun
from common.messages.node_agent import RuntimeReadyAck, StopRun
from common.messages.orchestrator import (
    EndpointWire,
    ObserveNodeRuntimeReady,
    ObserveNodeRuntimeReadyAck,
    ObserveStageFault,
    ObserveStageReady,
    ObserveStageStopped,
    ObserveWeightsReady,
)
from common.messages.prompt import (
    Done,
    Fault,
    PromptEncoded,
    RequestCancelled,
    TextDelta,
    TokenizerFault,
    TokensDecoded,
)
from common.messages.provision import StopNodes
from common.messages.serve import CloseRpc
from common.messages.service import RunEnded
from common.node import Identity
from services.prompt_gateway.core import GatewayActor
from tests.sim.cluster_world import FORGED
from tests.sim.edge_net import SimEdgeSockets

if TYPE_CHECKING:
    from tests.sim.cluster_engine import SimWorker
    from tests.sim.cluster_run import Cluster

FAR_ID = 1_000_000
"""No run makes so many requests."""


def forge(cluster: Cluster, a: float, b: float) -> None:
    """a chooses what is wrong: run, node or stage; b the request."""
    off = int(a * 3)
    for worker in cluster.provider.living():
        _reports(worker, off)
        _answers(cluster, worker, b)
        worker.host.wake(cluster.world.now)
    host = cluster.hosts.get(Role.ORCHESTRATOR)
    if host is not None and host.alive:
        for worker in cluster.provider.living():
            _orders(cluster, worker, off)
            _usurp(cluster, worker, host.node.identity)
        host.wake(cluster.world.now)
    _strangers(cluster, random.Random(b))


def _reports(worker: SimWorker, off: int) -> None:
    """To the run, of a stage that is not the worker's."""
    mine = worker.identity
    run, node, stage = (mine.run_id + (off == 0), mine.node_id + 7 * (off == 1), mine.stage_index + 7 * (off == 2))
    where = {"run_id": run, "node_id": node, "stage_index": stage}
    # These name no node, so only run and stage can be foreign.
    short = {"run_id": mine.run_id + (off != 2), "stage_index": mine.stage_index + 7 * (off == 2)}
    true = {"run_id": mine.run_id, "node_id": mine.node_id, "stage_index": mine.stage_index}
    reports: list[Message] = [
        ObserveNodeRuntimeReady(
            **where,
            endpoint=EndpointWire(node_key=b"\x11" * 32),
            node_actor=b"\x12" * 32,
            datastream_publisher=b"\x13" * 32,
            readiness_id=77,
        ),
        ObserveNodeRuntimeReadyAck(**where, readiness_id=77),
        ObserveNodeRuntimeReadyAck(**true, readiness_id=78),
        ObserveWeightsReady(**where),
        ObserveStageFault(**short, reason=FORGED),
        ObserveStageReady(**short),
        ObserveStageStopped(**short),
    ]
    for report in reports:
        worker.host.node.forge(worker.agent, mine.orchestrator, report)


def _answers(cluster: Cluster, worker: SimWorker, b: float) -> None:
    """To the gateway: of a request that is over, is to come, or never was."""
    gateway, host = cluster.actors.get(Role.GATEWAY), cluster.hosts.get(Role.GATEWAY)
    if not isinstance(gateway, GatewayActor) or host is None or not host.alive:
        return
    loop = gateway.loop
    active = loop.active.work.prompt_id if loop and loop.active else 0
    next_id = loop.next_id if loop else gateway._next_prompt_id
    to_come = [work.prompt_id for work in loop.queue] if loop else []
    over = [number for number in range(max(0, next_id - 10), next_id) if number not in (active, *to_come)]
    mine = host.node.system
    for number in {*over[-1:], FAR_ID + int(b * 1000)}:
        for dst, event in _answers_of(gateway, cluster.address(Role.GATEWAY), number, worker.stage):
            worker.host.node.forge(worker.agent, dst, event)
    # Over the network, an answer to the next request may arrive when that one is active: then it is not foreign any
    # more. So these are handled here and now, and nothing else with them.
    if mine.busy:
        return
    host.node.at(cluster.world.now, host.wall())
    for number in {*to_come[:1], next_id + int(b * 3)}:
        for dst, event in _answers_of(gateway, cluster.address(Role.GATEWAY), number, worker.stage):
            mine.deliver(dst, event, src=worker.agent, src_node=worker.host.node.identity.key)
    mine._drain()
    host.wake(cluster.world.now)


def _answers_of(gateway: GatewayActor, address: bytes, number: int, stage: int) -> Iterator[tuple[bytes, Message]]:
    """All that a worker can say of request `number`, and to whom."""
    events: list[Message] = [
        TextDelta(request_id=number, text=FORGED),
        Done(
            request_id=number,
            final_text=FORGED,
            tokens_generated=1,
            elapsed_ms=1,
            prompt_tokens=1,
            finish_reason="stop",
        ),
        Fault(request_id=number, error=FORGED),
        PromptEncoded(request_id=number, tokens=[1, 2]),
        TokensDecoded(request_id=number, text=FORGED),
        TokenizerFault(request_id=number, error=FORGED),
        SequenceBegun(request_id=number, stage_index=stage),
    ]
    for inbox, _ in gateway._inboxes.values():
        for event in events:
            yield inbox, event
    yield address, RequestCancelled(request_id=number)


def _orders(cluster: Cluster, worker: SimWorker, off: int) -> None:
    """At the agent's door: orders for somebody else."""
    mine, me = worker.identity, cluster.address(Role.ORCHESTRATOR)
    node = cluster.hosts[Role.ORCHESTRATOR].node
    wrong = RuntimeReadyAck(
        run_id=mine.run_id + (off == 0),
        node_id=mine.node_id + 7 * (off == 1),
        stage_index=mine.stage_index + 7 * (off == 2),
        readiness_id=1,
    )
    node.forge(me, worker.agent, wrong)
    ack = RuntimeReadyAck(run_id=mine.run_id, node_id=mine.node_id, stage_index=mine.stage_index, readiness_id=9)
    node.forge(me, worker.agent, ack)
    node.forge(me, worker.agent, StopRun(run_id=mine.run_id + 1))


def _usurp(cluster: Cluster, worker: SimWorker, orchestrator: Identity) -> None:
    """A worker gives the orchestrator's orders, in the orchestrator's name and in its own: the brokers refuse both."""
    orders: list[tuple[Role, Message]] = [
        (Role.GATEWAY, CloseRpc(reason=FORGED)),
        (Role.PROVISIONER, StopNodes(fast=True)),
        (Role.GATEWAY, RunEnded(status=1, error=FORGED)),
    ]
    for role, message in orders:
        service = cluster.hosts.get(role)
        if service is None:
            continue
        for name in (orchestrator, worker.host.node.identity):
            key, run = service.node.identity.key, worker.host.node.run
            frame = datagram_frame(name, key, message, id=1 << 40, run=run, dst=cluster.address(role))
            worker.host.dialler.send(type(message).PLANE, frame)


def _strangers(cluster: Cluster, rng: random.Random) -> None:
    """At the edges' door: the right edge, run and offset, but not the token; and bytes without a Hello."""
    net = cluster.edges
    for taker in list(net.takers.values()):
        for consumer in _consumers(cluster, taker):
            stranger = SimEdgeSockets(net, "stranger")
            stranger.dial(1, taker.endpoints[0], b"")
            number = rng.randint(0, 3)
            record = encode_record(Record(number, number, encode_tokens([1]), begin=True, end=True))
            data = EdgeData(edge_id=consumer.edge_id, offset=consumer.received, data=record)
            for message in (
                data,
                EdgeHello(token=b"x" * 16, edge_id=consumer.edge_id, run=consumer.run),
                data,
                EdgeHello(token=consumer.token, edge_id=consumer.edge_id, run=rng.randbytes(NONCE_BYTES)),
                data,
                EdgeCredit(edge_id=consumer.edge_id, consumed_offset=1 << 30),
            ):
                stranger.send(1, encode_body(message))
            stranger.send(1, b"\xc1")
            cluster.world.at(cluster.world.now + 200, stranger.close)


def _consumers(cluster: Cluster, taker: SimEdgeSockets) -> list[EdgeConsumer]:
    """What it takes now."""
    ports = [worker.engine.stage.port._edges for worker in cluster.provider.living() if worker.engine.stage is not None]
    if cluster.gateway_edges is not None:
        ports.append(cluster.gateway_edges.shell._port)
    return [one for port in ports if port is not None and port._sockets is taker for one in port._desk.consumers]


__all__ = ["forge"]
