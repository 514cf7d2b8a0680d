"""Typed msgpack: the message base class, the registry of the catalogue, encode and decode with one error type.

`msgspec` owns the schema; peers' bytes can only ever become a message or a `BadEnvelope` (anchors.md B).
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from functools import cache
from typing import ClassVar, TypeVar

import msgspec
from msgspec import inspect

from common.addresses import ANYONE, Plane, Role
from common.envelope import ENVELOPE_VERSION, Envelope, Header
from common.limits import ENVELOPE_BYTES_MAX


class BadEnvelope(ValueError):
    """Bytes that are no valid envelope or message: counted, shown in the tap, never a traceback.

    reason: one sentence; tag: the header's tag or None when the header itself is broken; size: bytes received.
    """

    def __init__(self, reason: str, tag: int | None, size: int) -> None:
        super().__init__(f"{reason} (tag {tag}, {size} bytes)")
        self.reason, self.tag, self.size = reason, tag, size


class UnknownTag(BadEnvelope):
    """A well-formed envelope of a type that this build does not know: answered with `Unsupported`."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="t"):
    """Base of every message: a frozen, keyword-only, tagged map, defaults omitted on the wire.

    Each subclass gives `tag=<int>` (append-only, never reused), its plane and the roles that may send it.
    """

    PLANE: ClassVar[Plane] = Plane.CONTROL
    FROM: ClassVar[frozenset[Role]] = ANYONE
    DATAGRAM: ClassVar[bool] = False
    """Sent outside the session (plane_seq 0): never retransmitted, never reported as failed."""


M = TypeVar("M", bound=Message)
_DECODE_ERRORS = (msgspec.DecodeError, RecursionError, OverflowError, UnicodeDecodeError)

_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_header_decoder = msgspec.msgpack.Decoder(Header)


def tag_of(cls: type[Message]) -> int:
    """The integer tag given in the class statement."""
    tag = cls.__struct_config__.tag
    if not isinstance(tag, int):
        raise TypeError(f"{cls.__name__} has no integer tag")
    return tag


@cache
def catalogue() -> dict[int, type[Message]]:
    """Every message type of `common/messages/`, by tag."""
    package = importlib.import_module("common.messages")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"common.messages.{module.name}")
    found: dict[int, type[Message]] = {}
    pending = list(Message.__subclasses__())
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        if not isinstance(cls.__struct_config__.tag, int) or not cls.__module__.startswith("common.messages."):
            continue
        if found.setdefault(tag_of(cls), cls) is not cls:
            raise TypeError(f"tag {tag_of(cls)} stands for {found[tag_of(cls)].__name__} and {cls.__name__}")
    return found


@cache
def _body_decoder(tag: int) -> msgspec.msgpack.Decoder[Message]:
    return msgspec.msgpack.Decoder(catalogue()[tag])


def encode_body(message: Message) -> bytes:
    """The message alone, as it stands in an envelope's body and on the agent-engine link."""
    return _encoder.encode(message)


def encode_envelope(envelope: Envelope) -> bytes:
    """One ZeroMQ frame."""
    return _encoder.encode(envelope)


def decode_envelope(data: bytes | memoryview) -> Envelope:
    """The envelope with its body still raw. Raises BadEnvelope."""
    size = len(data)
    if size > ENVELOPE_BYTES_MAX:
        raise BadEnvelope(f"larger than {ENVELOPE_BYTES_MAX} bytes", None, size)
    try:
        envelope = _envelope_decoder.decode(data)
    except _DECODE_ERRORS as error:
        raise BadEnvelope(f"no envelope: {error}", None, size) from None
    if envelope.v != ENVELOPE_VERSION:
        raise BadEnvelope(f"envelope version {envelope.v}, this build speaks {ENVELOPE_VERSION}", envelope.tag, size)
    return envelope


def decode_header(data: bytes | memoryview) -> Header:
    """The header alone: what a broker needs. Raises BadEnvelope."""
    size = len(data)
    if size > ENVELOPE_BYTES_MAX:
        raise BadEnvelope(f"larger than {ENVELOPE_BYTES_MAX} bytes", None, size)
    try:
        return _header_decoder.decode(data)
    except _DECODE_ERRORS as error:
        raise BadEnvelope(f"no envelope: {error}", None, size) from None


def decode_body(tag: int, body: bytes | memoryview | msgspec.Raw) -> Message:
    """The typed message. Raises UnknownTag for a tag outside the catalogue, BadEnvelope for anything else wrong."""
    if tag not in catalogue():
        raise UnknownTag(f"unknown message tag {tag}", tag, len(memoryview(body)))
    try:
        message = _body_decoder(tag).decode(body)
    except _DECODE_ERRORS as error:
        raise BadEnvelope(f"{catalogue()[tag].__name__}: {error}", tag, len(memoryview(body))) from None
    if _holds_floats(tag) and not _finite(message):
        raise BadEnvelope(f"{catalogue()[tag].__name__}: a number is not finite", tag, len(memoryview(body)))
    return message


@cache
def _holds_floats(tag: int) -> bool:
    """Whether a message of this type can hold a float at all: few can, and the walk costs more than the decoding."""
    pending: list[inspect.Type] = [inspect.type_info(catalogue()[tag])]
    seen: set[type] = set()
    while pending:
        match pending.pop():
            case inspect.StructType() as struct:
                if struct.cls not in seen:
                    seen.add(struct.cls)
                    pending += [field.type for field in struct.fields]
            case inspect.UnionType() as union:
                pending += union.types
            case inspect.Metadata() as annotated:
                pending.append(annotated.type)
            case inspect.ListType() as items:
                pending.append(items.item_type)
            case inspect.DictType() as items:
                pending += [items.key_type, items.value_type]
            case inspect.IntType() | inspect.StrType() | inspect.BytesType() | inspect.BoolType() | inspect.NoneType():
                pass
            case inspect.EnumType() | inspect.LiteralType():
                pass
            case _:
                return True
    return False


def _finite(value: object) -> bool:
    """False where a NaN or infinity stands anywhere: they would poison comparisons far from here."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, msgspec.Struct):
        return all(_finite(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, list | tuple):
        return not value or isinstance(value[0], bytes | str | int) or all(_finite(item) for item in value)
    if isinstance(value, dict):
        return all(_finite(item) for item in value.values())
    return True
