"""Wiring of the membership service: one actor; all it does is messages."""

from __future__ import annotations

from common.addresses import Role
from common.host import Host
from services.membership.core import MembershipActor


def build(host: Host) -> None:
    """Spawn the service's main actor under its well-known name."""
    host.spawn(MembershipActor(), name=Role.MEMBERSHIP)
