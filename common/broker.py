"""The broker core: bindings, admission and the forwarding rules of design.md 3. Router and relay are its deployments.

It decodes headers only, keeps no queue and guarantees nothing: reliability is the sessions' business. Pure: frames in,
(target, verdict) out, so that the hot path makes one tuple and no effect objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from common.addresses import BROKERS, NO_RUN, Plane, Role
from common.codec import (
    BadEnvelope,
    Message,
    catalogue,
    decode_body,
    decode_envelope,
    decode_header,
    encode_body,
    tag_of,
)
from common.envelope import ENVELOPE_VERSION, Envelope, Header
from common.limits import BROKER_SILENT_MS
from common.messages.bus import (
    Goodbye,
    Hello,
    Ping,
    Pong,
    Reintroduce,
    StaleRoute,
    Undeliverable,
    Welcome,
)

GOODBYE_MS = 2000  # for the Goodbyes on the other planes, which a full plane may drop
HELLO, GOODBYE, PING = tag_of(Hello), tag_of(Goodbye), tag_of(Ping)
LOCAL = b"\x00local"
"""Target: the broker's own node."""
UPLINK = b"\x00uplink"
"""Target: the other broker (the router's DEALER to the relay)."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What a key may be; the run fields are for people and for worker keys.

    operator: at a relay, the router whose node this is (empty for a router itself): nodes reach only that router and
    its other nodes.
    """

    role: Role
    run: bytes = NO_RUN
    node_id: int = 0
    logical_id: str = ""
    operator: bytes = b""


def static_admissions(role: Role, allow: Mapping[bytes, Role]) -> dict[bytes, Admission]:
    """Whom a broker of this role lets in by its bus file; of a relay with one operator, all are that operator's."""
    routers = [peer for peer, peer_role in allow.items() if peer_role is Role.ROUTER]
    operator = routers[0] if len(routers) == 1 and role is not Role.ROUTER else b""
    return {peer: Admission(peer_role, logical_id=peer_role, operator=operator) for peer, peer_role in allow.items()}


@dataclass(frozen=True, slots=True)
class NodeBound:
    """Event for the broker's own actor: a node said Hello with this boot. operator: whose node it is."""

    key: bytes
    boot: int
    role: Role
    operator: bytes = b""


@dataclass(frozen=True, slots=True)
class NodeGone:
    """Event for the broker's own actor. reason: "goodbye" | "revoked" | "silent". operator: whose node it was."""

    key: bytes
    boot: int
    reason: str
    operator: bytes = b""


Verdict = str
"""forwarded | local | unbound | refused | reintroduce | bad | stale; the shell adds full and gone after the send."""


