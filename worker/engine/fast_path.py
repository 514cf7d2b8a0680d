"""A decode step between two sockets without Python on the way: the calling side of cpu/fast_path.h.

On a hop the interpreter costs more than the sockets (0.3 of 0.4 ms, measured: between two tokens the weights have
swept it out of the caches). So all that Python decides is decided while the stage waits, as a Forecast; the kernels
carry it out if exactly that happens, and Python does the same afterwards, while another stage computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from common.edge_records import FLAGS_AT, HEADER_BYTES, Record
from common.edges.port import Way
from common.limits import EDGE_CHUNK_BYTES
from common.local_edges import FRAME_HEAD_BYTES
from worker.engine.cpu_native import FAST_PATH, Control, Kernels

_DEPARTURES_MAX = 2
_SENT = 2


@dataclass(frozen=True, slots=True)
class Departing:
    """A record that the step will give, its payload aside. For a token that ends the sequence: tells_end: it gets the
    END flag; stays_at_end: it does not leave."""

    edge_id: int
    record: Record
    tells_end: bool = False
    stays_at_end: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """The next decode step of a stage: what comes over which edge, and what leaves, the most urgent first. position: of
    its row; is_greedy: the token is the most likely one."""

    edge_id: int
    record: Record
    departing: tuple[Departing, ...]
    position: int
    is_token: bool
    is_greedy: bool = False
    end_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has happened. data: all that was read; computed: it was the record that was foretold, and its result waits
    in the model; sent: frames that left, with what became of each; times in monotonic nanoseconds."""

    data: bytes
    computed: bool
    sent: tuple[tuple[Way, bytes, int], ...]
    arrived_ns: int
    left_ns: int


class _Departure(ctypes.Structure):
    _fields_ = (
        ("frame", ctypes.c_uint64),
        ("fd", ctypes.c_int64),
        ("payload_at", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("flags_at", ctypes.c_int64),
        ("skipped_at_end", ctypes.c_int64),
        ("sent", ctypes.c_int64),
    )


class _FastPath(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("wake_fd", "watch_fd", "in_fd")),
        ("into", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("in_room", "in_bytes")),
        ("expected", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("expected_bytes", "payload_bytes")),
        ("sums", ctypes.c_uint64),
        ("step", ctypes.c_uint64 * 8),
        *((name, ctypes.c_int64) for name in ("position", "is_token", "vocabulary", "has_head", "is_greedy")),
        ("end_ids", ctypes.c_uint64),
        ("end_count", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("outcome", "is_computing", "arrived_ns", "left_ns", "departures")),
        ("departure", _Departure * _DEPARTURES_MAX),
    )


@cache
def _sum_tables() -> npt.NDArray[np.uint32]:
    """CRC-32 of a byte with 0 to 7 bytes behind it, (8, 256)."""
    tables = np.zeros((8, 256), np.uint32)
    tables[0] = np.arange(256)
    for _ in range(8):
        tables[0] = (tables[0] >> 1) ^ np.where(tables[0] & 1, np.uint32(0xEDB88320), np.uint32(0))
    for i in range(1, 8):
        tables[i] = (tables[i - 1] >> 8) ^ tables[0][tables[i - 1] & 255]
    return tables


class FastPath:
    """Of one model part. `step`: the eight buffers of its captured step; they belong to the part."""

    def __init__(self, kernels: Kernels, step: Sequence[int], vocabulary: int, has_head: bool) -> None:
        self._kernels = kernels
        self._in = np.zeros(4 * EDGE_CHUNK_BYTES, np.uint8)
        self._block = block = _FastPath()
        block.into, block.in_room = self._in.ctypes.data, len(self._in)
        block.sums = _sum_tables().ctypes.data
        block.step[:] = step
        block.vocabulary, block.has_head = vocabulary, has_head
        self._control = Control.private()
        self._control.head[0] = FAST_PATH
        self._control.args[0] = ctypes.addressof(block)
        self.pending: int | None = None
        """The position of a row that was computed and that nobody has asked for."""

    def take(self) -> int | None:
        """The pending position: its result is about to be used."""
        position, self.pending = self.pending, None
        return position

    @property
    def is_computing(self) -> bool:
        """From any thread: it does not wait, it works."""
        return bool(self._block.is_computing)

    def wait(
        self, forecast: Forecast, way_in: Way, ways_out: Sequence[Way], wake_descriptor: int, watch_descriptor: int
    ) -> Outcome:
        """Wait until either descriptor is readable or a signal came; do what is foretold if it is that. The GIL is
        released meanwhile."""
        block = self._block
        payload_bytes = len(forecast.record.payload)
        head_bytes = len(way_in.frame) - FRAME_HEAD_BYTES - payload_bytes
        head = np.frombuffer(way_in.frame, np.uint8, head_bytes, FRAME_HEAD_BYTES)
        ends = np.array(sorted(forecast.end_ids), np.int64)
        block.wake_fd, block.watch_fd, block.in_fd = wake_descriptor, watch_descriptor, way_in.descriptor
        block.expected, block.expected_bytes, block.payload_bytes = head.ctypes.data, len(head), payload_bytes
        block.position, block.is_token, block.is_greedy = forecast.position, forecast.is_token, forecast.is_greedy
        block.end_ids, block.end_count = ends.ctypes.data, len(ends)
        frames = [np.frombuffer(bytearray(way.frame), np.uint8) for way in ways_out]
        block.departures = len(frames)
        for slot, frame, way, leaving in zip(block.departure, frames, ways_out, forecast.departing, strict=False):
            slot.frame, slot.fd, slot.bytes = frame.ctypes.data, way.descriptor, len(frame)
            slot.payload_at = len(frame) - len(leaving.record.payload)
            slot.flags_at = slot.payload_at - HEADER_BYTES + FLAGS_AT if leaving.tells_end else 0
            slot.skipped_at_end = leaving.stays_at_end
        self._kernels.call(self._control)
        sent = [
            (way, frame.tobytes(), slot.sent)
            for way, frame, slot in zip(ways_out, frames, block.departure, strict=False)
            if block.outcome == _SENT and slot.sent
        ]
        computed = block.outcome > 0
        if computed:
            self.pending = forecast.position
        data = self._in[: block.in_bytes].tobytes()
        return Outcome(data, computed, tuple(sent), block.arrived_ns, block.left_ns)
