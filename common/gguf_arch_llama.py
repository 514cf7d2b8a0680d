"""Llama 2 and 3.x, SmolLM2, Mistral."""

from common.gguf_arch import Architecture

ARCHITECTURE = Architecture("llama", interleaved_rope=True)
