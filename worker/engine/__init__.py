"""The inference engine: GGUF models on tinygrad, as a library and as the worker's child process."""
