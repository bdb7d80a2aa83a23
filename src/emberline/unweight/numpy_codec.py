"""NumpyWeightCodec: the weight codec in numpy.

It is the reference and the fallback of the native codec. It decodes all streams of all blocks in parallel: each
iteration does one table lookup per stream.
"""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.unweight.format import (
    BLOCK_ELEMENTS,
    BLOCK_STREAMS,
    INDEX_ENTRY_BYTES,
    MAX_CODE_BITS,
    MAX_LOOKUP_SYMBOLS,
    Bytes,
    count_blocks,
    stream_bounds,
)
from emberline.unweight.prefix_code import PrefixCode

WORD_DTYPES: dict[int, np.dtype[np.unsignedinteger[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class NumpyWeightCodec:
    name = "numpy"

    def count_symbols(self, elements: Bytes, element_bytes: int) -> NDArray[np.uint64]:
        symbols, _ = split_symbols(elements, element_bytes)
        return np.bincount(symbols, minlength=256).astype(np.uint64)

    def encode(self, elements: Bytes, element_bytes: int, code: PrefixCode) -> tuple[Bytes, Bytes]:
        parts, entries = [], []
        for at in range(0, len(elements), BLOCK_ELEMENTS * element_bytes):
            symbols, planes = split_symbols(elements[at : at + BLOCK_ELEMENTS * element_bytes], element_bytes)
            limits = stream_bounds(len(symbols))
            streams = [_encode_symbols(symbols[a:b], code) for a, b in pairwise(limits.tolist())]
            block = np.concatenate([*streams, planes.reshape(-1)])
            sizes = np.array([len(stream) for stream in streams], "<u2")
            entries += [sizes.view(np.uint8), np.array([zlib.crc32(block.data)], "<u4").view(np.uint8)]
            parts.append(block)
        empty = np.empty(0, np.uint8)
        return np.concatenate([empty, *parts]), np.concatenate([empty, *entries])

    def decode(
        self, coded: Bytes, index: Bytes, element_bytes: int, code: PrefixCode, out: Bytes, *, verify_crc: bool = True
    ) -> int:
        count = len(out) // element_bytes
        entries = index.reshape(-1, INDEX_ENTRY_BYTES)
        sizes = entries[:, :8].copy().view("<u2").astype(np.int64)
        crcs = entries[:, 8:].copy().view("<u4")[:, 0]
        counts = np.full(count_blocks(count), BLOCK_ELEMENTS)
        counts[-1:] = count - BLOCK_ELEMENTS * (len(counts) - 1)
        ends = np.cumsum(sizes.sum(1) + (element_bytes - 1) * counts)
        starts = np.concatenate([[0], ends])[:-1]
        intact = [
            bool(end <= len(coded)) and not (verify_crc and zlib.crc32(coded[start:end].data) != crc)
            for start, end, crc in zip(starts, ends, crcs, strict=True)
        ]
        if not all(intact):
            return intact.index(False)
        symbols, good = _decode_streams(coded, starts, sizes, counts, code)
        if not all(good):
            return int(np.argmin(good))
        for i, (end, n) in enumerate(zip(ends, counts, strict=True)):
            planes = coded[end - (element_bytes - 1) * n : end].reshape(element_bytes - 1, n)
            to = out[i * BLOCK_ELEMENTS * element_bytes :][: n * element_bytes]
            lengths = np.diff(stream_bounds(n))
            merge_symbols(np.concatenate([row[:m] for row, m in zip(symbols[i], lengths, strict=True)]), planes, to)
        return -1

    def crc32(self, data: Bytes, previous_crc: int = 0) -> int:
        return zlib.crc32(data.data, previous_crc)


def split_symbols(elements: Bytes, element_bytes: int) -> tuple[Bytes, Bytes]:
    """Return the exponent of each element, and its other bits as byte planes [element_bytes - 1, count]."""
    if element_bytes == 1:
        return elements, np.empty((0, len(elements)), np.uint8)
    words, below = elements.view(WORD_DTYPES[element_bytes]), 8 * element_bytes - 9
    symbols = (words >> below).astype(np.uint8)
    rest = words >> (8 * element_bytes - 1) << below | words & ((1 << below) - 1)
    return symbols, np.ascontiguousarray(
        rest.astype(WORD_DTYPES[element_bytes]).view(np.uint8).reshape(-1, element_bytes)[:, :-1].T
    )


def merge_symbols(symbols: Bytes, planes: Bytes, out: Bytes) -> None:
    """Undo `split_symbols`: combine exponents and byte planes to elements, and write these to `out`."""
    width = len(planes) + 1
    if width == 1:
        out[:] = symbols
        return
    below = 8 * width - 9
    rest = np.zeros((len(symbols), width), np.uint8)
    rest[:, :-1] = planes.T
    words = rest.view(WORD_DTYPES[width])[:, 0]
    kept = words >> below << (8 * width - 1) | words & ((1 << below) - 1)
    out[:] = (kept | symbols.astype(WORD_DTYPES[width]) << below).view(np.uint8)


def _encode_symbols(symbols: Bytes, code: PrefixCode) -> Bytes:
    lengths = code.lengths[symbols].astype(np.int64)
    ends = np.cumsum(lengths)
    bits = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    for bit in range(MAX_CODE_BITS):
        longer = lengths > bit
        bits[(ends - lengths)[longer] + bit] = code.codes[symbols[longer]] >> bit & 1
    return np.packbits(bits, bitorder="little")


def _decode_streams(
    coded: Bytes, starts: NDArray[np.int64], sizes: NDArray[np.int64], counts: NDArray[np.int64], code: PrefixCode
) -> tuple[Bytes, NDArray[np.bool_]]:
    """Return the symbols [block, stream, position], and per block whether its stream sizes were valid."""
    begins = (starts[:, None] + np.cumsum(sizes, 1) - sizes).reshape(-1)
    lengths = np.array([np.diff(stream_bounds(n)) for n in counts]).reshape(-1)
    max_length = int(lengths.max(initial=0))
    data = np.concatenate([coded, np.zeros(4, np.uint8)]).astype(np.uint32)
    ahead = data[:-2] | data[1:-1] << np.uint32(8) | data[2:] << np.uint32(16)
    lanes = np.arange(len(begins))
    out = np.zeros((len(lanes), max_length + MAX_LOOKUP_SYMBOLS), np.uint8)
    positions, num_done, after = begins * 8, np.zeros(len(lanes), np.int64), code.lengths
    last, full = 8 * len(coded), code.decode_table
    while len(lanes):
        at = np.minimum(positions[lanes], last)
        entry = full[ahead[at >> 3] >> (at & 7).astype(np.uint32) & np.uint32((1 << MAX_CODE_BITS) - 1)]
        symbols_found = (entry >> np.uint64(8))[:, None] >> np.arange(
            0, 8 * MAX_LOOKUP_SYMBOLS, 8, dtype=np.uint64
        ) & np.uint64(255)
        to = num_done[lanes]
        out[lanes[:, None], to[:, None] + np.arange(MAX_LOOKUP_SYMBOLS)] = symbols_found
        number = np.minimum((entry >> np.uint64(56)).astype(np.int64), lengths[lanes] - to)
        # The last lookup of a stream may find symbols beyond its end: they and their bits do not count.
        taken = np.where(np.arange(MAX_LOOKUP_SYMBOLS) < number[:, None], after[symbols_found.astype(np.uint8)], 0).sum(
            1, dtype=np.int64
        )
        positions[lanes] += taken
        num_done[lanes] += number
        lanes = lanes[num_done[lanes] < lengths[lanes]]
    good = (positions - begins * 8 + 7) // 8 == sizes.reshape(-1)
    return out.reshape(len(counts), BLOCK_STREAMS, -1), good.reshape(-1, BLOCK_STREAMS).all(1)
