"""A datagram: one envelope outside of any session (plane_seq and base 0), for link messages, SWIM and leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from common.addresses import NO_RUN
from common.codec import Message, encode_body, encode_envelope, tag_of
from common.envelope import ENVELOPE_VERSION, Envelope

if TYPE_CHECKING:
    from common.node import Identity


def datagram_frame(
    identity: Identity,
    node: bytes,
    message: Message,
    *,
    id: int,
    run: bytes = NO_RUN,
    src: bytes = b"",
    dst: bytes = b"",
    dst_boot: int = 0,
    corr: int = 0,
    ack: int = 0,
) -> bytes:
    """The frame. src and dst default to the mailboxes of the two nodes."""
    return encode_envelope(
        Envelope(
            ENVELOPE_VERSION,
            tag_of(type(message)),
            id,
            run,
            identity.key,
            identity.boot,
            src or identity.key,
            node,
            dst_boot,
            dst or node,
            corr,
            0,
            0,
            ack,
            msgspec.Raw(encode_body(message)),
        )
    )
