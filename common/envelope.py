"""The envelope: a positional header, then the body left raw until its type is known (design.md 3).

One ZeroMQ frame holds one envelope. Brokers read the header alone; they forward types they do not know.
"""

from __future__ import annotations

import msgspec

from common.addresses import U32, U64, ActorAddress, NodeKey, RunNonce

ENVELOPE_VERSION = 1


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`v, tag, id, run, src_node, src_boot, src, dst_node, dst_boot, dst, corr, plane_seq, base, ack`, then `body`.

    `src_boot` and `dst_boot` name the incarnations between which a session lives (0 = unknown);
    `plane_seq` is 0 for a datagram, else the position in the session; `base` is the lowest position that the
    sender still retains (a receiver never waits for one below it); `ack` is the highest position received in
    order from the destination. `id` is unique per (src_node, src_boot); `corr` repeats the id that caused this.
    """

    v: int
    tag: U32
    id: U64
    run: RunNonce
    src_node: NodeKey
    src_boot: U64
    src: ActorAddress
    dst_node: NodeKey
    dst_boot: U64
    dst: ActorAddress
    corr: U64
    plane_seq: U64
    base: U64
    ack: U64
    body: msgspec.Raw


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The envelope's first 14 slots: what a broker decodes. Trailing slots (the body) are ignored."""

    v: int
    tag: U32
    id: U64
    run: RunNonce
    src_node: NodeKey
    src_boot: U64
    src: ActorAddress
    dst_node: NodeKey
    dst_boot: U64
    dst: ActorAddress
    corr: U64
    plane_seq: U64
    base: U64
    ack: U64
