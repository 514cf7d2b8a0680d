"""Tokenizer: golden ids, special tokens, BOS, and streams that never show a broken character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.gguf import GgufFile, UnsupportedTokenizerError, check_tokenizer
from tests.unit.engine.tiny_model import TinySpec, vocabulary, write_model
from worker.engine.errors import TokenizerError
from worker.engine.tokenizer import EngineTokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\tand\ttabs \n\n\n and newlines\r\n",
    "1234567890 3.14159 0x1F",
    "🔥ďč漢",
    "👩‍👩‍👧‍👦 family, flags 🇩🇪🇯🇵, skin 👍🏽",
    "日本語のテキスト。中文字符。한국어",
    "naïve café Straße ﬁ ﬂ Å Å",
    "def f(x):\n    return x**2  # комментарий",
    "it's we're I'll don't 'tis",
    "مرحبا بالعالم",
    "\u200b\u00a0\ufeff",
    "<|im_start|>user\nHi<|im_end|>",
    "a" * 300,
]

# Pinned: a change of the library or of a pre-tokenizer shows here.
GOLDEN = {
    "Hello 1234 🔥ďč漢": [19556, 216, 33, 34, 35, 36, 15107, 238, 115, 143, 233, 30033, 177, 137, 112],
    "hi": [6004],
}


@pytest.fixture(scope="module")
def real(model_path: Path) -> EngineTokenizer:
    with GgufFile.open(model_path) as file:
        return EngineTokenizer.from_gguf(file)


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.gguf"
    write_model(path, TinySpec(layers=1))
    return GgufFile.open(path)


@pytest.mark.engine
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(real: EngineTokenizer, text: str) -> None:
    for parse_special in (False, True):
        ids = real.encode(text, parse_special)
        if not parse_special or "<|" not in text:
            assert real.decode(ids) == text


@pytest.mark.engine
@pytest.mark.parametrize("text", GOLDEN)
def test_golden_ids(real: EngineTokenizer, text: str) -> None:
    assert real.encode(text) == GOLDEN[text]


@pytest.mark.engine
def test_special_tokens_only_where_asked_for(real: EngineTokenizer) -> None:
    assert real.encode("<|im_end|>", parse_special=True) == [2]
    assert 2 not in real.encode("<|im_end|>")
    assert real.decode([1, 2, 6004]) == "hi"
    assert real.vocabulary.end_ids == {0, 2}
    assert (real.bos_text, real.eos_text) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.engine
@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_never_shows_a_broken_character(real: EngineTokenizer, text: str) -> None:
    stream = real.stream()
    pieces = [stream.feed(index) for index in real.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.engine
def test_an_incomplete_character_at_the_end_is_held_back(real: EngineTokenizer) -> None:
    ids = real.encode("ok 🔥")
    assert real.decode(ids[:-1]) == "ok "
    with pytest.raises(TokenizerError, match="token 49152 is outside the vocabulary of 49152"):
        real.decode([49152])


@settings(max_examples=100)
@given(text=st.text(max_size=60))
def test_any_text_survives(tiny_file: GgufFile, text: str) -> None:
    tokenizer = EngineTokenizer.from_gguf(tiny_file)
    text = text.encode("utf-8", "ignore").decode()
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    assert "".join(stream.feed(index) for index in ids) == text


def test_bos_is_put_in_front_once(tmp_path: Path) -> None:
    import gguf

    from tests.unit.engine import tiny_model

    writer = gguf.GGUFWriter(str(tmp_path / "b.gguf"), "llama")
    for add in (writer.add_block_count, writer.add_context_length, writer.add_feed_forward_length):
        add(1)
    writer.add_embedding_length(16)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    tiny_model.add_tokenizer(writer, "llama-bpe")
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GgufFile.open(tmp_path / "b.gguf") as file:
        tokenizer = EngineTokenizer.from_gguf(file)
    assert tokenizer.encode("x")[:1] == [1]
    assert tokenizer.encode("<|im_start|>x", parse_special=True).count(1) == 1
    assert tokenizer.encode("") == [1]


@pytest.mark.parametrize(
    "pre, digits", [("smollm", [1, 1, 1, 1]), ("qwen2", [1, 1, 1, 1]), ("llama-bpe", [3, 1]), ("gpt-2", [4])]
)
def test_presets_cut_digits_their_way(tmp_path: Path, pre: str, digits: list[int]) -> None:
    write_model(tmp_path / "p.gguf", TinySpec(layers=1), pre=pre)
    with GgufFile.open(tmp_path / "p.gguf") as file:
        assert check_tokenizer(file) == pre
        tokenizer = EngineTokenizer.from_gguf(file)
    pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str("1234")
    assert [end - start for _, (start, end) in pieces] == digits


def test_tokenizer_json_of_the_same_vocabulary(tmp_path: Path, tiny_file: GgufFile) -> None:
    from tokenizers import decoders

    own = EngineTokenizer.from_gguf(tiny_file)
    own._backend.decoder = decoders.ByteLevel()
    path = tmp_path / "tokenizer.json"
    own._backend.save(str(path))
    loaded = EngineTokenizer.from_json(path, tiny_file)
    for text in TEXTS:
        assert loaded.encode(text, True) == own.encode(text, True)
        assert loaded.decode(loaded.encode(text)) == text
    assert loaded.vocabulary.end_ids == own.vocabulary.end_ids


def test_bad_tokenizer_json(tmp_path: Path, tiny_file: GgufFile) -> None:
    with pytest.raises(TokenizerError, match="No such file"):
        EngineTokenizer.from_json(tmp_path / "absent.json", tiny_file)
    path = tmp_path / "t.json"
    path.write_text("{")
    with pytest.raises(TokenizerError, match=r"not a tokenizer\.json"):
        EngineTokenizer.from_json(path, tiny_file)
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(vocabulary())}, "merges": []}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model, "decoder": None}))
    with pytest.raises(TokenizerError, match="byte-level"):
        EngineTokenizer.from_json(path, tiny_file)


def test_an_unknown_kind_of_vocabulary_is_refused(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "s.gguf"), "llama")
    writer.add_tokenizer_model("rwkv")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GgufFile.open(tmp_path / "s.gguf") as file, pytest.raises(UnsupportedTokenizerError, match="'rwkv'"):
        check_tokenizer(file)
