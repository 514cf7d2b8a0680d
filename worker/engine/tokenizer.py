"""Tokenizers from a GGUF's vocabulary (byte-level or SentencePiece BPE) or a tokenizer.json (S1 7.1, 7.9).

Encoding is done by the `tokenizers` library. Decoding is our own table from token id to bytes, because a stream
must be cut at bytes, not at tokens: one character may span several tokens (design.md 6 row 13).
"""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from common.gguf import GgufFile, check_tokenizer
from common.gguf_header import SENTENCEPIECE
from worker.engine import sentencepiece
from worker.engine.errors import TokenizerError

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType
# Tokens that end a turn in the chat formats of the supported model families; llama.cpp knows the same names.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<end_of_turn>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _pre_tokenizer(preset: str) -> pre_tokenizers.PreTokenizer:
    if preset in ("llama-bpe", "qwen2"):
        pattern = Regex(_WORDS.replace("1,DIGITS", "1,3" if preset == "llama-bpe" else "1"))
        split = pre_tokenizers.Split(pattern, "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    by_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if preset == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_words])
    return by_words


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable alphabet for bytes: printable Latin-1 stands for itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTES = _byte_of_char()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is known of the tokens beside how text is cut into them."""

    tokens: tuple[str, ...]
    control: frozenset[int]
    user_defined: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    add_bos: bool
    pieces: tuple[int, ...] = ()  # kinds of the tokens of a SentencePiece-style vocabulary; empty: byte-level
    space_prefix: bool = False  # a text gets a space in front, which decoding takes off again


class EngineTokenizer:
    """Text to ids and back for one model; any thread may use it."""

    def __init__(self, backend: Tokenizer, vocabulary: Vocabulary) -> None:
        self._backend = backend
        self._lock = threading.Lock()  # the library has one switch for special tokens, not one per call
        self.vocabulary = vocabulary

    @classmethod
    def from_gguf(cls, file: GgufFile) -> EngineTokenizer:
        """Raises UnsupportedTokenizerError or TokenizerError."""
        preset = check_tokenizer(file)
        metadata = file.metadata
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        types: list[int] = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())]
        types += [1] * (len(tokens) - len(types))
        if preset == SENTENCEPIECE:
            return cls._from_pieces(file, tokens, types)
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        try:
            model = models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=merges,
                ignore_merges=preset == "llama-bpe",
            )
        except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
            raise TokenizerError(f"{file.path}: the tokenizer's merges do not fit its vocabulary: {error}") from error
        backend = Tokenizer(model)
        backend.pre_tokenizer = _pre_tokenizer(preset)
        control, user = _add_special(backend, tokens, types)
        vocabulary = _vocabulary(tokens, control, user, *_special_ids(file))
        return cls(backend, vocabulary)

    @classmethod
    def _from_pieces(cls, file: GgufFile, tokens: list[str], types: list[int]) -> EngineTokenizer:
        """A SentencePiece-style vocabulary."""
        scores = [float(score) for score in file.metadata["tokenizer.ggml.scores"]]
        unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
        if len(scores) != len(tokens) or (unknown is not None and not 0 <= unknown < len(tokens)):
            raise TokenizerError(f"{file.path}: the tokenizer's scores do not fit its {len(tokens)} tokens")
        prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
        try:
            backend = sentencepiece.backend(tokens, scores, types, unknown, prefix)
        except Exception as error:  # the library has no error class of its own
            raise TokenizerError(f"{file.path}: the tokenizer cannot be built: {error}") from error
        control, user = _add_special(backend, tokens, types)
        known = _vocabulary(tokens, control, user, *_special_ids(file))
        return cls(backend, replace(known, pieces=tuple(types), space_prefix=prefix))

    @classmethod
    def from_json(cls, path: str | Path, file: GgufFile) -> EngineTokenizer:
        """TokenizerSource LocalPath (S1 7.1): a Hugging Face tokenizer.json for the same vocabulary."""
        try:
            text = Path(path).read_text(encoding="utf-8")
            decoder = json.loads(text).get("decoder") or {}
            backend = Tokenizer.from_str(text)
        except OSError as error:
            raise TokenizerError(f"{path}: {error.strerror}") from error
        except Exception as error:  # json and the library each have their own way to say it
            raise TokenizerError(f"{path}: not a tokenizer.json: {error}") from error
        kinds = [decoder, *decoder.get("decoders", [])]
        if not any(kind.get("type") == "ByteLevel" for kind in kinds):
            raise TokenizerError(f"{path}: only byte-level tokenizers are supported")
        size = file.header().vocab_size
        if backend.get_vocab_size(with_added_tokens=True) > size:
            raise TokenizerError(f"{path}: the tokenizer has more tokens than the model's vocabulary of {size}")
        tokens = [backend.id_to_token(index) or "" for index in range(size)]
        added = backend.get_added_tokens_decoder()
        control = [index for index, token in added.items() if token.special]
        user = [index for index, token in added.items() if not token.special]
        return cls(backend, _vocabulary(tokens, control, user, *_special_ids(file)))

    @property
    def bos_text(self) -> str:
        """The BOS token as text, empty where the model has none (a template may use it either way)."""
        return self._text_of(self.vocabulary.bos_id)

    @property
    def eos_text(self) -> str:
        return self._text_of(self.vocabulary.eos_id)

    def _text_of(self, index: int | None) -> str:
        return "" if index is None else self.vocabulary.tokens[index]

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Ids of `text`. With parse_special, names of control tokens in it become those tokens; else they are text.

        BOS is put in front where the model asks for it and the text does not bring it along: never two of them.
        """
        with self._lock:
            self._backend.encode_special_tokens = not parse_special
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        bos = self.vocabulary.bos_id
        if self.vocabulary.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    @cached_property
    def _bytes(self) -> list[bytes | None]:
        return [None] * len(self.vocabulary.tokens)

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token stands for; empty for control tokens. Raises TokenizerError for an unknown id."""
        if not 0 <= index < len(self._bytes):
            raise TokenizerError(f"token {index} is outside the vocabulary of {len(self._bytes)}")
        known = self._bytes[index]
        if known is None:
            known = self._bytes[index] = self._decode_one(index)
        return known

    def _decode_one(self, index: int) -> bytes:
        if index in self.vocabulary.control:
            return b""
        token = self.vocabulary.tokens[index]
        if self.vocabulary.pieces:
            return sentencepiece.piece_bytes(token, self.vocabulary.pieces[index])
        if index in self.vocabulary.user_defined or any(char not in _BYTES for char in token):
            return token.encode()
        return bytes(_BYTES[char] for char in token)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a whole sequence; an incomplete character at its end is left out."""
        decoder = self.stream()
        text = "".join(decoder.feed(index) for index in ids)
        return text.removeprefix(" ") if self.vocabulary.space_prefix else text

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self)


