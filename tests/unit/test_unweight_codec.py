"""The weight codec is lossless, numpy and native write the same bytes, damage is noticed, codes are optimal."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.errors import ModelFileError
from emberline.kernels.cpu.library import find_library
from emberline.unweight.codec import WeightCodec, select_weight_codec
from emberline.unweight.format import BLOCK_ELEMENTS, BLOCK_STREAMS, INDEX_ENTRY_BYTES, Bytes, max_coded_bytes
from emberline.unweight.prefix_code import PrefixCode, entropy_bits

NATIVE, PLAIN = select_weight_codec(find_library()), select_weight_codec(None)
CODECS = pytest.mark.parametrize("codec", [NATIVE, PLAIN], ids=lambda codec: codec.name)
SIZES = [
    1,
    2,
    3,
    4,
    5,
    15,
    16,
    17,
    1000,
    BLOCK_ELEMENTS - 1,
    BLOCK_ELEMENTS,
    BLOCK_ELEMENTS + 1,
    2 * BLOCK_ELEMENTS + 77,
]


def gaussian(count: int, width: int, seed: int = 0) -> Bytes:
    """The top bytes of float32 numbers: bf16 where width is 2."""
    numbers = (np.random.default_rng(seed).standard_normal(count) * 0.02).astype("<f4")
    return np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, 4)[:, 4 - width :]).reshape(-1)


def uniform(count: int, width: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, count * width, np.uint8)


def skewed(count: int, width: int, seed: int = 0) -> Bytes:
    """Return symbols of very different frequency, for codes of all lengths."""
    return (np.random.default_rng(seed).geometric(0.4, count * width) % 256).astype(np.uint8)


def zeros(count: int, width: int, seed: int = 0) -> Bytes:
    return np.zeros(count * width, np.uint8)


def fit_code(codec: WeightCodec, elements: Bytes, width: int) -> PrefixCode:
    return PrefixCode.from_counts(codec.count_symbols(elements, width))


def round_trip(codec: WeightCodec, elements: Bytes, width: int) -> int:
    """Encode and decode, compare, and return the coded size in bytes."""
    code = fit_code(codec, elements, width)
    coded, index = codec.encode(elements, width, code)
    out = np.full_like(elements, 0xA5)
    assert codec.decode(coded, index, width, code, out) == -1
    assert np.array_equal(out, elements)
    return len(coded) + len(index)


def test_the_native_codec_is_what_is_tested() -> None:
    assert NATIVE.name == "native"


@CODECS
def test_all_bf16_patterns_round_trip(codec: WeightCodec) -> None:
    """NaN payloads, infinities, denormals and -0 among them; in order, and mixed among many weights of one exponent."""
    patterns = np.arange(1 << 16, dtype="<u2")
    round_trip(codec, patterns.view(np.uint8), 2)
    mixed = np.concatenate([patterns, np.full(100_000, 0x3C01, "<u2")])
    np.random.default_rng(1).shuffle(mixed)
    round_trip(codec, mixed.view(np.uint8), 2)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("make", [gaussian, uniform, skewed, zeros])
def test_both_codecs_write_the_same_bytes_and_read_each_other(make: Callable[..., Bytes], width: int) -> None:
    for count in SIZES:
        elements = make(count, width)
        code = fit_code(NATIVE, elements, width)
        assert np.array_equal(NATIVE.count_symbols(elements, width), PLAIN.count_symbols(elements, width))
        native, plain = NATIVE.encode(elements, width, code), PLAIN.encode(elements, width, code)
        assert np.array_equal(native[0], plain[0]) and np.array_equal(native[1], plain[1])
        assert len(native[0]) <= max_coded_bytes(count, width)
        both = count < BLOCK_ELEMENTS - 1 or (make is gaussian and width == 2)
        for codec in (NATIVE, PLAIN) if both else (NATIVE,):
            out = np.full_like(elements, 0xA5)
            assert codec.decode(*native, width, code, out) == -1 and np.array_equal(out, elements)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3 * BLOCK_ELEMENTS), st.sampled_from([1, 2, 4]), st.floats(0.01, 0.99), st.integers(0, 99))
def test_round_trip_of_any_size_and_skew(count: int, width: int, skew: float, seed: int) -> None:
    elements = (np.random.default_rng(seed).geometric(skew, count * width) % 256).astype(np.uint8)
    size = round_trip(NATIVE, elements, width)
    counts = NATIVE.count_symbols(elements, width)
    bound = (width - 1) * count + count * entropy_bits(counts) / 8
    assert bound <= size + 1e-6


def test_gaussian_weights_are_near_the_bound() -> None:
    """Code, index and padding of streams together are within one percent of the bound."""
    elements = gaussian(4 * BLOCK_ELEMENTS, 2)
    bound = 8 + entropy_bits(NATIVE.count_symbols(elements, 2))
    assert bound < 8 * round_trip(NATIVE, elements, 2) / (4 * BLOCK_ELEMENTS) < 1.01 * bound < 10.8


def test_golden_bytes() -> None:
    """Two of three weights have the exponent 127 (a bit: 0), one has 128 (1): streams 0, 1, 0; signs and mantissas."""
    elements = np.array([0x3F80, 0xC07F, 0x3F81], "<u2").view(np.uint8)
    for codec in (NATIVE, PLAIN):
        code = fit_code(codec, elements, 2)
        assert (code.first_coded_symbol, str(code)) == (127, "11")
        coded, index = codec.encode(elements, 2, code)
        assert coded.tobytes() == bytes.fromhex("00 01 00 00 ff 01")
        assert index.tobytes() == bytes.fromhex("0100 0100 0100 0000") + zlib.crc32(coded).to_bytes(4, "little")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65, 127, 128, 1000, 12345])
def test_crc32_equals_zlib(size: int) -> None:
    data = uniform(size, 1)
    assert NATIVE.crc32(data) == PLAIN.crc32(data) == zlib.crc32(data.tobytes())


def test_every_damaged_byte_is_noticed() -> None:
    elements = gaussian(300, 2)
    code = fit_code(NATIVE, elements, 2)
    coded, index = NATIVE.encode(elements, 2, code)
    for codec in (NATIVE, PLAIN):
        out = np.empty_like(elements)
        for where, other in ((coded, index), (index, coded)):
            for at in range(len(where)):
                bad = where.copy()
                bad[at] ^= 1 << at % 8
                args = (bad, other) if where is coded else (other, bad)
                assert codec.decode(*args, 2, code, out) == 0
        for cut in range(len(coded)):
            assert codec.decode(coded[:cut], index, 2, code, out) == 0


@CODECS
def test_single_symbol_code_accepts_both_bits(codec: WeightCodec) -> None:
    elements = np.full(400, 0x77, np.uint8)
    code = fit_code(codec, elements, 1)
    coded, index = codec.encode(elements, 1, code)
    for bits in (coded, ~coded):
        out = np.zeros_like(elements)
        assert codec.decode(bits, index, 1, code, out, verify_crc=False) == -1 and np.array_equal(out, elements)


def test_streams_must_end_where_the_index_says() -> None:
    """Without a CRC check too, bytes outside a stream are an error."""
    elements = gaussian(3000, 2)
    code = fit_code(NATIVE, elements, 2)
    coded, index = NATIVE.encode(elements, 2, code)
    sizes = index[:8].view("<u2")
    for codec in (NATIVE, PLAIN):
        out = np.empty_like(elements)
        assert codec.decode(coded, index, 2, code, out, verify_crc=False) == -1
        for changes in ([1, -1, 0, 0], [0, 0, 1, -1], [0, 0, -1, 1], [0, 0, 0, 1], [0, 0, 0, -1]):
            bad = index.copy()
            bad[:8] = (sizes + np.array(changes)).astype("<u2").view(np.uint8)
            assert codec.decode(np.append(coded, np.uint8(0)), bad, 2, code, out, verify_crc=False) == 0


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([NATIVE, PLAIN]), st.sampled_from([1, 2, 4]))
def test_without_checks_any_bytes_are_safe(data: st.DataObject, codec: WeightCodec, width: int) -> None:
    """What the bytes mean is anyone's guess; nothing outside `out` is written, and the answer is a block or -1."""
    count = data.draw(st.integers(1, 700))
    code = fit_code(NATIVE, skewed(2000, width), width)
    sizes = data.draw(st.lists(st.integers(0, 400), min_size=BLOCK_STREAMS, max_size=BLOCK_STREAMS))
    coded = np.frombuffer(data.draw(st.binary(min_size=0, max_size=2000 + 3 * 700)), np.uint8)
    index = np.zeros(INDEX_ENTRY_BYTES, np.uint8)
    index[:8] = np.array(sizes, "<u2").view(np.uint8)
    guarded = np.full(width * count + 128, 0x5A, np.uint8)
    assert codec.decode(coded, index, width, code, guarded[64:-64], verify_crc=False) in (-1, 0)
    assert (guarded[:64] == 0x5A).all() and (guarded[-64:] == 0x5A).all()


