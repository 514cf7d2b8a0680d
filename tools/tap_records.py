"""What a tap says, decoded for people: msgpack-python alone reads the bytes, so that the codec cannot hide its own
mistakes; only the tag → name table comes from the catalogue. Whatever the bytes are, nothing here raises."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack

from common.addresses import Plane
from common.codec import catalogue

REDACTED = "<redacted>"
HEADER_SLOTS = 14
BYTES_SHOWN = 8
NAMES_MAX = 4096
_UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OverflowError,
    RecursionError,
    MemoryError,
    msgpack.UnpackException,
)


@dataclass(slots=True)
class Line:
    """One tap record. bad: why the frame is no envelope, else the rest is filled."""

    broker: str
    wall_ms: int
    plane: str
    direction: str
    verdict: str
    size: int
    bad: str = ""
    tag: int = 0
    type: str = ""
    id: int = 0
    corr: int = 0
    run: bytes = b""
    src_node: bytes = b""
    src: bytes = b""
    dst_node: bytes = b""
    dst: bytes = b""
    seq: int = 0
    ack: int = 0
    body: Any = field(default_factory=dict)


def parse(broker: str, record: bytes) -> Line:
    """The line of a record; one with `bad` for what is none."""
    try:
        wall_ms, plane, direction, verdict, frame = _unpack(record)
        if not isinstance(frame, bytes) or isinstance(wall_ms, bool) or not isinstance(wall_ms, int):
            raise TypeError("wrong types")
        line = Line(broker, wall_ms, _plane(plane), str(direction), str(verdict), len(frame))
    except _UNREADABLE as error:
        return Line(broker, 0, "?", "?", "?", len(record), bad=f"no tap record: {_why(error)}")
    try:
        _envelope(line, _unpack(frame))
    except _UNREADABLE as error:
        line.bad = _why(error)
    return line


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False, unicode_errors="replace", use_list=True)


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _plane(number: Any) -> str:
    try:
        return Plane(number).name.lower()
    except ValueError:
        return "?"


def _envelope(line: Line, slots: Any) -> None:
    if not isinstance(slots, list) or len(slots) <= HEADER_SLOTS:
        raise ValueError("no envelope: not an array of 15")
    _v, tag, id_, run, src_node, _boot, src, dst_node, _dst_boot, dst, corr, seq, _base, ack, body = slots[:15]
    numbers, keys = (tag, id_, corr, seq, ack), (run, src_node, src, dst_node, dst)
    if not all(isinstance(number, int) for number in numbers) or not all(isinstance(key, bytes) for key in keys):
        raise ValueError("no envelope: a header slot has the wrong type")
    line.tag, line.id, line.corr, line.seq, line.ack = numbers
    line.run, line.src_node, line.src, line.dst_node, line.dst = keys
    known = catalogue().get(line.tag)
    line.type = known.__name__ if known is not None else f"?{line.tag}"
    line.body = {key: value for key, value in body.items() if key != "t"} if isinstance(body, dict) else body


# --- names -----------------------------------------------------------------------------------------------------
class Names:
    """Who is behind a key or an address, learnt from what passes: Hello, Register, routes and members."""

    def __init__(self) -> None:
        self._names: OrderedDict[bytes, str] = OrderedDict()

    def learn(self, line: Line) -> None:
        """Take what this envelope says about names."""
        body = line.body
        if line.bad or not isinstance(body, dict):
            return
        if line.type == "Hello":
            self._set(line.src_node, body.get("logical_id"))
        elif line.type == "Welcome":
            self._set(body.get("router_key"), "router")
            if body.get("broker_key") != body.get("router_key"):
                self._set(body.get("broker_key"), "relay")
        elif line.type == "Register":
            self._set(body.get("address"), body.get("name"))
        elif line.type in ("Snapshot", "Delta"):
            for item in _dicts(body.get("items")) + _dicts(body.get("changed")):
                self._set(item.get("address"), item.get("name"))
                self._set(item.get("node"), item.get("logical_id"))
                if item.get("role") not in (None, "agent"):
                    self._set(item.get("node"), item.get("role"))

    def _set(self, key: Any, name: Any) -> None:
        if isinstance(key, bytes) and key and isinstance(name, str) and name:
            self._names[key] = name[:64]
            self._names.move_to_end(key)
            if len(self._names) > NAMES_MAX:
                self._names.popitem(last=False)

    def of(self, node: bytes, address: bytes) -> str:
        """`name` of the actor, or `node/actor` with short hex for what has no name."""
        if address in self._names:
            return self._names[address]
        at = self._names.get(node, node[:4].hex())
        return at if address == node else f"{at}/{address[:4].hex()}"


def _dicts(items: Any) -> list[dict[Any, Any]]:
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


# --- showing ---------------------------------------------------------------------------------------------------
def _secret(name: Any) -> bool:
    """Fields that carry what lets somebody in. `tokens` are the model's and are shown."""
    text = name.lower() if isinstance(name, str) else ""
    return text in ("token", "secret", "password", "authorization", "keys", "secret_key", "private_key", "api_key") or (
        text.endswith(("_token", "_secret", "_password", "_api_key"))
    )


