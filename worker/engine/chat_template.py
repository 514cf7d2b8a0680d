"""A model's chat template, rendered in jinja2's immutable sandbox with limits on time, output and sizes.

A template is foreign code that came with a model file. It can reach no attribute that starts with an underscore,
change nothing it was given, and call no Python beyond the few functions below (field complaints C9, C11:
CVE-2024-34359, CVE-2026-5760). What the sandbox does not limit is limited here: endless loops by a deadline that
is checked on each line, output by its length, and the operations that make large strings out of small ones.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import FrameType, TracebackType
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from worker.engine.errors import ChatTemplateError

RENDER_LIMIT_S = 2.0  # of the processor; a real template takes about a millisecond
OUTPUT_CHARS_MAX = 4_000_000  # far beyond any context window
STRING_CHARS_MAX = 4_000_000  # of a value that an operator or a method builds
TEMPLATE_CHARS_MAX = 1_000_000
VALUE_NODES_MAX = 100_000  # of a list or map that is turned into text: shared parts can make it exponential
_POWER_BITS_MAX = 4096
# Methods and filters whose result is as wide as an argument says.
_WIDE_METHODS = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate", "to_bytes"}
)
_DROPPED_FILTERS = frozenset(
    {"batch", "center", "filesizeformat", "format", "pprint", "random", "slice", "sum", "urlize", "wordwrap", "xmlattr"}
)


class _LimitError(Exception):
    """A limit of this module was reached inside a template."""


class _RaisedError(Exception):
    """The template called raise_exception."""


def _check_size(size: int) -> None:
    if size > STRING_CHARS_MAX:
        raise _LimitError(f"it builds a value of more than {STRING_CHARS_MAX} characters")


def _bounded(value: Any) -> Any:
    """The value itself, if its text is of a reasonable size; used before anything becomes text."""
    if isinstance(value, str | int | float | bool | None):
        return value
    pending, nodes, size = [value], 0, 0
    while pending:
        item = pending.pop()
        nodes += 1
        if nodes > VALUE_NODES_MAX:
            raise _LimitError(f"it writes a value of more than {VALUE_NODES_MAX} parts")
        if isinstance(item, str | bytes):
            size += len(item)
            _check_size(size)
        elif isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            pending += item
    return value


def _concat(parts: Iterable[str]) -> str:
    """jinja's way to put captured output together ({% set %} blocks, macros)."""
    kept = list(parts)
    _check_size(sum(map(len, kept)))
    return "".join(kept)


def _string_join(values: Iterable[Any]) -> str:
    """The operator ~."""
    return _concat(str(_bounded(value)) for value in values)


def _replace(text: str, old: str, new: str, count: int | None = None) -> str:
    text, old, new = str(_bounded(text)), str(_bounded(old)), str(_bounded(new))
    pieces = text.count(old) if count is None or count < 0 else min(text.count(old), count)
    _check_size(len(text) + pieces * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _join(items: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    total, parts = 0, []
    for item in items:
        if attribute is not None:
            item = item[attribute] if isinstance(item, Mapping) else ""
        parts.append(str(_bounded(item)))
        total += len(parts[-1]) + len(separator)
        _check_size(total)
    return str(separator).join(parts)


def _indent(text: str, width: int = 4, first: bool = False) -> str:
    if not isinstance(width, int) or not 0 <= width <= 64:
        raise _LimitError("it indents by more than 64 columns")
    _check_size(len(text) + width * text.count("\n"))
    return (" " * width if first else "") + text.replace("\n", "\n" + " " * width)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_options: Any) -> str:
    if indent is not None and not 0 <= indent <= 64:
        raise _LimitError("it indents by more than 64 columns")
    return json.dumps(_bounded(value), indent=indent, ensure_ascii=ensure_ascii, default=str)


def _raise_exception(message: object = "") -> None:
    raise _RaisedError(str(message)[:500])


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200:
        raise _LimitError("its date format is longer than 200 characters")
    return datetime.now().strftime(pattern)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with the limits on operators and methods."""

    concat = staticmethod(_concat)
    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            big = isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _POWER_BITS_MAX
            if big:
                raise _LimitError("it computes a number of more than 4096 bits")
        elif operator == "%" and isinstance(left, str):
            raise _LimitError("it formats with %, which is not offered")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, Sequence) and isinstance(times, int):
                    _check_size(len(value) * times)
        elif operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> None:
        """str.format is not offered, because a width in it makes strings of any size."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | bytes | int) and attr in _WIDE_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            if obj.__name__ == "replace":
                return _replace(owner, *args, **kwargs)
            if obj.__name__ == "join":
                return _join(args[0] if args else (), owner)
        return super().call(context, obj, *args, **kwargs)


class ChatTemplate:
    """A compiled template. `bos` and `eos` are always defined, if need be as the empty string."""

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        if len(source) > TEMPLATE_CHARS_MAX:
            raise ChatTemplateError(f"the chat template has more than {TEMPLATE_CHARS_MAX} characters")
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            cache_size=0,
            finalize=_bounded,
        )
        for name in _DROPPED_FILTERS:
            environment.filters.pop(name, None)
        environment.filters.update(replace=_replace, join=_join, indent=_indent, tojson=_to_json)
        environment.filters["string"] = lambda value: str(_bounded(value))
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, bos_token=bos, eos_token=eos, tools=None
        )
        environment.globals.pop("lipsum", None)
        try:
            self._template = environment.from_string(source)
            # The compiled module took the operator ~ from jinja2.runtime; this one counts.
            self._template.root_render_func.__globals__["str_join"] = _string_join
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, OverflowError) as error:
            raise ChatTemplateError("the chat template is nested too deeply to compile") from error

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt text. Raises ChatTemplateError naming the template's line."""
        context = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        deadline = time.thread_time() + RENDER_LIMIT_S
        before = sys.gettrace()
        sys.settrace(_deadline_trace(deadline))
        try:
            return self._collect(context)
        except Exception as error:
            sys.settrace(before)
            raise ChatTemplateError(f"chat template{self._line(error.__traceback__)}: {_say(error)}") from error
        finally:
            sys.settrace(before)

    def _collect(self, context: Mapping[str, Any]) -> str:
        parts: list[str] = []
        total = 0
        for part in self._template.root_render_func(self._template.new_context(dict(context))):
            total += len(part)
            if total > OUTPUT_CHARS_MAX:
                raise _LimitError(f"it writes more than {OUTPUT_CHARS_MAX} characters")
            parts.append(part)
        return "".join(parts)

    def _line(self, trace: TracebackType | None) -> str:
        line = None
        while trace is not None:
            if trace.tb_frame.f_globals.get("environment") is self._template.environment:
                line = self._template.get_corresponding_lineno(trace.tb_lineno)
            trace = trace.tb_next
        return "" if line is None else f" line {line}"


def _say(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it recurses too deeply"
    text = str(error).strip().splitlines()
    return text[0][:500] if text else type(error).__name__


def _deadline_trace(deadline: float) -> Callable[[FrameType, str, Any], Any]:
    """A trace function: the one way to stop a loop in the same thread without a second process."""

    def trace(_frame: FrameType, _event: str, _arg: Any) -> Any:
        if time.thread_time() > deadline:
            raise _LimitError(f"it runs for more than {RENDER_LIMIT_S:g} s")
        return trace

    return trace
