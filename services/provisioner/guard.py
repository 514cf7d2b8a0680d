"""ProvisionedClusterGuard: the ownership boundary for worker cleanup (S1 4.13, 7.6, 9.16, 10.13; design.md 6 row 23).

Pure bookkeeping: it decides what is stopped next and what the result is; the core runs the stop jobs. Its "drop" is
that the owner is gone or the lease is lost: the same stopping, whose errors nobody waits for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.provisioner.plugin import PluginNodeHandle


@dataclass(slots=True)
class ProvisionedClusterGuard:
    """handles: (node_id, handle) in the order of their start."""

    handles: list[tuple[int, PluginNodeHandle]] = field(default_factory=list)
    stopping: int | None = None
    """The node whose stop runs now."""
    stopped: list[int] = field(default_factory=list)
    first_error: str = ""

    def own(self, node_id: int, handle: PluginNodeHandle) -> None:
        """From now on this worker is stopped, whatever happens."""
        assert all(node_id != owned for owned, _ in self.handles), f"node {node_id} is owned already"
        self.handles.append((node_id, handle))

    def next_to_stop(self) -> tuple[int, PluginNodeHandle] | None:
        """The last started that is left, now marked as being stopped; None if none is left or one is being stopped."""
        if self.stopping is not None or not self.handles:
            return None
        self.stopping = self.handles[-1][0]
        return self.handles[-1]

    def current(self) -> tuple[int, PluginNodeHandle] | None:
        """The one that is being stopped."""
        return next((item for item in self.handles if item[0] == self.stopping), None)

    def settle(self, error: str) -> int:
        """The stop of the current one ended; with an error it counts as attempted, and the first error is kept."""
        assert self.stopping is not None, "no stop runs"
        node_id = self.stopping
        self.stopping = None
        self.handles = [item for item in self.handles if item[0] != node_id]
        if not error:
            self.stopped.append(node_id)
        elif not self.first_error:
            self.first_error = f"node {node_id}: {error}"
        return node_id

    def release(self, node_id: int) -> None:
        """This worker was stopped to be replaced; no stop of all runs."""
        self.handles = [item for item in self.handles if item[0] != node_id]

    @property
    def empty(self) -> bool:
        """Nothing is left to stop."""
        return not self.handles
