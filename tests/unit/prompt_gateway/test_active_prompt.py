"""The orchestrator knows which prompt has the slot, so that its fault is on record if the gateway dies."""

from __future__ import annotations

import pytest

from common.addresses import Role
from common.effects import ViewChanged
from common.messages.bus import RouteEntry, Snapshot
from common.messages.serve import PromptActive
from tests.unit.prompt_gateway.rig import ORCHESTRATOR, Rig


@pytest.mark.spec("S1 9.9")
def test_the_slot_is_told_when_it_is_taken_and_when_its_prompt_has_ended() -> None:
    rig = Rig().open()
    route = RouteEntry(
        address=ORCHESTRATOR, node=b"n" * 32, boot=1, generation=1, role=Role.ORCHESTRATOR, name="orchestrator"
    )
    rig.h.views.routes.apply(Snapshot(view="routes", version=1, items=[route]))
    rig.tell(ViewChanged("routes"))
    first, second = rig.connect(), rig.connect()
    rig.ask(first, request_id=5)
    rig.ask(second, request_id=6)
    rig.done(rig.prompts()[0])
    told = [(message.request_id, message.ended) for message in rig.reports() if isinstance(message, PromptActive)]
    assert told == [(5, False), (5, True), (6, False)], "a queued prompt has no slot"
