"""One message of each type with every field set, made from the types alone; and `python -m tests.golden.samples`, which
appends what tags.toml and messages.toml lack. Neither file is ever rewritten: old bytes must stay readable."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from common.codec import Message, catalogue, encode_body

HERE = Path(__file__).parent
TAGS, MESSAGES = HERE / "tags.toml", HERE / "messages.toml"


def sample(cls: type[Message]) -> Message:
    """The golden message of a type."""
    made = _sample(inspect.type_info(cls))
    assert isinstance(made, cls)
    return made


def _sample(kind: Any) -> Any:
    match kind:
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return max(kind.ge or 0, min(7, kind.le if kind.le is not None else 7))
        case inspect.FloatType():
            return 0.5
        case inspect.StrType():
            return "text"[: kind.max_length]
        case inspect.BytesType():
            return bytes(range(1, 1 + max(kind.min_length or 0, min(4, kind.max_length or 4))))
        case inspect.EnumType():
            return sorted(kind.cls)[0]
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.ListType():
            of = kind.item_type
            items = of.types if isinstance(of, inspect.UnionType) else (of,)
            return [_sample(item) for item in items if not isinstance(item, inspect.NoneType)]
        case inspect.VarTupleType():
            return (_sample(kind.item_type),)
        case inspect.TupleType():
            return tuple(_sample(item) for item in kind.item_types)
        case inspect.DictType():
            return {_sample(kind.key_type): _sample(kind.value_type)}
        case inspect.UnionType():
            return _sample(next(of for of in kind.types if not isinstance(of, inspect.NoneType)))
        case inspect.StructType():
            values = {}
            for field in kind.fields:
                value = _sample(field.type)
                values[field.name] = (not value) if isinstance(value, bool) and field.default is True else value
            return kind.cls(**values)
    raise TypeError(f"no sample for {kind}")


def strategy(cls: type[Message]) -> st.SearchStrategy[Any]:
    """Any valid message of a type."""
    return _strategy(inspect.type_info(cls))


def _strategy(kind: Any) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            low, high = kind.ge, kind.le
            return st.integers(low if low is not None else -(2**63), high if high is not None else 2**64 - 1)
        case inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case inspect.StrType():
            return st.text(st.characters(exclude_categories=["Cs"]), max_size=min(kind.max_length or 20, 20))
        case inspect.BytesType():
            low = kind.min_length or 0
            return st.binary(min_size=low, max_size=kind.max_length if kind.max_length is not None else low + 40)
        case inspect.EnumType():
            return st.sampled_from(sorted(kind.cls))
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.ListType():
            return st.lists(_strategy(kind.item_type), max_size=5)
        case inspect.VarTupleType():
            return st.lists(_strategy(kind.item_type), max_size=5).map(tuple)
        case inspect.TupleType():
            return st.tuples(*(_strategy(item) for item in kind.item_types))
        case inspect.DictType():
            return st.dictionaries(_strategy(kind.key_type), _strategy(kind.value_type), max_size=4)
        case inspect.UnionType():
            return st.one_of([_strategy(of) for of in kind.types])
        case inspect.StructType():
            fields = {field.name: _strategy(field.type) for field in kind.fields}
            return st.fixed_dictionaries(fields).map(lambda values: kind.cls(**values))
    raise TypeError(f"no strategy for {kind}")


def golden() -> dict[str, bytes]:
    """The recorded bytes by name."""
    return {name: bytes.fromhex(text) for name, text in tomllib.loads(MESSAGES.read_text()).items()}


def plain(value: Any) -> Any:
    """What an independent decoder makes of a message: maps, lists and scalars."""
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        fields = {
            field.encode_name: plain(getattr(value, field.name))
            for field in msgspec.structs.fields(value)
            if not _is_default(value, field)
        }
        return fields if tag is None else {value.__struct_config__.tag_field: tag, **fields}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return value.value if hasattr(value, "value") else value


def _is_default(value: msgspec.Struct, field: msgspec.structs.FieldInfo) -> bool:
    if not value.__struct_config__.omit_defaults:
        return False
    here = getattr(value, field.name)
    if field.default_factory is not msgspec.NODEFAULT:
        return bool(here == field.default_factory())
    # As msgspec omits: the same object, or an equal scalar of the same type.
    return field.default is not msgspec.NODEFAULT and type(here) is type(field.default) and here == field.default


def main() -> None:
    """Append what is new."""
    known = golden() if MESSAGES.exists() else {}
    tags = tomllib.loads(TAGS.read_text()) if TAGS.exists() else {}
    for tag, cls in sorted(catalogue().items()):
        if cls.__name__ not in tags:
            with TAGS.open("a") as file:
                file.write(f"{cls.__name__} = {tag}\n")
        if cls.__name__ not in known:
            with MESSAGES.open("a") as file:
                file.write(f'{cls.__name__} = "{encode_body(sample(cls)).hex()}"\n')


if __name__ == "__main__":
    main()
