"""Bus: joining a broker, addresses, views, and what a broker says when it cannot deliver (design.md 3, S1 6.1, 6.2)."""

from __future__ import annotations

from typing import ClassVar

from common.addresses import BROKERS, U64, ActorAddress, NodeKey, Role, RunNonce
from common.codec import Message


class Hello(Message, frozen=True, kw_only=True, tag=1):
    """Node → its broker, per connection and plane, a datagram; answered by Welcome; repeated each 250 ms until then.

    logical_id: the name shown to people ("provisioner", "node 1"); the role itself comes from the key's admission.
    """

    DATAGRAM: ClassVar[bool] = True
    boot: U64
    logical_id: str
    protocol: int = 1


class Welcome(Message, frozen=True, kw_only=True, tag=2):
    """Broker → node, the answer to Hello: the connection is bound. A changed boot means that soft state is gone."""

    DATAGRAM: ClassVar[bool] = True
    FROM: ClassVar[frozenset[Role]] = BROKERS
    broker_key: NodeKey
    broker_boot: U64
    router_key: NodeKey
    router_boot: U64


class Reintroduce(Message, frozen=True, kw_only=True, tag=3):
    """Broker → an unbound connection that said anything but Hello; answered by Hello. The message is dropped."""

    DATAGRAM: ClassVar[bool] = True
    FROM: ClassVar[frozenset[Role]] = BROKERS


class Goodbye(Message, frozen=True, kw_only=True, tag=4):
    """Node → broker, a datagram, when it leaves: its bindings and routes go at once."""

    DATAGRAM: ClassVar[bool] = True


class Ping(Message, frozen=True, kw_only=True, tag=5):
    """Node → broker each second and plane, a datagram; answered by Pong. Silence rebuilds the connection."""

    DATAGRAM: ClassVar[bool] = True


class Pong(Message, frozen=True, kw_only=True, tag=6):
    """Broker → node, the answer to Ping."""

    DATAGRAM: ClassVar[bool] = True
    FROM: ClassVar[frozenset[Role]] = BROKERS
    broker_boot: U64
    router_boot: U64


class Ack(Message, frozen=True, kw_only=True, tag=7):
    """Receiver → sender of a session, a datagram: only the header's ack and boots matter. Never answered."""

    DATAGRAM: ClassVar[bool] = True


class Unsupported(Message, frozen=True, kw_only=True, tag=8):
    """Receiver → sender: the tag of message `corr` is unknown here. The sender's actor gets a SendFailed."""

    DATAGRAM: ClassVar[bool] = True
    unknown_tag: int


class Undeliverable(Message, frozen=True, kw_only=True, tag=9):
    """Broker → sender, a datagram: message `corr` could not be forwarded. The session holds and retries for 5 s.

    reason: "unbound" (nobody by that key is here), "refused" (role or source), "full" (the peer does not read).
    """

    DATAGRAM: ClassVar[bool] = True
    FROM: ClassVar[frozenset[Role]] = BROKERS
    reason: str
    dst_node: bytes = b""


class StaleRoute(Message, frozen=True, kw_only=True, tag=10):
    """Router → sender, a datagram: the stamp of message `corr` contradicts the route view; owner is the newer one."""

    DATAGRAM: ClassVar[bool] = True
    FROM: ClassVar[frozenset[Role]] = frozenset({Role.ROUTER})
    address: ActorAddress
    owner: bytes = b""


class Register(Message, frozen=True, kw_only=True, tag=11):
    """Node → router: this node hosts `address`. Repeated for every actor when router_boot changes.

    name: the well-known name of a service's main actor; the router takes it only if it equals the key's role.
    """

    address: ActorAddress
    boot: U64
    generation: U64
    name: str = ""


class Unregister(Message, frozen=True, kw_only=True, tag=12):
    """Node → router: the actor stopped; its route goes."""

    address: ActorAddress
    generation: U64


class RouteEntry(Message, frozen=True, kw_only=True, tag=13):
    """An item of the view "routes": who owns an actor address (S1 6.2: route_owner)."""

    address: ActorAddress
    node: NodeKey
    boot: U64
    generation: U64
    role: Role
    name: str = ""


