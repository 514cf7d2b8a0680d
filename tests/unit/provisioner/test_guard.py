"""The guard: last started first, every one attempted, the first error kept."""

from __future__ import annotations

import pytest

from services.provisioner.guard import ProvisionedClusterGuard
from services.provisioner.plugin import PluginNodeHandle


def guard_of(*nodes: int) -> ProvisionedClusterGuard:
    guard = ProvisionedClusterGuard()
    for node in nodes:
        guard.own(node, PluginNodeHandle(f"h{node}"))
    return guard


@pytest.mark.spec("S1 7.6", "S1 9.16", "S1 10.13")
def test_all_are_attempted_last_first_and_the_first_error_is_kept() -> None:
    guard = guard_of(1, 2, 3)
    order = []
    while (following := guard.next_to_stop()) is not None:
        node, handle = following
        assert handle.id == f"h{node}" and guard.current() == following
        order.append(node)
        assert guard.settle({3: "", 2: "engine is away", 1: "disk is full"}[node]) == node
    assert order == [3, 2, 1]
    assert guard.stopped == [3]
    assert guard.first_error == "node 2: engine is away"
    assert guard.empty


def test_one_at_a_time() -> None:
    guard = guard_of(1, 2)
    assert guard.next_to_stop() is not None
    assert guard.next_to_stop() is None


def test_a_worker_is_owned_once() -> None:
    with pytest.raises(AssertionError, match="owned already"):
        guard_of(1, 1)
