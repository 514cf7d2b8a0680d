"""A peer on raw sockets that may say anything: what a hostile holder of an admitted key can do, and what it hears."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from common.addresses import NO_RUN, Plane
from common.bus import Bus, Dealers, KeyPair
from common.codec import Message, decode_body, decode_envelope, encode_body, encode_envelope, tag_of
from common.envelope import ENVELOPE_VERSION, Envelope
from common.messages.bus import Hello, Welcome


class RawPeer:
    """Bound on every plane when made; heard: (plane, whom it says that it is from, message) of all but Welcome."""

    def __init__(self, endpoints: Mapping[Plane, str], broker_key: bytes, keys: KeyPair, boot: int = 1) -> None:
        self.key, self._broker, self._boot = keys.public, broker_key, boot
        self._bus = Bus()
        self._dealers = Dealers(self._bus, endpoints, broker_key, keys)
        self._id = 0
        self.heard: list[tuple[Plane, bytes, Message]] = []
        self.welcomes: dict[Plane, Welcome] = {}
        until = time.monotonic() + 60
        while len(self.welcomes) < len(endpoints):
            assert time.monotonic() < until, f"only {sorted(self.welcomes)} were welcomed"
            for plane in endpoints:
                if plane not in self.welcomes:
                    self.say(plane, Hello(boot=boot, logical_id="raw"), broker_key)
            self.listen(0.3)

    def say(
        self, plane: Plane, message: Message, to: bytes, *, source: bytes = b"", to_boot: int = 0, sequence: int = 0
    ) -> None:
        """One envelope; source: whose name to use instead of the own."""
        self._id += 1
        me = source or self.key
        body = msgspec.Raw(encode_body(message))
        tag, where = tag_of(type(message)), (me, self._boot, me, to, to_boot, to)
        self._dealers.send(
            plane,
            encode_envelope(Envelope(ENVELOPE_VERSION, tag, self._id, NO_RUN, *where, 0, sequence, sequence, 0, body)),
        )

    def listen(self, seconds: float) -> list[Message]:
        """What comes within this time."""
        before = len(self.heard)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._bus.poller.poll(left * 1000)
            self._dealers.receive(self._take)
        return [message for _, _, message in self.heard[before:]]

    def _take(self, plane: Plane, data: bytes) -> None:
        envelope = decode_envelope(data)
        message = decode_body(envelope.tag, envelope.body)
        if isinstance(message, Welcome):
            self.welcomes[plane] = message
        else:
            self.heard.append((plane, envelope.src_node, message))

    def close(self) -> None:
        """Without a goodbye."""
        self._dealers.close()
        self._bus.close()
