"""Redaction finds secrets in every common shape, leaves no tails behind and never raises (S1 10.16)."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.redact import REDACTED, Redactor, redact_line

SECRET = "hf_Ab/+cd 09é~zZ"


@pytest.mark.spec("S1 10.16")
@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        quote(SECRET, safe=""),
        quote(SECRET, safe="").lower().replace("hf_ab", "hf_Ab").replace("~zz", "~zZ"),
        json.dumps(SECRET)[1:-1],
        base64.b64encode(SECRET.encode()).decode(),
        base64.urlsafe_b64encode(SECRET.encode()).decode().rstrip("="),
    ],
)
def test_every_form_is_replaced(form: str) -> None:
    redactor = Redactor([SECRET])
    assert redactor.redact(f"key={form};") == f"key={REDACTED};"
    assert redactor.redact(f"key={form};".encode()) == b"key=<redacted>;"


@pytest.mark.parametrize("user", ["", "a", "ab", "abc", "user:"])
def test_base64_at_any_alignment(user: str) -> None:
    header = base64.b64encode(f"{user}{SECRET}:tail".encode()).decode()
    shown = Redactor([SECRET]).redact(header)
    assert REDACTED in shown
    # At most the characters that mix the secret with its neighbours are left.
    left = shown.replace(REDACTED, "")
    assert len(left) <= len(header) - len(SECRET.encode()) * 8 // 6 + 2


@pytest.mark.parametrize(
    ("secrets", "text", "expected"),
    [
        (["abcdef", "defghi"], "xabcdefghiy", "x<redacted>y"),
        (["abc", "abcdef"], "abcdef abc", "<redacted> <redacted>"),
        (["aba"], "ababa!", "<redacted>!"),
        (["act"], "redacted act", "red<redacted>ed <redacted>"),
        (["", b""], "nothing to hide", "nothing to hide"),
        (["a"], "banana", "b<redacted>n<redacted>n<redacted>"),
        ([b"\xff\xfesecret"], "no such bytes here", "no such bytes here"),
    ],
)
def test_overlapping_nested_and_odd_secrets(secrets: list[str | bytes], text: str, expected: str) -> None:
    assert Redactor(secrets).redact(text) == expected
    assert Redactor(secrets).redact(text.encode()) == expected.encode()


def test_short_secrets_have_no_encoded_forms() -> None:
    assert Redactor(["abc"]).redact(base64.b64encode(b"abc")) == base64.b64encode(b"abc")


def test_repr_shows_nothing() -> None:
    assert SECRET not in repr(Redactor([SECRET]))


@pytest.mark.spec("S1 10.16")
def test_redact_line_redacts_before_it_decodes() -> None:
    secret = b"\xffkey\xfe-0123"
    assert redact_line(b"token " + secret + b" \x80\r\n", [secret]) == "token <redacted> \ufffd"
    assert redact_line("token " + SECRET + "\n", [SECRET]) == "token <redacted>"


@given(st.lists(st.one_of(st.text(), st.binary()), max_size=4), st.text(), st.binary())
def test_never_raises(secrets: list[str | bytes], text: str, data: bytes) -> None:
    redactor = Redactor(secrets)
    redactor.redact(text + "\ud800")
    redactor.redact(data)
    redactor.redact_line(data)


_upper = st.text(st.characters(min_codepoint=0x41, max_codepoint=0x44), min_size=1, max_size=5)


@given(st.lists(_upper, min_size=1, max_size=4), _upper, _upper)
def test_no_secret_survives(secrets: list[str], before: str, after: str) -> None:
    """Upper case only, so that the marker itself cannot hold a secret."""
    shown = Redactor(secrets).redact(before + "".join(secrets) + after)
    assert not any(secret in shown for secret in secrets)
