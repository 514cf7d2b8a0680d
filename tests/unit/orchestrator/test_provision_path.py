"""S1 6.8: no ProvisionerActor of the original's kind stands between the run and the ProvisionPlugin."""

from __future__ import annotations

import pytest

from common.codec import catalogue
from common.messages.provision import StartNode
from services.provisioner.plugin import ProvisionPlugin


@pytest.mark.spec("S1 6.8")
def test_there_is_no_provisioner_actor_protocol() -> None:
    """What crosses the bus is the direct call of the plugin made remote: start_node, complete_bootstrap, stop_node."""
    names = {cls.__name__ for cls in catalogue().values()}
    assert not {"ProvisionerMsg", "ProvisionerReport", "StartNodes", "NodeLive", "LogLine"} & names
    assert {"StartNode", "CompleteBootstrap", "StopNodes"} <= names
    assert StartNode.__doc__ and "NodeStarted or NodeFailed" in StartNode.__doc__
    assert all(hasattr(ProvisionPlugin, call) for call in ("start_node", "complete_bootstrap", "stop_node"))