class StreamDecoder:
    """Token by token to text; bytes of an incomplete character are held back, never shown as U+FFFD."""

    def __init__(self, tokenizer: EngineTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, index: int) -> str:
        """The characters that became complete with this token; bytes that can never become one are replaced."""
        return self._utf8.decode(self._tokenizer.token_bytes(index))


def _add_special(backend: Tokenizer, tokens: list[str], types: list[int]) -> tuple[list[int], list[int]]:
    """Tokens that a text is cut at before anything else; gives the control and the user-defined ones."""
    control = [index for index, kind in enumerate(types) if kind == _CONTROL]
    user = [index for index, kind in enumerate(types) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in control if tokens[i]])
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in user if tokens[i]])
    return control, user


def _special_ids(file: GgufFile) -> tuple[int | None, int | None, int | None, bool]:
    header = file.header()
    return header.bos_token_id, header.eos_token_id, header.eot_token_id, header.add_bos_token


def _vocabulary(
    tokens: list[str],
    control: list[int],
    user: list[int],
    bos: int | None,
    eos: int | None,
    eot: int | None,
    add_bos: bool,
) -> Vocabulary:
    ends = {index for index in (eos, eot) if index is not None}
    ends.update(index for index in control if tokens[index] in _END_OF_TURN)
    return Vocabulary(tuple(tokens), frozenset(control), frozenset(user), bos, eos, frozenset(ends), add_bos)
