"""Qwen 2 and 2.5."""

from common.gguf_arch import Architecture

ARCHITECTURE = Architecture("qwen2", qkv_bias=True)