def huffman_bits(counts: list[int]) -> int:
    """Return the bits of an unlimited Huffman code: each merge adds a bit to all symbols below it."""
    heap = [count for count in counts if count]
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        total += both
        heapq.heappush(heap, both)
    return total


@given(st.lists(st.integers(0, 50), min_size=2, max_size=256).filter(lambda counts: sum(map(bool, counts)) > 1))
def test_codes_are_complete_and_optimal_where_the_limit_does_not_bind(few: list[int]) -> None:
    counts = np.zeros(256, np.uint64)
    counts[: len(few)] = few
    code = PrefixCode.from_counts(counts)
    parsed = PrefixCode.parse(code.first_coded_symbol, str(code))  # raises for incomplete codes
    assert np.array_equal(parsed.lengths, code.lengths)
    assert ((code.lengths > 0) == (counts > 0)).all()
    assert code.total_bits(counts) >= huffman_bits(few)
    if code.lengths.max() < 11:
        assert code.total_bits(counts) == huffman_bits(few)


def test_limited_code_is_optimal() -> None:
    """With Fibonacci counts, each symbol needs one bit more than the one before: 15 for the rarest."""
    fibonacci = [1, 1]
    while len(fibonacci) < 16:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    counts = np.zeros(256, np.uint64)
    counts[:16] = fibonacci
    assert PrefixCode.from_counts(counts).total_bits(counts) == best_limited(tuple(sorted(fibonacci, reverse=True)), 11)


def best_limited(counts: tuple[int, ...], limit: int) -> int:
    """Find the optimum by dynamic programming over the number of codes of each length."""
    best = {(0, 1): 0}  # (symbols placed, codes free at this depth) -> bits
    for length in range(1, limit + 1):
        after: dict[tuple[int, int], int] = {}
        for (placed, free), bits in best.items():
            free = min(2 * free, len(counts))
            for use in range(min(free, len(counts) - placed) + 1):
                cost = bits + length * sum(counts[placed : placed + use])
                key = placed + use, free - use
                after[key] = min(after.get(key, cost), cost)
        best = after
    return min(bits for (placed, _), bits in best.items() if placed == len(counts))


@pytest.mark.parametrize(
    ("first", "text"),
    [(0, ""), (0, "2"), (0, "111"), (0, "c1"), (0, "12"), (0, "011"), (0, "110"), (255, "11"), (-1, "11"), ("0", "11"),
     (True, "11"), (0, 11), (0, "1" * 300), (None, None), (0, "\u06611")],
)  # fmt: skip
def test_invalid_code_is_refused(first: object, text: object) -> None:
    with pytest.raises(ModelFileError):
        PrefixCode.parse(first, text)
