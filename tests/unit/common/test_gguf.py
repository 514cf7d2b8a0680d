"""The GGUF reader: what it reads, how fast it opens, and that bad files end in one sentence."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.gguf import (
    GgufError,
    GgufFile,
    MalformedError,
    NotGgufError,
    TruncatedError,
    UnsupportedArchitectureError,
    UnsupportedTensorTypeError,
    UnsupportedTokenizerError,
    UnsupportedVersionError,
)
from common.gguf_header import SUPPORTED_TENSOR_TYPES
from common.gguf_quants import dequantise, dequantise_bytes, dequantise_rows
from tests.unit.engine.tiny_model import TinySpec, write_model

MODEL = Path(__file__).resolve().parents[3] / ".model-cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
STRING, ARRAY, UINT32 = 8, 9, 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_model(path, TinySpec(layers=1, kind="Q4_0"))
    return path


def build(*, version: int = 3, tensors: int = 0, keys: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def save(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.engine
def test_the_real_model_opens_and_says_what_it_is() -> None:
    if not MODEL.is_file():
        pytest.fail(f"the model {MODEL.name} is missing; run ./dev fetch-model", pytrace=False)
    file = GgufFile.open(MODEL)
    header = file.check_supported()
    assert (header.architecture, header.block_count, header.embedding_length) == ("llama", 30, 576)
    assert (header.head_count, header.head_count_kv, header.head_dim) == (9, 3, 64)
    assert (header.context_length, header.vocab_size, header.eos_token_id) == (8192, 49152, 2)
    assert len(file.tensors) == 272
    assert file.tensors["token_embd.weight"].shape == (49152, 576)
    assert file.metadata["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    rows = dequantise_rows(file, "token_embd.weight", np.array([5, 49151]))
    assert np.array_equal(rows, dequantise(file, "token_embd.weight")[[5, 49151]])


def test_agrees_with_the_reader_of_gguf(tiny: Path) -> None:
    reader = gguf.GGUFReader(tiny)
    with GgufFile.open(tiny) as file:
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            info = file.tensors[tensor.name]
            assert info.shape == tuple(int(size) for size in tensor.shape[::-1])
            assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
            with file.tensor_bytes(tensor.name) as raw:
                assert bytes(raw) == tensor.data.tobytes()
        assert file.metadata["llama.rope.freq_base"] == 10_000.0
        assert file.metadata.get("absent", 7) == 7
        assert file.metadata.array_length("tokenizer.ggml.tokens") == file.header().vocab_size


@pytest.mark.parametrize("name", SUPPORTED_TENSOR_TYPES)
def test_dequantises_like_gguf(name: str) -> None:
    """Every bit pattern of the blocks, scales that are no numbers included."""
    kind = gguf.GGMLQuantizationType[name]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    columns = 4 * max(block, 8)
    raw = np.random.default_rng(3).integers(0, 256, (50, columns // block * nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind).astype(np.float32)
        found = dequantise_bytes(raw.tobytes(), name, columns)
    assert found.shape == expected.shape == (50, columns)
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.spec("S1 10.4")
def test_not_a_gguf(tmp_path: Path) -> None:
    for data in (b"", b"GG", b"PK\x03\x04" + bytes(100), b"<html>"):
        with pytest.raises(NotGgufError, match=r"x\.gguf: not a GGUF file"):
            GgufFile.open(save(tmp_path, data))


def test_every_truncation_is_named(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    for size in (4, 20, 30, 200, 3000, len(data) // 2, len(data) - 1):
        with pytest.raises(TruncatedError, match=rf"truncated: .* {size} bytes"):
            GgufFile.open(save(tmp_path, data[:size]))
    with pytest.raises(TruncatedError, match=r"tensor blk\.0\.\S+ ends at byte \d+, but the file has"):
        GgufFile.open(save(tmp_path, data[: len(data) - 1]))


def test_unsupported_versions(tmp_path: Path) -> None:
    for version, words in ((1, "version 1 is"), (4, "version 4 is"), (0x03000000, "big-endian")):
        with pytest.raises(UnsupportedVersionError, match=words):
            GgufFile.open(save(tmp_path, build(version=version)))


HOSTILE = {
    "keys without end": build(keys=1 << 60),
    "tensors without end": build(tensors=1 << 62),
    "a key that is too long": build(keys=1, body=struct.pack("<Q", 1 << 40) + bytes(64)),
    "a string past the end": build(keys=1, body=text("k") + struct.pack("<IQ", STRING, 1 << 63) + bytes(64)),
    "an array past the end": build(keys=1, body=text("k") + struct.pack("<IIQ", ARRAY, UINT32, 1 << 62) + bytes(64)),
    "strings past the end": build(keys=1, body=text("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 50) + bytes(64)),
    "a string in an array past the end": build(
        keys=1, body=text("k") + struct.pack("<IIQQ", ARRAY, STRING, 3, 1 << 62) + bytes(64)
    ),
    "arrays in arrays": build(keys=1, body=text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(64)),
    "an unknown value type": build(keys=1, body=text("k") + struct.pack("<I", 99) + bytes(64)),
    "a key twice": build(keys=2, body=(text("k") + struct.pack("<II", UINT32, 1)) * 2),
    "an alignment of zero": build(keys=1, body=text("general.alignment") + struct.pack("<II", UINT32, 0)),
    "a rank of a thousand": build(tensors=1, body=text("t") + struct.pack("<I", 1000) + bytes(64)),
    "a tensor of 2**126 values": build(
        tensors=1, body=text("t") + struct.pack("<IQQIQ", 2, 1 << 63, 1 << 63, 0, 0) + bytes(64)
    ),
    "an unknown tensor type": build(tensors=1, body=text("t") + struct.pack("<IQIQ", 1, 32, 12345, 0) + bytes(64)),
    "half a block": build(tensors=1, body=text("t") + struct.pack("<IQIQ", 1, 33, 2, 0) + bytes(64)),
    "a key that is no text": build(keys=1, body=struct.pack("<Q", 2) + b"\xff\xfe" + bytes(64)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_end_in_a_sentence_without_allocating(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, HOSTILE[name])
    tracemalloc.start()
    try:
        with pytest.raises(GgufError) as caught:
            GgufFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_flipped_bytes_never_escape_as_another_error(tiny: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(tiny.read_bytes()[:20_000])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(4, 6000))] = data.draw(st.integers(0, 255))
    try:
        with GgufFile.open(save(tmp_path, bytes(raw))) as file:
            file.check_supported()
    except GgufError:
        pass


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf", TinySpec(layers=1), architecture="mamba")
    with GgufFile.open(tmp_path / "a.gguf") as file, pytest.raises(UnsupportedArchitectureError, match="'mamba'"):
        file.check_supported()
    write_model(tmp_path / "b.gguf", TinySpec(layers=1), pre="deepseek-coder")
    with GgufFile.open(tmp_path / "b.gguf") as file, pytest.raises(UnsupportedTokenizerError, match="deepseek-coder"):
        file.check_supported()
    write_model(tmp_path / "c.gguf", TinySpec(layers=1, kind="TQ2_0", width=256, ffn=256))
    with (
        GgufFile.open(tmp_path / "c.gguf") as file,
        pytest.raises(UnsupportedTensorTypeError, match=r"tensor token_embd\.weight has type TQ2_0"),
    ):
        file.check_supported()


def test_a_header_that_contradicts_itself(tmp_path: Path, tiny: Path) -> None:
    data = tiny.read_bytes().replace(b"llama.block_count", b"llama.block_cuont")
    with (
        GgufFile.open(save(tmp_path, data)) as file,
        pytest.raises(MalformedError, match=r"llama\.block_count is missing"),
    ):
        file.header()


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        GgufFile.open(tmp_path / "absent.gguf")


def split(path: Path, folder: Path, swap: bool = False) -> list[Path]:
    """The tiny model in two files as llama.cpp's gguf-split names them, the second with the last tensors."""

    with GgufFile.open(path) as file:
        names = list(file.tensors)
        halves = [names[: len(names) // 2], names[len(names) // 2 :]]
        parts = []
        for number, half in enumerate(halves):
            target = folder / f"m-{number + 1:05}-of-00002.gguf"
            writer = gguf.GGUFWriter(str(target), "llama")
            writer.add_uint16("split.no", 1 - number if swap else number)
            writer.add_uint16("split.count", 2)
            if number == 0:
                for key in ("block_count", "embedding_length", "context_length", "feed_forward_length"):
                    writer.add_uint32(f"llama.{key}", file.metadata[f"llama.{key}"])
                writer.add_head_count(4)
                writer.add_layer_norm_rms_eps(1e-5)
            for name in half:
                writer.add_tensor(name, dequantise(file, name))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            parts.append(target)
    return parts


def test_a_model_in_several_files(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", TinySpec(layers=1))
    parts = split(tmp_path / "m.gguf", tmp_path)
    for path in parts:
        with GgufFile.open(path) as file, GgufFile.open(tmp_path / "m.gguf") as whole:
            assert list(file.tensors) == list(whole.tensors) and file.header().block_count == 1
            assert file.paths == [str(part) for part in parts]
            for name in whole.tensors:
                assert np.array_equal(dequantise(file, name), dequantise(whole, name))
    parts[1].rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        GgufFile.open(parts[0])
    (tmp_path / "alone.gguf").write_bytes(parts[0].read_bytes())
    with pytest.raises(MalformedError, match="one of 2 parts"):
        GgufFile.open(tmp_path / "alone.gguf")
    split(tmp_path / "m.gguf", tmp_path, swap=True)
    with pytest.raises(MalformedError, match="not part 2"):
        GgufFile.open(parts[0])
