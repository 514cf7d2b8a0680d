"""SentencePiece-style vocabularies: the order of joins, byte tokens, special tokens, spaces."""

from __future__ import annotations

import itertools
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.gguf import GgufFile, UnsupportedTokenizerError, check_tokenizer
from worker.engine.errors import TokenizerError
from worker.engine.tokenizer import EngineTokenizer

PIECES = ["▁", "a", "b", "c", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello", "ab", "bc", "abc", "\n"]


def reference(text: str, scores: dict[str, float]) -> list[str]:
    """llama.cpp's way: join the neighbours with the best score, the leftmost of equals, until none is left."""
    parts = list(text)
    while True:
        joins = [(scores[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not joins:
            return parts
        at = -max(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def write(path: Path, prefix: bool = True, scores: int | None = None) -> GgufFile:
    writer = gguf.GGUFWriter(str(path), "llama")
    for add in (writer.add_block_count, writer.add_context_length, writer.add_feed_forward_length):
        add(1)
    writer.add_embedding_length(16)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "[USER]"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    values = [0.0] * 259 + [-float(at) for at in range(len(PIECES))] + [0.0]
    writer.add_token_scores(values[:scores])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile.open(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> EngineTokenizer:
    file = write(tmp_path_factory.mktemp("spm") / "m.gguf")
    assert check_tokenizer(file) == "llama"
    return EngineTokenizer.from_gguf(file)


def pieces(tokenizer: EngineTokenizer, text: str, special: bool = False) -> list[str]:
    return [tokenizer.vocabulary.tokens[index] for index in tokenizer.encode(text, special)]


def test_joins_bytes_and_special_tokens(tokenizer: EngineTokenizer) -> None:
    assert pieces(tokenizer, "hello") == ["<s>", "▁hello"]
    assert pieces(tokenizer, "abcb") == ["<s>", "▁", "abc", "b"]
    assert pieces(tokenizer, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert pieces(tokenizer, "a</s>", special=True) == ["<s>", "▁", "a", "</s>"]
    assert pieces(tokenizer, "<s>a", special=True) == ["<s>", "▁", "a"], "one BOS"
    assert "</s>" not in pieces(tokenizer, "a</s>")
    assert "[USER]" in pieces(tokenizer, "a[USER]b")
    assert tokenizer.decode(tokenizer.encode("hello é\n")) == "hello é\n"
    assert tokenizer.decode([1, 2]) == ""
    stream = tokenizer.stream()
    assert [stream.feed(index) for index in tokenizer.encode("é")[1:]] == [" ", "", "é"]


def test_without_a_space_in_front(tmp_path: Path) -> None:
    tokenizer = EngineTokenizer.from_gguf(write(tmp_path / "m.gguf", prefix=False))
    assert pieces(tokenizer, "hello") == ["<s>", "h", "el", "lo"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


@settings(max_examples=200)
@given(text=st.text(alphabet="abchelo ", min_size=1, max_size=12))
def test_the_order_of_joins_is_the_reference(tokenizer: EngineTokenizer, text: str) -> None:
    scores = {piece: -float(at) for at, piece in enumerate(PIECES)}
    assert pieces(tokenizer, text)[1:] == reference(("▁" + text).replace(" ", "▁"), scores)


@settings(max_examples=100)
@given(text=st.text(max_size=30))
def test_any_text_survives(tokenizer: EngineTokenizer, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    if "\u2581" not in text:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_vocabulary_without_its_scores(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="scores do not fit its 277 tokens"):
        EngineTokenizer.from_gguf(write(tmp_path / "m.gguf", scores=100))
    writer = gguf.GGUFWriter(str(tmp_path / "s.gguf"), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with (
        GgufFile.open(tmp_path / "s.gguf") as file,
        pytest.raises(UnsupportedTokenizerError, match="scores is missing"),
    ):
        check_tokenizer(file)
