"""Every service tells the orchestrator again that it is ready when the first word did not arrive (S1 6.11)."""

from __future__ import annotations

import pytest

from common.addresses import Role
from common.effects import SendFailed, ViewChanged
from common.limits import CONFIG_RESEND_MS
from common.messages.bus import RouteEntry, Snapshot
from common.messages.service import ServiceReady
from common.service_actor import ServiceActor
from services.datastream_collector.core import CollectorActor
from services.membership.core import MembershipActor
from services.prompt_gateway.core import GatewayActor
from services.provisioner.core import ProvisionerActor
from tests.support.harness import Harness

ORCHESTRATOR = b"o" * 32


@pytest.mark.parametrize("make", [ProvisionerActor, GatewayActor, MembershipActor, CollectorActor])
def test_a_lost_announcement_is_repeated(make: type[ServiceActor]) -> None:
    actor = make()
    harness = Harness(actor)
    route = RouteEntry(
        address=ORCHESTRATOR, node=b"p" * 32, boot=3, generation=1, role=Role.ORCHESTRATOR, name="orchestrator"
    )
    harness.views.routes.apply(Snapshot(view="routes", version=1, items=[route]))
    actor._is_ready = True
    harness.tell(ViewChanged("routes"))
    said = [message for dst, message in harness.sent() if isinstance(message, ServiceReady) and dst == ORCHESTRATOR]
    assert len(said) == 1
    harness.tell(SendFailed(ORCHESTRATOR, said[0], "unroutable"))
    harness.advance(CONFIG_RESEND_MS)
    again = [message for _, message in harness.sent() if isinstance(message, ServiceReady)]
    assert again == said
