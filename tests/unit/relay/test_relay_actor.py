"""The relay's actor: it admits on its router's word and tells it who is there."""

from __future__ import annotations

from typing import Any

import pytest

from common.addresses import NO_RUN, Plane, Role
from common.broker import Broker, NodeBound, NodeGone, static_admissions
from common.datagram import datagram_frame
from common.effects import Exit, JobDone, Log, OwnerGone, RunJob, SendFailed, StopSignal
from common.limits import RELAY_NODES_MAX, RELAY_UNCONFIRMED_MS
from common.messages.bus import Admit, Admitted, Hello, PeerDown, PeerUp, Revoke, Revoked
from common.node import Identity
from services.relay.core import OWED_MAX, SAVE_JOB, RelayActor
from tests.support.harness import Harness

ROUTER, RELAY, AGENT, HOSTILE, TAP = b"r" * 32, b"y" * 32, b"a" * 32, b"h" * 32, b"t" * 32


class Relays:
    def __init__(self, *operators: bytes, persistent: bool = False) -> None:
        allow = dict.fromkeys(operators or (ROUTER,), Role.ROUTER) | {RELAY: Role.RELAY, TAP: Role.TAP}
        self.broker = Broker(RELAY, 5, Role.RELAY, static_admissions(Role.RELAY, allow))
        self.rig = Harness(RelayActor(self.broker, persistent=persistent), node=RELAY)

    def tell(self, msg: Any, source: bytes = b"") -> list[tuple[bytes, Any]]:
        self.rig.tell(msg, src=source, src_node=source)
        return self.rig.sent()

    def bind(self, key: bytes, boot: int = 1) -> list[tuple[bytes, Any]]:
        """Hello at the core; its events go to the actor."""
        hello = datagram_frame(Identity(key, Role.AGENT, boot, "n"), RELAY, Hello(boot=boot, logical_id="n"), id=1)
        self.broker.on_frame(Plane.CONTROL, key[:2], lambda: key, hello, 0)
        return self.events()

    def events(self) -> list[tuple[bytes, Any]]:
        events, self.broker.events = self.broker.events, []
        return [item for event in events for item in self.tell(event)]

    def admit(self, key: bytes = AGENT, operator: bytes = ROUTER) -> list[tuple[bytes, Any]]:
        return self.tell(Admit(key=key, role=Role.AGENT, run=NO_RUN, node_id=1), operator)


@pytest.mark.spec("S1 2.6")
def test_a_worker_joins_after_its_admission_and_the_router_hears_of_it() -> None:
    relays = Relays()
    relays.bind(ROUTER)
    assert not relays.broker.admits(AGENT)
    assert relays.admit() == [(ROUTER, Admitted(key=AGENT))]
    assert relays.bind(AGENT, 7) == [(ROUTER, PeerUp(node=AGENT, boot=7, role=Role.AGENT))]
    assert relays.admit() == [(ROUTER, Admitted(key=AGENT))], "said again: the answer again"


def test_a_restarted_router_is_told_who_is_bound() -> None:
    relays = Relays()
    relays.bind(ROUTER, 1)
    relays.admit()
    relays.bind(AGENT, 7)
    assert relays.bind(ROUTER, 2) == [(ROUTER, PeerUp(node=AGENT, boot=7, role=Role.AGENT))]


def test_revocation_ends_a_binding() -> None:
    relays = Relays()
    relays.bind(ROUTER)
    relays.admit()
    relays.bind(AGENT)
    assert relays.tell(Revoke(key=AGENT), ROUTER) == [(ROUTER, Revoked(key=AGENT))]
    assert relays.events() == [(ROUTER, PeerDown(node=AGENT, boot=1, reason="revoked"))]
    assert relays.tell(Revoke(key=AGENT), ROUTER) == [(ROUTER, Revoked(key=AGENT))]


def test_an_end_that_the_router_could_not_hear_of_is_said_when_it_is_back() -> None:
    relays = Relays()
    relays.bind(ROUTER)
    down = PeerDown(node=AGENT, boot=1, reason="goodbye")
    relays.tell(SendFailed(ROUTER, down, "unroutable"))
    relays.tell(SendFailed(ROUTER, PeerDown(node=b"b" * 32, boot=1, reason="silent"), "peer_lost"))
    relays.tell(SendFailed(ROUTER, PeerUp(node=AGENT, boot=1, role=Role.AGENT), "unroutable"))
    assert relays.bind(ROUTER, 2) == [(ROUTER, down)]
    assert relays.bind(ROUTER, 3) == []


def test_what_is_owed_is_bounded() -> None:
    relays = Relays()
    for number in range(OWED_MAX + 9):
        node = number.to_bytes(32, "big")
        relays.tell(SendFailed(ROUTER, PeerDown(node=node, boot=1, reason="silent"), "unroutable"))
    assert len(relays.bind(ROUTER)) == OWED_MAX