class PathEntry(Message, frozen=True, kw_only=True, tag=14):
    """An item of the view "paths": whether `broker` reaches `next_hop` now (a SWIM clock pauses while not)."""

    broker: NodeKey
    next_hop: NodeKey
    up: bool


class MemberEntry(Message, frozen=True, kw_only=True, tag=15):
    """An item of the view "members": what SWIM says of one incarnation of a node (S1 7.7).

    state: "alive" | "suspect" | "dead" | "left"; reason: why it came to be so.
    """

    node: NodeKey
    boot: U64
    logical_id: str
    role: Role
    state: str
    incarnation: U64
    reason: str = ""
    metadata: dict[str, str] = {}


class NameEntry(Message, frozen=True, kw_only=True, tag=16):
    """An item of the view "names": a registered name (S2 6.2), newest (timestamp, generation, node) wins."""

    name: str
    address: ActorAddress
    node: NodeKey


ViewItem = RouteEntry | PathEntry | MemberEntry | NameEntry


class Watch(Message, frozen=True, kw_only=True, tag=17):
    """Any actor → the publisher of a view: answered by one Snapshot, then Deltas until Unwatch or the watcher's end.

    view: "routes" | "paths" (router), "members" | "names" (membership). A version gap is healed by a new Watch.
    """

    view: str


class Snapshot(Message, frozen=True, kw_only=True, tag=18):
    """Publisher → watcher: the whole view at `version`."""

    view: str
    version: U64
    items: list[ViewItem]


class Delta(Message, frozen=True, kw_only=True, tag=19):
    """Publisher → watcher: what changed from version - 1 to `version`; `removed` holds the keys of items that went.

    reason: why they went: "goodbye", "revoked", "superseded" (by a newer incarnation), "unregistered", "" (not said).
    """

    view: str
    version: U64
    changed: list[ViewItem] = []
    removed: list[bytes] = []
    reason: str = ""


class Admit(Message, frozen=True, kw_only=True, tag=20):
    """Provisioner → router, router → relay: this key may join as `role`. Answered by Admitted; repeated until then."""

    FROM: ClassVar[frozenset[Role]] = frozenset({Role.PROVISIONER, Role.ROUTER})
    key: NodeKey
    role: Role
    run: RunNonce
    node_id: U64
    stage_index: U64 = 0
    logical_id: str = ""


class Admitted(Message, frozen=True, kw_only=True, tag=21):
    """Router → provisioner, relay → router: the key is admitted (at every broker that needs to know)."""

    FROM: ClassVar[frozenset[Role]] = BROKERS
    key: NodeKey


class Revoke(Message, frozen=True, kw_only=True, tag=22):
    """Provisioner → router, router → relay: the key is out, its live connections go deaf. Answered by Revoked."""

    FROM: ClassVar[frozenset[Role]] = frozenset({Role.PROVISIONER, Role.ROUTER})
    key: NodeKey


class Revoked(Message, frozen=True, kw_only=True, tag=23):
    """Router → provisioner, relay → router: the answer to Revoke."""

    FROM: ClassVar[frozenset[Role]] = BROKERS
    key: NodeKey


class PeerUp(Message, frozen=True, kw_only=True, tag=24):
    """Relay → router: a node is bound here; repeated for all after a router restart."""

    FROM: ClassVar[frozenset[Role]] = frozenset({Role.RELAY})
    node: NodeKey
    boot: U64
    role: Role


class PeerDown(Message, frozen=True, kw_only=True, tag=25):
    """Relay → router: the node said Goodbye, was revoked or went silent."""

    FROM: ClassVar[frozenset[Role]] = frozenset({Role.RELAY})
    node: NodeKey
    boot: U64
    reason: str


class NoSuchActor(Message, frozen=True, kw_only=True, tag=26):
    """Receiving node → sender's node, a datagram: message `corr` came to an actor that is not (any more) here."""

    DATAGRAM: ClassVar[bool] = True
    address: ActorAddress
