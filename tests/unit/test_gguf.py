"""GGUFFile reads what the gguf package writes; damaged files raise a typed error."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import ggufs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberline.core.errors import EmberlineError, ModelFileError, UnsupportedModel
from emberline.hub.convert import convert_gguf
from emberline.hub.dequant import dequantise, round_to_bf16
from emberline.hub.gguf import TENSOR_TYPES, UNSUPPORTED_TYPES, GGUFFile


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    ggufs.write(path, quant="Q8_0")
    return path.read_bytes()


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    values = ggufs.write(path, extra={"attention.sliding_window": 32})
    with GGUFFile(path) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["llama.attention.sliding_window"] == 32
        assert file.metadata["tokenizer.ggml.tokens"] == ggufs.BPE_TOKENS
        assert list(file.metadata["tokenizer.ggml.token_type"])[:3] == [3, 3, 1]
        assert set(file.tensors) == set(values)
        for name, value in values.items():
            tensor = file.tensors[name]
            assert tensor.shape == value.shape
            assert bytes(file.raw_bytes(tensor)) == value.tobytes()


@pytest.mark.parametrize("number", TENSOR_TYPES)
def test_dequantises_random_blocks_like_the_gguf_package(number: int) -> None:
    kind = TENSOR_TYPES[number]
    rng = np.random.default_rng(number)
    blocks = rng.integers(0, 256, (500, kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        ours = dequantise(blocks.data.cast("B"), kind.name, kind.block_bytes)
        theirs = gguf.quants.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType(number)).reshape(-1)
    assert len(ours) == 500 * kind.block_elements
    assert np.array_equal(ours, theirs.astype(np.float32), equal_nan=True)


def decode_block(name: str, block: bytes) -> list[float]:
    kind = next(t for t in TENSOR_TYPES.values() if t.name == name)
    assert len(block) == kind.block_bytes
    return [float(value) for value in dequantise(memoryview(block), name, kind.block_bytes)]


def half(value: float) -> bytes:
    return struct.pack("<e", value)


# One block of each format, built from the published layout, and its values in order.
# A byte that is set in one place only shows a wrong order of groups or of the bits within a group.
IQ4_CODES = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
E2M1_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_q2_k_block() -> None:
    scales = bytes(i | (15 - i) << 4 for i in range(16))  # group i: scale i, minimum 15 - i
    numbers = [(3 * i + i // 16) % 4 for i in range(256)]
    quants = bytearray(64)
    for i, number in enumerate(numbers):
        quants[i // 128 * 32 + i % 32] |= number << 2 * (i % 128 // 32)
    values = decode_block("Q2_K", scales + bytes(quants) + half(0.5) + half(0.25))
    assert values == [0.5 * (i // 16) * n - 0.25 * (15 - i // 16) for i, n in enumerate(numbers)]


def test_q3_k_block() -> None:
    scales = [4 * i - 32 + i % 3 for i in range(16)]
    numbers = [(5 * i + i // 16) % 8 - 4 for i in range(256)]
    mask, quants, packed = bytearray(32), bytearray(64), bytearray(12)
    for i, number in enumerate(numbers):
        quants[i // 128 * 32 + i % 32] |= (number + 4) % 4 << 2 * (i % 128 // 32)
        mask[i % 32] |= (number >= 0) << i // 32
    for i, scale in enumerate(scales):
        packed[i % 8] |= (scale + 32) % 16 << 4 * (i // 8)
        packed[8 + i % 4] |= (scale + 32) // 16 << 2 * (i // 4)
    values = decode_block("Q3_K", bytes(mask + quants + packed) + half(0.125))
    assert values == [0.125 * scales[i // 16] * n for i, n in enumerate(numbers)]


def test_iq4_nl_block() -> None:
    block = half(-0.5) + bytes(i | (15 - i) << 4 for i in range(16))
    assert decode_block("IQ4_NL", block) == [-0.5 * code for code in IQ4_CODES + IQ4_CODES[::-1]]


def test_iq4_xs_block() -> None:
    scales = [-32, 31, -1, 0, 1, 17, -20, 9]
    high = sum((scale + 32) // 16 << 2 * i for i, scale in enumerate(scales))
    low = bytes((scales[2 * i] + 32) % 16 | (scales[2 * i + 1] + 32) % 16 << 4 for i in range(4))
    codes = [(7 * i + i // 32) % 16 for i in range(256)]
    quants = bytes(codes[at + i] | codes[at + 16 + i] << 4 for at in range(0, 256, 32) for i in range(16))
    values = decode_block("IQ4_XS", half(0.25) + struct.pack("<H", high) + low + quants)
    assert values == [0.25 * scales[i // 32] * IQ4_CODES[code] for i, code in enumerate(codes)]


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 130, 251])
def test_mxfp4_block(exponent: int) -> None:
    block = bytes([exponent]) + bytes(i | (15 - i) << 4 for i in range(16))
    expected = [2.0 ** (exponent - 127) * value for value in E2M1_VALUES + E2M1_VALUES[::-1]]
    assert decode_block("MXFP4", block) == expected


@pytest.mark.parametrize("name", ["BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_dequantised_values_are_near_the_originals(name: str) -> None:
    """The gguf package cannot quantise to K and IQ formats; the test of random blocks covers them."""
    kind = next(t for t in TENSOR_TYPES.values() if t.name == name)
    x = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    raw = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name])
    near = dequantise(raw.data.cast("B"), kind.name, kind.block_bytes).reshape(x.shape)
    bound = {"BF16": 0.01, "Q8_0": 0.02, "Q4_0": 0.4, "Q4_1": 0.3, "Q5_0": 0.2, "Q5_1": 0.15, "MXFP4": 1.1}[name]
    assert np.abs(near - x).max() < bound


def test_bf16_rounds_to_nearest_even() -> None:
    x = np.array([1.0, 1.00390625, 1.01171875, -1.00390625, 3.4e38, np.inf, -np.inf, np.nan, 1e-40], dtype=np.float32)
    bits = [0x3F80, 0x3F80, 0x3F82, 0xBF80, 0x7F80, 0x7F80, 0xFF80, 0x7FC0, 0x0001]
    assert round_to_bf16(x).tolist() == bits


def header(tensor_count: int = 0, key_count: int = 0, version: int = 3, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count) + rest


def text(s: bytes) -> bytes:
    return struct.pack("<Q", len(s)) + s


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = 2**63
DAMAGED = {
    "empty": b"",
    "magic": b"GGML" + bytes(20),
    "short": b"GGUF\3\0\0",
    "many-tensors": header(tensor_count=HUGE),
    "many-keys": header(key_count=HUGE),
    "long-string": header(key_count=1, rest=struct.pack("<Q", HUGE)),
    "bad-utf8": header(key_count=1, rest=text(b"\xff\xfe") + struct.pack("<IB", 0, 1)),
    "bad-type": header(key_count=1, rest=text(b"a") + struct.pack("<I", 99)),
    "bad-bool": header(key_count=1, rest=text(b"a") + struct.pack("<IB", 7, 2)),
    "big-array": header(key_count=1, rest=text(b"a") + struct.pack("<IIQ", 9, 0, HUGE)),
    "array-past-end": header(key_count=1, rest=text(b"a") + struct.pack("<IIQ", 9, 4, 1000)),
    "nested-arrays": header(key_count=1, rest=text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000),
    "key-twice": header(key_count=2, rest=(text(b"a") + struct.pack("<IB", 0, 1)) * 2),
    "alignment": header(key_count=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 3)),
    "alignment-text": header(key_count=1, rest=text(b"general.alignment") + struct.pack("<I", 8) + text(b"32")),
    "no-dims": header(1, rest=tensor(b"t", [])),
    "many-dims": header(1, rest=tensor(b"t", [1] * 5)),
    "zero-dim": header(1, rest=tensor(b"t", [0, 4])),
    "overflow-dims": header(1, rest=tensor(b"t", [2**40, 2**40, 2**40])),
    "past-end": header(1, rest=tensor(b"t", [64]) + bytes(64)),
    "far-offset": header(1, rest=tensor(b"t", [4], offset=2**63) + bytes(512)),
    "misaligned": header(1, rest=tensor(b"t", [4], offset=4) + bytes(512)),
    "half-block": header(1, rest=tensor(b"t", [16], kind=8) + bytes(512)),
    "unknown-type": header(1, rest=tensor(b"t", [4], kind=1000) + bytes(512)),
    "tensor-twice": header(2, rest=tensor(b"t", [4]) + tensor(b"t", [4], offset=32) + bytes(512)),
    "overlap": header(2, rest=tensor(b"a", [64]) + tensor(b"b", [64], offset=32) + bytes(1024)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_headers_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(ModelFileError):
        GGUFFile(path)


@pytest.mark.parametrize("data", [header(version=1), header(version=4), header(version=3 << 24)])
def test_other_versions_are_not_supported(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "v.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModel):
        GGUFFile(tmp_path / "v.gguf")


def test_unsupported_quantisation_is_named(tmp_path: Path) -> None:
    (tmp_path / "q.gguf").write_bytes(header(1, rest=tensor(b"t", [256], kind=16) + bytes(512)))
    with pytest.raises(UnsupportedModel, match=r"'t' in .*q\.gguf has GGUF type IQ2_XXS") as raised:
        GGUFFile(tmp_path / "q.gguf")
    assert "Q2_K" in str(raised.value.hint)
    (tmp_path / "old.gguf").write_bytes(header(1, rest=tensor(b"t", [256], kind=31) + bytes(512)))
    with pytest.raises(UnsupportedModel, match="type 31"):
        GGUFFile(tmp_path / "old.gguf")


def test_type_table_agrees_with_the_gguf_package() -> None:
    published = {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind])
        for kind in gguf.GGMLQuantizationType
        if kind.value in TENSOR_TYPES
    }
    ours = {number: (t.name, t.block_elements, t.block_bytes) for number, t in TENSOR_TYPES.items()}
    assert ours == published
    unsupported = {kind.value: kind.name for kind in gguf.GGMLQuantizationType if kind.value in UNSUPPORTED_TYPES}
    assert unsupported == UNSUPPORTED_TYPES
    assert not TENSOR_TYPES.keys() & UNSUPPORTED_TYPES.keys()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_never_crash(sample: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """The reader and the whole conversion succeed or raise a typed error."""
    damaged = bytearray(sample)
    metadata_ends = 8000
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, metadata_ends))
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    target = tmp_path / "out"
    try:
        convert_gguf(path, target)
    except EmberlineError:
        assert not target.exists()
    else:
        for file in target.iterdir():
            file.unlink()
        target.rmdir()
    assert [p.name for p in tmp_path.iterdir()] == ["damaged.gguf"]
