"""Provider `external`: somebody else starts the worker, with the launch file that he carries over (design.md 2).

There is no process to hold: the worker's presence is its route on the bus. It is awaited after start_node, and at the
end it goes by itself after StopRun; whoever does not is fenced by the revocation of its key and ends by its lease.
"""

from __future__ import annotations

from pathlib import Path

from common.actors import Ctx
from common.messages.provision import NodeProvisionSpec
from services.provisioner.plugin import LeftBehind, Listing, PluginNodeHandle, ProviderLine, Sink

NAME = "external"
ABSENT_MS = 20_000  # a router that restarts knows no routes until its nodes have registered again
GOODBYE_MS = 6_000  # a worker that was told StopRun ends by itself within this
PRESENCE_TIMER = "external:presence"
GOODBYE_TIMER = "external:goodbye"


class ExternalProvider:
    """Everything that such a worker needs is its launch file, which exists already when start_node is called."""

    name = NAME

    def prepare(self) -> None:
        """Nothing can be checked: the worker's machine is somebody else's."""

    def start_node(self, handle_id: str, spec: NodeProvisionSpec, launch_file: Path, sink: Sink) -> PluginNodeHandle:
        """Say what has to be done; the provisioner waits for the worker to come."""
        sink(
            ProviderLine(
                f"node {spec.node_id} waits for its worker: copy {launch_file} to its machine (mode 0600) and start "
                "`mvp-worker-node --launch launch.json` there"
            )
        )
        return PluginNodeHandle(handle_id)

    def complete_bootstrap(self, handle: PluginNodeHandle) -> None:
        """Nothing."""

    def stop_node(self, handle: PluginNodeHandle, fast: bool) -> None:
        """Nothing: it was told StopRun, and its key is revoked after this."""

    def stop_left_behind(self, left: LeftBehind) -> bool:
        """Its lease has ended it by now; the ledger removes the launch file."""
        return False

    def list_owned(self) -> Listing:
        """Nobody lists other people's machines; the ledger knows who was awaited."""
        return Listing()


class Presence:
    """Which workers are there, by their routes. Pure; part of the provisioner's actor."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._absent_since: dict[bytes, int] = {}

    def came(self, key: bytes, ctx: Ctx) -> bool:
        """Whether this worker has ever been there."""
        if key not in self._seen and self.here(key, ctx):
            self._seen.add(key)
        return key in self._seen

    @staticmethod
    def here(key: bytes, ctx: Ctx) -> bool:
        """Whether it has a route now."""
        return any(entry.node == key for entry in ctx.views.routes.entries())

    def lost(self, key: bytes, ctx: Ctx) -> bool:
        """It was there and has been away for too long. Called at each change of the view and by the timer."""
        if key not in self._seen or self.here(key, ctx) or not ctx.views.routes.known:
            self._absent_since.pop(key, None)
            return False
        since = self._absent_since.setdefault(key, ctx.now_ms)
        if ctx.now_ms - since >= ABSENT_MS:
            return True
        ctx.timer(PRESENCE_TIMER, since + ABSENT_MS - ctx.now_ms)
        return False