class Broker:
    """One deployment. `admitted` alone says what a key may do; it is checked with (tag, role) on each message."""

    def __init__(self, key: bytes, boot: int, role: Role, admitted: Mapping[bytes, Admission]) -> None:
        self.key, self.boot, self.role = key, boot, role
        self.passed: Counter[tuple[Plane, str]] = Counter()
        """Envelopes by plane and verdict, as the tap would show them."""
        self.routers: dict[bytes, int] = {key: boot} if role is Role.ROUTER else {}
        """Router → boot: the own one, or every operator's that has said Hello to this relay."""
        self.admitted: dict[bytes, Admission] = dict(admitted)
        self.owners: dict[bytes, bytes] = {}
        """The router's route view, actor → node: rule 6. Empty at a relay."""
        self.beyond: set[bytes] = set()
        """Nodes that the other broker lists (router: nodes at the relay): rule 5."""
        self.out: list[tuple[bytes, Plane, bytes]] = []
        """Frames of the broker's own: (conn, plane, data)."""
        self.events: list[NodeBound | NodeGone] = []
        self._conn_of: dict[tuple[Plane, bytes], bytes] = {}
        self._key_of: dict[tuple[Plane, bytes], bytes] = {}
        self.relay_key = b""
        """The router's relay, the only one that speaks for itself over the uplink."""
        self._boot_of: dict[bytes, int] = {}
        self._leaving: dict[bytes, int] = {}
        self._heard_ms: dict[bytes, int] = {}
        self._senders: dict[int, frozenset[Role]] = {tag: cls.FROM for tag, cls in catalogue().items()}
        self._sequence = 0

    # --- admission --------------------------------------------------------------------------------------------
    def admits(self, key: bytes) -> bool:
        """ZAP's question."""
        return key in self.admitted

    def admit(self, key: bytes, admission: Admission) -> None:
        """Let a key in."""
        self.admitted[key] = admission

    def revoke(self, key: bytes) -> None:
        """Out, at once: libzmq keeps an established connection, so its bindings go here (anchors.md A5-4)."""
        if key in self.admitted:
            operator = self.operator_of(key)
            del self.admitted[key]
            self._forget(key, "revoked", operator)

    def _unbind(self, plane: Plane, key: bytes) -> None:
        if conn := self._conn_of.pop((plane, key), None):
            self._key_of.pop((plane, conn), None)

    def lost(self, plane: Plane, conn: bytes) -> None:
        """The shell found no such connection any more: who sends there is told from now on, not silently dropped."""
        if (key := self._key_of.pop((plane, conn), None)) is not None:
            self._conn_of.pop((plane, key), None)

    def _may_leave(self, plane: Plane, peer: bytes, header: Header) -> bool:
        """A node's last word may come behind the news that its connection is no more, which has unbound it."""
        same = header.src_node == peer and header.src_boot == self._boot_of.get(peer)
        return same and (plane, peer) not in self._conn_of

    def knows(self, key: bytes) -> bool:
        """Whether a node has said Hello, and nothing has ended it since."""
        return key in self._boot_of

    def _goodbye(self, plane: Plane, key: bytes, now_ms: int) -> None:
        """One a plane: what the node said on the others before it left may still be on its way."""
        if plane is not Plane.CONTROL:
            self._unbind(plane, key)
            return
        others = {lane: conn for lane in Plane if lane is not plane and (conn := self._conn_of.get((lane, key)))}
        self._forget(key, "goodbye")
        for lane, conn in others.items():
            self._conn_of[lane, key] = conn
            self._key_of[lane, conn] = key
        if others:
            self._leaving[key] = now_ms

    def _forget(self, key: bytes, reason: str, operator: bytes = b"") -> None:
        for plane in Plane:
            self._unbind(plane, key)
        self._heard_ms.pop(key, None)
        self._leaving.pop(key, None)
        if (boot := self._boot_of.pop(key, None)) is not None:
            self.events.append(NodeGone(key, boot, reason, operator or self.operator_of(key)))

    def bound(self) -> list[NodeBound]:
        """Every node bound here, for a router that starts anew."""
        return [
            NodeBound(key, boot, self.admitted[key].role, self.operator_of(key))
            for key, boot in self._boot_of.items()
            if key in self.admitted
        ]

    def operator_of(self, key: bytes) -> bytes:
        """The router whose node an admitted key is; of a router, itself."""
        if self.role is Role.ROUTER:
            return self.key
        admission = self.admitted[key]
        return key if admission.role is Role.ROUTER else admission.operator

    def is_bound(self, plane: Plane, conn: bytes) -> bool:
        """Whether this connection has said Hello: then its key need not be read again."""
        return (plane, conn) in self._key_of

    def tick(self, now_ms: int) -> None:
        """Forget nodes that have been silent on the control plane, and what is left of those that said Goodbye."""
        for key, since in list(self._leaving.items()):
            if now_ms - since > GOODBYE_MS:
                self._forget(key, "goodbye")
        for key, heard in list(self._heard_ms.items()):
            if now_ms - heard > BROKER_SILENT_MS:
                self._forget(key, "silent")

    # --- frames -----------------------------------------------------------------------------------------------
    def on_frame(
        self, plane: Plane, conn: bytes, key: Callable[[], bytes], data: bytes, now_ms: int
    ) -> tuple[bytes | None, Verdict]:
        """A frame of a connection. key: reads its CURVE key of the handshake, asked only while it is unbound.

        Returns (target, verdict): target is a connection on the same plane, LOCAL, UPLINK or None for a drop.
        """
        try:
            header = decode_header(data)
        except BadEnvelope:
            return None, "bad"
        source = self._key_of.get((plane, conn))
        if source is None:
            peer = key()
            if header.tag == HELLO:
                return self._hello(plane, conn, peer, data, now_ms)
            if header.tag == GOODBYE and self._may_leave(plane, peer, header):
                self._goodbye(plane, peer, now_ms)
                return None, "local"
            if self.admits(peer):
                self._reply(conn, plane, peer, Reintroduce(), header.id)
            return None, "reintroduce"
        admission = self.admitted[source]
        if plane is Plane.CONTROL:
            self._heard_ms[source] = now_ms
        if header.src_node != source and admission.role not in BROKERS:
            return self._undeliverable(conn, plane, header, source, "refused")
        allowed = self._senders.get(header.tag)
        if allowed is not None and header.src_node == source and admission.role not in allowed:
            return self._undeliverable(conn, plane, header, source, "refused")
        if header.dst_node == self.key:
            if header.src_node != source:
                # What a router passes on is for nodes. In another operator's name it would be obeyed here.
                return self._undeliverable(conn, plane, header, source, "refused")
            if header.tag == HELLO:
                return self._hello(plane, conn, source, data, now_ms)
            if header.tag == PING:
                self._reply(conn, plane, source, self._pong(source), header.id)
                return None, "local"
            if header.tag == GOODBYE:
                self._goodbye(plane, source, now_ms)
                return None, "local"
            return LOCAL, "local"
        # Over a broker's connection comes what others sent: an answer goes to them, by the same way.
        return self._forward(conn, plane, header, header.src_node, source)

    def from_uplink(self, plane: Plane, data: bytes) -> tuple[bytes | None, Verdict]:
        """A frame that the other broker forwarded to this one (router: from the relay)."""
        try:
            header = decode_header(data)
        except BadEnvelope:
            return None, "bad"
        if header.src_node != self.relay_key:
            # A relay may run elsewhere: what comes through it can only be from a worker that this router admitted.
            admission = self.admitted.get(header.src_node)
            allowed = self._senders.get(header.tag)
            if admission is None:
                # Not admitted yet by a router that has just restarted: the worker tries again.
                return self._undeliverable(UPLINK, plane, header, header.src_node, "unbound")
            if admission.role is not Role.AGENT or (allowed is not None and Role.AGENT not in allowed):
                return self._undeliverable(UPLINK, plane, header, header.src_node, "refused")
        if header.dst_node == self.key:
            return LOCAL, "local"
        return self._forward(UPLINK, plane, header, header.src_node, self.relay_key)

    def from_local(self, plane: Plane, data: bytes) -> tuple[bytes | None, Verdict]:
        """A frame of the broker's own node."""
        header = decode_header(data)
        if header.dst_node == self.key:
            return LOCAL, "local"
        return self._forward(LOCAL, plane, header, self.key, self.key)

    def _forward(
        self, conn: bytes, plane: Plane, header: Header, answer_to: bytes, source: bytes
    ) -> tuple[bytes | None, Verdict]:
        """source: the key whose connection it came over, whoever it says that it is from."""
        owner = self.owners.get(header.dst)
        if owner is not None and owner != header.dst_node and header.dst != header.dst_node:
            self._reply(conn, plane, answer_to, StaleRoute(address=header.dst, owner=owner), header.id)
            return None, "stale"
        target = self._conn_of.get((plane, header.dst_node))
        if self.role is Role.RELAY and source != self.key:
            operator = self.operator_of(source)
            if target is not None and self.operator_of(header.dst_node) == operator:
                return target, "forwarded"
            # Another operator's node is as unknown here as one that does not exist.
            uplink = self._conn_of.get((plane, operator))
            if uplink is not None and uplink != conn:
                return uplink, "forwarded"
        elif target is not None:
            return target, "forwarded"
        elif header.dst_node in self.beyond and conn is not UPLINK:
            return UPLINK, "forwarded"
        return self._undeliverable(conn, plane, header, answer_to, "unbound")

    def _undeliverable(
        self, conn: bytes, plane: Plane, header: Header, source: bytes, reason: str
    ) -> tuple[bytes | None, Verdict]:
        if header.plane_seq:
            self._reply(conn, plane, source, Undeliverable(reason=reason, dst_node=header.dst_node), header.id)
        return None, reason

    def _hello(self, plane: Plane, conn: bytes, key: bytes, data: bytes, now_ms: int) -> tuple[bytes | None, Verdict]:
        admission = self.admitted.get(key)
        if admission is None:
            return None, "refused"
        try:
            envelope = decode_envelope(data)
            hello = decode_body(envelope.tag, envelope.body)
        except BadEnvelope:
            return None, "bad"
        if envelope.src_node != key or not isinstance(hello, Hello):
            return None, "refused"
        known = self._boot_of.get(key, 0)
        if hello.boot < known:
            return None, "stale"
        if (older := self._conn_of.get((plane, key))) is not None:
            self._key_of.pop((plane, older), None)
        self._conn_of[plane, key] = conn
        self._key_of[plane, conn] = key
        self._leaving.pop(key, None)
        operator = self.operator_of(key)
        if self.role is Role.RELAY and admission.role is Role.ROUTER:
            self.routers[key] = hello.boot
        elif operator not in self.routers:
            # A Welcome names the router; before it is here, the node asks again in 250 ms.
            self._conn_of.pop((plane, key))
            self._key_of.pop((plane, conn))
            return None, "refused"
        if plane is Plane.CONTROL:
            self._heard_ms[key] = now_ms
        if hello.boot != known:
            # What an older incarnation bound on other planes is as dead as it is.
            for other in Plane:
                if other is not plane:
                    self._unbind(other, key)
            self._boot_of[key] = hello.boot
            self.events.append(NodeBound(key, hello.boot, admission.role, operator))
        welcome = Welcome(
            broker_key=self.key,
            broker_boot=self.boot,
            router_key=operator,
            router_boot=self.routers[operator],
        )
        self._reply(conn, plane, key, welcome, envelope.id)
        return None, "local"

    def _pong(self, key: bytes) -> Pong:
        return Pong(broker_boot=self.boot, router_boot=self.routers.get(self.operator_of(key), 0))

    def _reply(self, conn: bytes, plane: Plane, to: bytes, message: Message, corr: int) -> None:
        """A datagram of the broker itself; src_boot 0 tells it from the traffic of the broker's own node."""
        self._sequence += 1
        envelope = Envelope(
            ENVELOPE_VERSION,
            tag_of(type(message)),
            self._sequence,
            NO_RUN,
            self.key,
            0,
            self.key,
            to,
            0,
            to,
            corr,
            0,
            0,
            0,
            msgspec.Raw(encode_body(message)),
        )
        self.out.append((conn, plane, msgspec.msgpack.encode(envelope)))

    def check(self) -> None:
        """Invariants: both binding tables mirror each other, and only admitted keys are bound."""
        assert len(self._conn_of) == len(self._key_of)
        for (plane, key), conn in self._conn_of.items():
            assert self._key_of.get((plane, conn)) == key and key in self.admitted
