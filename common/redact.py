"""Redaction: no configured secret leaves this system in a record, a log line or an error text (S1 10.16).

Pure, and never raises: it runs on bytes that were captured from processes which may print anything.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import AnyStr
from urllib.parse import quote, quote_plus

REDACTED = "<redacted>"
_ENCODED_FORMS_LENGTH_MIN = 8
"""Shorter secrets have encoded forms so short that they would blot out ordinary text."""


class Redactor:
    """Replaces every secret, as it stands and as commonly encoded, by `<redacted>`.

    From 8 bytes on a secret is also found URL-encoded, JSON-escaped and in base64 (standard and URL-safe, at any
    alignment, because `user:secret` in a Basic header shifts it). Overlapping secrets vanish whole: the union of all
    matches is replaced, so that no tail of the one stays behind the other. Empty secrets are ignored.
    A secret cut in two by its producer (two lines, two chunks) is not found: redact before cutting.
    """

    def __init__(self, secrets: Iterable[str | bytes]) -> None:
        forms: set[bytes] = set()
        for secret in secrets:
            raw = secret.encode("utf-8", "surrogatepass") if isinstance(secret, str) else bytes(secret)
            if raw:
                forms |= _forms(raw)
        self._bytes = sorted(forms)
        # A form that is no UTF-8 cannot stand in a str, except as the surrogates of a lossless decode.
        self._text = sorted({form.decode("utf-8", "surrogateescape") for form in forms})

    def __repr__(self) -> str:
        return f"Redactor({len(self._bytes)} forms)"

    def redact(self, data: AnyStr) -> AnyStr:
        """The same text or bytes without any secret."""
        if isinstance(data, str):
            return _replace(data, self._text, REDACTED)
        return _replace(data, self._bytes, REDACTED.encode())

    def redact_line(self, line: bytes | str) -> str:
        """One captured line as text: without its line end, without secrets, undecodable bytes as U+FFFD.

        Redacted before it is decoded, because decoding could change bytes of a secret beyond recognition.
        """
        if isinstance(line, str):
            return self.redact(line).rstrip("\r\n")
        return self.redact(line).decode("utf-8", "replace").rstrip("\r\n")


def redact_line(line: bytes | str, secrets: Iterable[str | bytes]) -> str:
    """`Redactor(secrets).redact_line(line)`, for a single line."""
    return Redactor(secrets).redact_line(line)


def _forms(raw: bytes) -> set[bytes]:
    forms = {raw}
    if len(raw) < _ENCODED_FORMS_LENGTH_MIN:
        return forms
    for encoded in (quote(raw, safe=""), quote(raw), quote_plus(raw)):
        forms |= {encoded.encode(), _lower_escapes(encoded).encode()}
    text = raw.decode("utf-8", "replace")
    if "\ufffd" not in text:
        forms |= {json.dumps(text, ensure_ascii=ascii_only)[1:-1].encode() for ascii_only in (True, False)}
    for altchars in (b"+/", b"-_"):
        whole = base64.b64encode(raw, altchars)
        forms |= {whole, whole.rstrip(b"=")}
        forms |= {_aligned(raw, offset, altchars) for offset in range(3)}
    return forms


def _aligned(raw: bytes, offset: int, altchars: bytes) -> bytes:
    """The characters of a base64 text that depend on nothing but `raw`, when raw stands `offset` bytes into a group."""
    text = base64.b64encode(bytes(offset) + raw + bytes(3), altchars)
    first = -(-offset * 8 // 6)
    return text[first : (offset + len(raw)) * 8 // 6]


def _lower_escapes(encoded: str) -> str:
    """%2F as %2f: both are common."""
    parts = encoded.split("%")
    return parts[0] + "".join("%" + part[:2].lower() + part[2:] for part in parts[1:])


def _replace(data: AnyStr, forms: list[AnyStr], marker: AnyStr) -> AnyStr:
    spans: list[tuple[int, int]] = []
    for form in forms:
        start = data.find(form)
        while start >= 0:
            spans.append((start, start + len(form)))
            start = data.find(form, start + 1)
    if not spans:
        return data
    spans.sort()
    pieces: list[AnyStr] = []
    done = 0
    begin, end = spans[0]
    for start, stop in spans[1:]:
        if start <= end:
            end = max(end, stop)
            continue
        pieces += [data[done:begin], marker]
        done, begin, end = end, start, stop
    pieces += [data[done:begin], marker, data[end:]]
    return marker[:0].join(pieces)
