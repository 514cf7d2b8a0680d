"""The CPU figures of the engine bench."""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from bench._engine_check import correctness
from bench._engine_peer import Peer
from bench.engine import (
    DECODED,
    NO_PEER,
    Series,
    _bandwidth,
    _cores,
    _decode,
    _open_times,
    _Pinned,
    _prefill,
    _seconds,
    _starts,
)
from common.gguf import GgufFile
from worker.engine.cpu_cache import Arena, _address, pack
from worker.engine.cpu_model import CpuPart
from worker.engine.cpu_native import Kernels, load_kernels
from worker.engine.cpu_objects import find_object, instruction_sets
from worker.engine.cpu_plan import StagePlan
from worker.engine.engine import Engine
from worker.engine.parts import whole

CONTEXT = 2304
ROUNDS_BUDGET_S = 220  # no further round begins after it: the whole bench is to end within eight minutes
WIDE_BYTES = 256 << 20  # of the bandwidth measurement: several times the largest cache, in the same pages as weights


def load(path: Path, kernels: Kernels, threads: int, slots: int = 1, context: int = CONTEXT) -> CpuPart:
    file = GgufFile.open(path)
    header = file.check_supported()
    part = CpuPart(StagePlan(file, header, whole(header)), kernels, context, threads, lambda *_: None, slots)
    part.warm_up(lambda *_: None)
    return part


def _pair(series: Series, key: str, ours: float, theirs: float | None) -> None:
    if theirs:
        series.add(key, ours / theirs)


def _bytes_per_token(part: CpuPart, position: int) -> int:
    """What a decode step reads at a position: the weights (of the embedding only a row), keys and values."""
    return part.weights_bytes + part.kv_bytes * position // (part.slots * part.max_context)


def _fill(part: CpuPart) -> None:
    """Real keys and values at all positions: memory that was never written is one shared page of zeros."""
    for at in range(0, part.max_context, part.chunk):
        part.logits([100 + at % 1000 + i for i in range(part.chunk)], at)


