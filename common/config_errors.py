"""Configuration errors: one sentence that names the layer, the key, the bad value and the way out (S1 10.2)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any

from common.redact import Redactor

_SHOWN_CHARS_MAX = 80
_USER_INFO = re.compile(r"//[^/@\s]*@")
_redactor: ContextVar[Redactor | None] = ContextVar("config_redactor", default=None)


class ConfigError(Exception):
    """The configuration cannot be used; str(error) is one sentence for the user and holds no secret."""


class Information(Exception):
    """Nothing is to be started: str() is what --help or --version prints to stdout; the exit status is 0."""


def nearest(word: str, names: Iterable[str], *, likeness: float = 0.6) -> str:
    """The valid name most like `word`, or "" when none is near. likeness: difflib's ratio, 0 to 1."""
    known = {name.lower(): name for name in names}
    found = get_close_matches(word.lower(), known, n=1, cutoff=likeness)
    return known[found[0]] if found else ""


def suggestion(word: str, names: Iterable[str], shown: str = "{}") -> str:
    """ "did you mean X?", or the list of all valid names. shown: how a name is written, with {} for the name."""
    names = list(names)
    if near := nearest(word, names):
        return f"did you mean {shown.format(near)}?"
    return f"valid are {listed(shown.format(name) for name in names)}"


def listed(names: Iterable[str], last: str = "and") -> str:
    """ "a, b and c"."""
    *head, tail = names
    return f"{', '.join(head)} {last} {tail}" if head else tail


@contextmanager
def hiding(secrets: Iterable[str]) -> Iterator[None]:
    """Within this block no value shown and no ConfigError raised holds one of these secrets.

    The sentences never show the value of a secret key; this is for a secret that was written into the wrong place.
    """
    redactor = Redactor(secrets)
    reset = _redactor.set(redactor)
    try:
        yield
    except ConfigError as error:
        raise ConfigError(redactor.redact(str(error))) from None
    finally:
        _redactor.reset(reset)


def show(value: Any) -> str:
    """A bad value as the user wrote it, on one line, shortened; never call it with the value of a secret key.

    Credentials inside an address (`//user:password@host`) are cut out: they may stand in any string.
    """
    text = json.dumps(value, ensure_ascii=False, default=str)
    # Before it is shortened: half a secret would not be recognised any more.
    if redactor := _redactor.get():
        text = redactor.redact(text)
    text = _USER_INFO.sub("//...@", text)
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= _SHOWN_CHARS_MAX else text[: _SHOWN_CHARS_MAX - 3] + "..."