def shown(value: Any, text_max: int) -> Any:
    """JSON-able: secrets gone, bytes as short hex, long text and lists cut at text_max (0: nothing is cut)."""
    if isinstance(value, dict):
        return {
            str(shown(key, text_max)): REDACTED if _secret(key) and item else shown(item, text_max)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [shown(item, text_max) for item in (value[:text_max] if text_max else value)]
        return [*items, f"… {len(value)} in all"] if text_max and len(value) > text_max else items
    if isinstance(value, bytes):
        return value[:BYTES_SHOWN].hex() + (f"…({len(value)})" if len(value) > BYTES_SHOWN else "")
    if isinstance(value, str):
        text = _inner(value)
        return f"{text[:text_max]}… ({len(text)} characters)" if text_max and len(text) > text_max else text
    if isinstance(value, float) and not (float("-inf") < value < float("inf")):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return repr(value)


def _inner(text: str) -> str:
    """JSON inside of a text field (config slices) without its secrets."""
    if text[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps(shown(json.loads(text), 0), ensure_ascii=False)
    return text


def printable(text: str) -> str:
    """Control characters escaped: they do nothing to the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def as_json(line: Line, names: Names) -> str:
    """Everything of one envelope as one line of ASCII JSON."""
    out: dict[str, Any] = {
        "unix_ms": line.wall_ms,
        "broker": line.broker,
        "plane": line.plane,
        "direction": line.direction,
        "verdict": line.verdict,
        "size": line.size,
    }
    if line.bad:
        return json.dumps({**out, "bad": line.bad})
    out |= {
        "type": line.type,
        "tag": line.tag,
        "id": line.id,
        "corr": line.corr,
        "seq": line.seq,
        "ack": line.ack,
        "run": line.run.hex(),
        "src_node": line.src_node.hex(),
        "src": line.src.hex(),
        "src_name": names.of(line.src_node, line.src),
        "dst_node": line.dst_node.hex(),
        "dst": line.dst.hex(),
        "dst_name": names.of(line.dst_node, line.dst),
        "body": shown(line.body, 0),
    }
    return json.dumps(out)


def pieces(line: Line, names: Names, text_max: int) -> Iterator[str]:
    """The columns of the pretty form after the time."""
    yield f"{line.broker:<6}"
    yield f"{line.plane:<7}"
    yield f"{line.direction:<3}"
    if line.bad:
        yield f"BAD {line.size} bytes ({line.verdict}): {line.bad}"
        return
    yield f"{names.of(line.src_node, line.src)} → {names.of(line.dst_node, line.dst)}"
    yield line.type
    yield f"{line.size}B"
    yield line.verdict
    yield f"#{line.id}" + (f"←#{line.corr}" if line.corr else "")
    yield f"seq={line.seq} ack={line.ack}" if line.seq else f"ack={line.ack}" if line.ack else "-"
    yield json.dumps(shown(line.body, text_max), ensure_ascii=False)