def test_without_a_router_nobody_is_told() -> None:
    relays = Relays()
    assert relays.tell(NodeBound(AGENT, 1, Role.AGENT, ROUTER)) == []
    assert relays.tell(NodeGone(AGENT, 1, "silent", ROUTER)) == []


# --- several operators -------------------------------------------------------------------------------------------
def test_an_operator_admits_and_revokes_its_own_workers_only() -> None:
    relays = Relays(ROUTER, HOSTILE)
    relays.bind(ROUTER)
    relays.bind(HOSTILE)
    relays.admit()
    assert relays.bind(AGENT) == [(ROUTER, PeerUp(node=AGENT, boot=1, role=Role.AGENT))]
    for key in (AGENT, ROUTER, RELAY):
        assert relays.admit(key, HOSTILE) == []
        assert relays.tell(Revoke(key=key), HOSTILE) == [(HOSTILE, Revoked(key=key))]
    assert relays.tell(Admit(key=b"x" * 32, role=Role.ROUTER, run=NO_RUN, node_id=1), HOSTILE) == []
    assert relays.broker.admitted[AGENT].operator == ROUTER and not relays.broker.admits(b"x" * 32)
    assert [effect.text for effect in relays.rig.effects() if isinstance(effect, Log)] == [
        f"operator {HOSTILE.hex()[:16]} is refused to admit a key that is not its to admit"
    ], "said once, not as often as it tries"
    assert relays.bind(HOSTILE, 2) == [], "it hears of no worker but its own"


def test_an_operator_has_a_bounded_number_of_workers() -> None:
    relays = Relays(ROUTER, HOSTILE)
    relays.bind(HOSTILE)
    for number in range(RELAY_NODES_MAX):
        relays.admit(number.to_bytes(32, "big"), HOSTILE)
    assert relays.admit(AGENT, HOSTILE) == []
    assert relays.admit((1).to_bytes(32, "big"), HOSTILE) != [], "said again is not one more"
    relays.bind(ROUTER)
    assert relays.admit() == [(ROUTER, Admitted(key=AGENT))]


def test_workers_that_a_restarted_router_does_not_speak_of_are_out_after_a_while() -> None:
    relays = Relays()
    relays.bind(ROUTER, 1)
    for key in (AGENT, b"b" * 32):
        relays.admit(key)
    relays.bind(ROUTER, 2)
    relays.admit(AGENT)
    relays.rig.advance(RELAY_UNCONFIRMED_MS - 1)
    assert relays.broker.admits(b"b" * 32)
    relays.rig.advance(1)
    assert relays.broker.admits(AGENT) and not relays.broker.admits(b"b" * 32)


def test_what_stands_in_the_relays_own_file_needs_no_word_of_the_router() -> None:
    """A run over a relay died a minute after its start: the relay had thrown out the router itself."""
    relays = Relays()
    relays.bind(ROUTER, 1)
    relays.admit()
    relays.rig.advance(2 * RELAY_UNCONFIRMED_MS)
    assert all(relays.broker.admits(key) for key in (ROUTER, RELAY, TAP, AGENT))


# --- the state file ----------------------------------------------------------------------------------------------
def saves(relays: Relays) -> list[set[bytes]]:
    return [set(effect.args["workers"]) for effect in relays.rig.effects() if isinstance(effect, RunJob)]


@pytest.mark.spec("S1 2.6")
def test_what_is_acknowledged_is_saved_before() -> None:
    relays = Relays(persistent=True)
    relays.bind(ROUTER)
    assert relays.admit() == [] and saves(relays) == [{AGENT}]
    assert relays.admit(b"b" * 32) == [] and saves(relays) == [], "one save at a time"
    assert relays.tell(JobDone(SAVE_JOB, "", None, "")) == [(ROUTER, Admitted(key=AGENT))]
    assert saves(relays) == [{AGENT, b"b" * 32}]
    assert relays.tell(JobDone(SAVE_JOB, "", None, "")) == [(ROUTER, Admitted(key=b"b" * 32))]
    assert relays.admit() == [(ROUTER, Admitted(key=AGENT))], "nothing new to save"
    assert relays.tell(Revoke(key=AGENT), ROUTER) == [] and saves(relays) == [{b"b" * 32}]
    assert relays.tell(JobDone(SAVE_JOB, "", None, "")) == [(ROUTER, Revoked(key=AGENT))]


def test_what_cannot_be_saved_is_not_acknowledged() -> None:
    relays = Relays(persistent=True)
    relays.bind(ROUTER)
    relays.admit()
    saves(relays)
    assert relays.tell(JobDone(SAVE_JOB, "", None, "No space left on device")) == []
    assert relays.rig.effects() == [Log("error", "No space left on device")]
    assert relays.admit() == [] and saves(relays) == [{AGENT}], "asked again it tries again"


def test_it_ends_with_its_owner_or_a_signal() -> None:
    for event in (OwnerGone(), StopSignal("SIGTERM", 1)):
        relays = Relays()
        relays.tell(event)
        assert relays.rig.effects() == [Exit(0)]
