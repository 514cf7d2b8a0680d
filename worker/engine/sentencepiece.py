"""SentencePiece-style vocabularies (Llama 2, Mistral, Gemma) as a BPE model of the `tokenizers` library.

Such a file holds scores instead of merges: of all neighbours whose join is a token, the one with the highest score is
joined first. Each way to split a token in two tokens is therefore a merge, ordered by the joined token's score.
Spaces are written as U+2581; what has no token of its own becomes byte tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, models, normalizers

SPACE = "\u2581"
UNKNOWN_PIECE = "\u2585"  # what llama.cpp shows for the unknown token
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # gguf.TokenType


def merges_of(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """All merges of the normal tokens, best first; of equal ones, the one with the earlier parts."""
    index = {token: at for at, token in enumerate(tokens) if kinds[at] not in (CONTROL, BYTE, UNKNOWN)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, at in index.items():
        if kinds[at] != NORMAL:
            continue
        score = -scores[at]
        for cut in range(1, len(token)):
            left = index.get(token[:cut])
            if left is not None:
                right = index.get(token[cut:])
                if right is not None:
                    found.append((score, left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def backend(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], unknown: int | None, space_prefix: bool
) -> Tokenizer:
    """The library's tokenizer; special tokens are the caller's business."""
    known = None if unknown is None else tokens[unknown]
    has_bytes = any(kind == BYTE for kind in kinds)
    model = models.BPE(
        vocab={token: at for at, token in reversed(list(enumerate(tokens)))},
        merges=merges_of(tokens, scores, kinds),
        unk_token=known,
        byte_fallback=has_bytes,
        fuse_unk=False,
    )
    made = Tokenizer(model)
    replace = normalizers.Replace(" ", SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if space_prefix else replace
    return made


def piece_bytes(token: str, kind: int) -> bytes:
    """What a token stands for."""
    if kind == BYTE:
        return bytes([int(token[3:5], 16)])
    if kind == UNKNOWN:
        return UNKNOWN_PIECE.encode()
    return (token if kind == USER_DEFINED else token.replace(SPACE, " ")).encode()