def _main_round(
    series: Series, part: CpuPart, kernels: Kernels, path: Path, peer: Peer | None, wide_memory: Arena
) -> None:
    for threads in range(1, min(2, len(os.sched_getaffinity(0))) + 1):
        tail, cores = f"t{threads}", _cores(threads)
        part.use_threads(threads)
        with _Pinned(threads):
            speed = series.add(f"decode_tps_{tail}", _decode(part, 128))
            wide = series.add(
                f"read_bytes_per_s_{tail}", _bandwidth(kernels, wide_memory.address, wide_memory.nbytes, threads)
            )
            series.add(f"decode_vs_bandwidth_{tail}", speed * _bytes_per_token(part, 128 + DECODED // 2) / wide)
            prefill = {n: series.add(f"prefill{n}_tps_{tail}", _prefill(part, n)) for n in (128, 512)}
        if peer is not None:
            _pair(series, f"decode_vs_peer_{tail}", speed, peer.measure(path, threads, cores, generate=DECODED))
            for n, value in prefill.items():
                _pair(series, f"prefill{n}_vs_peer_{tail}", value, peer.measure(path, threads, cores, prompt=n))


def _other_format(series: Series, part: CpuPart, path: Path, peer: Peer, decode: str, prefill: str, top: int) -> None:
    for threads in range(1, top + 1):
        part.use_threads(threads)
        with _Pinned(threads):
            speed, first = _decode(part, 128), _prefill(part, 128)
        cores = _cores(threads)
        _pair(series, decode.format(threads), speed, peer.measure(path, threads, cores, generate=DECODED))
        _pair(series, prefill.format(threads), first, peer.measure(path, threads, cores, prompt=128))


def _long_context(part: CpuPart) -> float:
    """Decode far in the context over decode near its start."""
    return _decode(part, 2048, 24) / _decode(part, 128, 24)


def _batch(part: CpuPart) -> float:
    """Tokens of eight sequences in one step over those of one."""
    alone, together = [], []
    for at in range(20):
        alone.append(_seconds(lambda at=at: part.batch_logits([50], [100 + at], [0])))
        together.append(_seconds(lambda at=at: part.batch_logits(list(range(50, 58)), [100 + at] * 8, range(8))))
    return 8 * statistics.median(alone) / statistics.median(together)


def _bit_identical(part: CpuPart) -> bool:
    """Across thread counts and chunk sizes, on the real model (the tests do stages too)."""
    ids = [int(token) for token in np.random.default_rng(3).integers(10, 40_000, 100)]
    seen = []
    for threads, sizes in ((1, [64, 36]), (part._team.threads, [64, 36]), (part._team.threads, [1, 13, 50, 36])):
        part.use_threads(threads)
        at = 0
        for size in sizes:
            logits = part.logits(ids[at : at + size], at)
            at += size
        seen.append(logits)
    return all(np.array_equal(seen[0], other) for other in seen[1:])


def _repack(path: Path, kernels: Kernels, threads: int) -> float:
    with GgufFile.open(path) as file:
        header = file.header()
        plan = StagePlan(file, header, whole(header))
        memory = mmap.mmap(-1, plan.nbytes)
        address = _address(memory)
        return plan.source_bytes / min(
            _seconds(lambda: pack(plan, kernels, threads, lambda *_: None, address)) for _ in "12"
        )


def on_cpu(arguments: argparse.Namespace) -> dict[str, object]:
    kernels = load_kernels()
    if kernels is None:
        raise SystemExit("bench: no C kernels for this machine; --device measures the portable backend")
    path: Path = arguments.model
    peer = Peer(arguments.peer) if arguments.peer else None
    threads = len(os.sched_getaffinity(0))
    figures: dict[str, object] = {"kernels": kernels.instruction_set}
    series = Series()
    part = load(path, kernels, threads)
    batched = load(path, kernels, threads, slots=8, context=256)
    q4_0_path = peer.as_q4_0(path, path.parent) if peer else None
    q4_0 = load(q4_0_path, kernels, threads) if q4_0_path else None
    gemma = load(arguments.gemma, kernels, 1) if arguments.gemma else None
    wide_memory = Arena.anonymous(WIDE_BYTES, "empty")
    np.frombuffer(wide_memory.bytes(), np.uint8)[:] = 1
    for loaded in filter(None, (part, batched, gemma)):
        _fill(loaded)
    avx2 = None
    if "avx2" in instruction_sets():
        avx2 = load(path, Kernels("avx2", *find_object("avx2")), 1)
    begin = time.monotonic()
    for done in range(arguments.rounds):
        if done and time.monotonic() - begin > ROUNDS_BUDGET_S * done / (done + 1):
            print(f"bench: {done} rounds instead of {arguments.rounds}: this machine is slow or busy", file=sys.stderr)
            arguments.rounds = done
            break
        _main_round(series, part, kernels, path, peer, wide_memory)
        part.use_threads(1)
        with _Pinned(1):
            series.add("decode_2048_over_128", _long_context(part))
        for count in range(1, min(2, threads) + 1):
            batched.use_threads(count)
            with _Pinned(count):
                series.add("batch8_ratio" if count == 1 else f"batch8_ratio_t{count}", _batch(batched))
        with _Pinned(1):
            if avx2 is not None:
                speed = series.add("avx2_decode_tps_t1", _decode(avx2, 128))
        if peer and avx2 is not None:
            _pair(series, "avx2_decode_vs_peer_t1", speed, peer.measure(path, 1, _cores(1), generate=DECODED))
        if peer and q4_0 and q4_0_path:
            names = ("decode_vs_peer_q4_0_t{}", "prefill128_vs_peer_q4_0_t{}")
            _other_format(series, q4_0, q4_0_path, peer, *names, min(2, threads))
        if gemma is not None:
            with _Pinned(1):
                series.add("gemma_decode_2048_over_128", _long_context(gemma))
            if peer:
                names = ("gemma_decode_vs_peer_t{}", "gemma_prefill128_vs_peer_t{}")
                _other_format(series, gemma, arguments.gemma, peer, *names, 1)
    # What the bytes that must be read allow; a model with small layers and several key-value heads reads many.
    figures["decode_2048_over_128_bound"] = _bytes_per_token(part, 128) / _bytes_per_token(part, 2048)
    figures["bit_identical"] = _bit_identical(part)
    del wide_memory
    figures["repack_bytes_per_s"] = _repack(path, kernels, threads)
    for loaded in filter(None, (part, batched, q4_0, gemma, avx2)):
        loaded.close()
    if not arguments.quick:
        figures |= _slow_figures(arguments, path, peer)
    figures |= {**_open_times(path), **_starts(path, arguments.rounds), **series.figures()}
    return _with_reasons(figures, arguments, bool(q4_0))


def _slow_figures(arguments: argparse.Namespace, path: Path, peer: Peer | None) -> dict[str, object]:
    """The portable backend, and the float32 reference."""
    engine = Engine.load(path, max_context=512)
    figures = correctness(engine)
    engine.close()
    os.environ["SMQ_ENGINE_KERNELS"] = "portable"
    try:
        engine = Engine.load(path, max_context=512)
        engine.warm_up()
    finally:
        del os.environ["SMQ_ENGINE_KERNELS"]
    series = Series()
    for _ in range(arguments.rounds):
        with _Pinned(1):
            speed = series.add("portable_decode_tps_t1", _decode(engine.model, 128, 16))
        if peer:
            theirs = peer.measure(path, 1, _cores(1), generate=DECODED)
            _pair(series, "portable_decode_vs_peer_t1", speed, theirs)
    engine.close()
    return {**figures, **series.figures()}


def _with_reasons(figures: dict[str, object], arguments: argparse.Namespace, has_q4_0: bool) -> dict[str, object]:
    """Every promised key is there; what was not measured says why."""
    reasons: dict[str, str] = {}
    for tail in ("t1", "t2"):
        one_core = "one core only"
        for key in ("decode_tps", "prefill128_tps", "prefill512_tps", "decode_vs_bandwidth"):
            reasons[f"{key}_{tail}"] = one_core
        for key in ("decode_vs_peer", "prefill128_vs_peer", "prefill512_vs_peer"):
            reasons[f"{key}_{tail}"] = one_core if arguments.peer else NO_PEER
        for key in ("decode_vs_peer_q4_0", "prefill128_vs_peer_q4_0"):
            reasons[f"{key}_{tail}"] = "no llama-quantize beside --peer" if arguments.peer and not has_q4_0 else NO_PEER
    for key in ("gemma_decode_vs_peer_t1", "gemma_prefill128_vs_peer_t1"):
        reasons[key] = NO_PEER if not arguments.peer else "no --gemma given"
    reasons["avx2_decode_vs_peer_t1"] = "no AVX2 on this machine" if arguments.peer else NO_PEER
    reasons["portable_decode_vs_peer_t1"] = NO_PEER if not arguments.peer else "--quick"
    for key in ("rms_dlogprob_max", "argmax_agreement_min", "perplexity_ratio"):
        reasons[key] = "--quick"
    for key, why in reasons.items():
        if key not in figures:
            figures[key], figures[f"{key}_why"] = None, why
    return figures
