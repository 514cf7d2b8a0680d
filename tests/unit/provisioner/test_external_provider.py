"""Provider external: the worker that somebody else starts is awaited, missed, and let go (design.md 2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.addresses import Role
from common.config_slices import ProvisionerSlice, encode_slice
from common.effects import ViewChanged
from common.messages.bus import Admitted, RouteEntry, Snapshot
from common.messages.config import ConfigSlice
from common.messages.provision import (
    NodeExited,
    NodeProvisionSpec,
    NodesStopped,
    NodeStarted,
    NodeStopped,
    PrepareProvider,
    ProviderPrepared,
    StopNodes,
    WorkerAwaited,
)
from services.provisioner.external_provider import ABSENT_MS, GOODBYE_MS, ExternalProvider
from services.provisioner.plugin import LeftBehind, PluginNodeHandle, ProviderLine
from services.provisioner.state import Prepared
from tests.unit.provisioner.playbook import ORCHESTRATOR, RESOLVER, ROUTER, Play, start_node

KEY = bytes([1]) * 32


class External(Play):
    """As Play, with provider external and a worker of which the test decides whether it is there."""

    def configure(self) -> None:
        config = encode_slice(ProvisionerSlice(provider="external"))
        self.harness.tell(ConfigSlice(part=Role.PROVISIONER, digest="d", slice_json=config))

    def worker(self, here: bool, *, others: bool = True) -> None:
        self._version += 1
        services = [(RESOLVER, Role.RESOLVER), (ORCHESTRATOR, Role.ORCHESTRATOR), (ROUTER, Role.ROUTER)]
        items = [
            RouteEntry(
                address=key, node=key, boot=key[0] if key == ORCHESTRATOR else 1, generation=1, role=role, name=role
            )
            for key, role in (services if others else [])
        ]
        if here:
            items.append(RouteEntry(address=b"w" * 32, node=KEY, boot=1, generation=1, role=Role.AGENT, name=""))
        self.harness.views.routes.apply(Snapshot(view="routes", version=self._version, items=list(items)))
        self.harness.tell(ViewChanged("routes"))

    def waiting(self) -> PluginNodeHandle:
        """Up to the worker that is awaited."""
        self.order(PrepareProvider(run_id=1, provider="external"))
        self.done(self.job("prepare"), Prepared(0))
        assert self.sent() == [ProviderPrepared(provider="external")]
        minted = self.mint(1)
        self.harness.sent()
        self.harness.tell(Admitted(key=minted.public_key), src=ROUTER)
        handle = PluginNodeHandle("h1")
        self.done(self.job("start_node"), handle)
        return handle

    def here(self) -> PluginNodeHandle:
        handle = self.waiting()
        self.worker(True)
        self.sent()
        return handle


STARTED = NodeStarted(node_id=1, stage_index=0, handle="h1", node_key=KEY)


def test_the_worker_counts_as_started_when_it_has_come() -> None:
    play = External()
    play.waiting()
    # The user is told where the launch file is.
    assert play.sent() == [WorkerAwaited(node_id=1, stage_index=0, launch="nodes/1/launch.json")]
    play.order(start_node(1))
    assert play.sent() == []
    play.worker(True)
    assert play.sent() == [STARTED]
    play.worker(True)
    assert play.sent() == []
    play.order(start_node(1))
    assert play.sent() == [STARTED]


def test_one_that_stays_away_has_exited_and_a_router_restart_is_no_end() -> None:
    play = External()
    play.here()
    play.worker(False, others=False)
    play.harness.advance(ABSENT_MS - 1000)
    play.worker(True)
    play.harness.advance(ABSENT_MS)
    assert not any(isinstance(msg, NodeExited) for msg in play.sent())
    play.worker(False)
    play.harness.advance(ABSENT_MS + 1)
    (exited,) = [msg for msg in play.sent() if isinstance(msg, NodeExited)]
    assert (exited.node_id, exited.status, exited.reason) == (1, None, "left the bus")


@pytest.mark.spec("S1 9.16")
def test_at_the_end_it_may_go_by_itself() -> None:
    play = External()
    play.here()
    play.order(StopNodes())
    assert play.effects() == []
    play.worker(False)
    play.done(play.job("stop_node"))
    sent = play.sent()
    assert NodeStopped(node_id=1) in sent and NodesStopped(stopped=[1]) in sent


@pytest.mark.parametrize("fast", [False, True])
def test_one_that_does_not_go_is_fenced_by_its_key(fast: bool) -> None:
    play = External()
    play.here()
    play.order(StopNodes(fast=fast))
    if not fast:
        assert play.effects() == []
        play.harness.advance(GOODBYE_MS)
    play.done(play.job("stop_node"))
    assert NodesStopped(stopped=[1]) in play.sent()


def test_a_worker_that_never_came_is_stopped_at_once() -> None:
    play = External()
    play.waiting()
    play.order(StopNodes())
    play.done(play.job("stop_node"))
    assert NodesStopped(stopped=[1]) in play.sent()


def test_the_plugin_says_what_has_to_be_done() -> None:
    provider, seen = ExternalProvider(), list[object]()
    provider.prepare()
    spec = NodeProvisionSpec(run_id=1, node_id=4, stage_index=0, image="")
    handle = provider.start_node("h", spec, Path("/run/x/nodes/4/launch.json"), seen.append)
    (line,) = seen
    assert isinstance(line, ProviderLine)
    assert "copy /run/x/nodes/4/launch.json to its machine" in line.line
    assert "mvp-worker-node --launch launch.json" in line.line
    provider.complete_bootstrap(handle)
    provider.stop_node(handle, True)
    assert not provider.stop_left_behind(LeftBehind("h", "external", "", 4, ""))
