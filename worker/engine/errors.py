"""The engine's expected errors: each is one sentence for a person and never a traceback (S1 10.4, 10.8)."""

from __future__ import annotations


class EngineError(ValueError):
    """A request or a configuration that this engine cannot serve."""


class ChatTemplateError(EngineError):
    """The model's chat template failed, raised or went over its limits; the text names the template's line."""


class TokenizerError(EngineError):
    """The tokenizer cannot be built, or a token id is outside its vocabulary."""
