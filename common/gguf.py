"""GGUF model files: what the rest of the project uses (reader: gguf_file, facts and refusals: gguf_header)."""

from common.gguf_file import GgufFile, TensorInfo, part_names
from common.gguf_header import ModelHeader, check_tokenizer
from common.gguf_metadata import (
    GgufError,
    MalformedError,
    Metadata,
    NotGgufError,
    TruncatedError,
    UnsupportedArchitectureError,
    UnsupportedTensorTypeError,
    UnsupportedTokenizerError,
    UnsupportedVersionError,
)

__all__ = [
    "GgufError",
    "GgufFile",
    "MalformedError",
    "Metadata",
    "ModelHeader",
    "NotGgufError",
    "TensorInfo",
    "TruncatedError",
    "UnsupportedArchitectureError",
    "UnsupportedTensorTypeError",
    "UnsupportedTokenizerError",
    "UnsupportedVersionError",
    "check_tokenizer",
    "part_names",
]
