"""Qwen 3, dense."""

from common.gguf_arch import Architecture

ARCHITECTURE = Architecture("qwen3", qk_norm=True)
