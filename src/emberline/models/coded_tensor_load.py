"""Loads tensors of packed files to a device.

Coded (compressed) tensors are decoded while their bytes arrive. Tensors that a packed file stores uncoded are checked
against their CRC-32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import numpy as np
from torch import Tensor

from emberline.models.tensor_load import TensorLoad, TensorPlacement
from emberline.unweight.codec import WeightCodec
from emberline.unweight.description import TensorDescription
from emberline.unweight.format import BLOCK_ELEMENTS, Bytes
from emberline.unweight.tensor import CodedTensor, damaged_tensor_error, index_bytes

MAX_RUN_BYTES = 8 << 20  # decoded by one call, large enough that the fixed cost of a call and a device copy is small
POLYNOMIAL = 0xEDB88320  # of CRC-32; as in all polynomials here, the highest bit is the coefficient of x^0


@dataclass(frozen=True, slots=True)
class CodedRun:
    """The consecutive blocks [first, last) of a coded tensor, with their coded bytes."""

    load: CodedTensorLoad
    tensor: CodedTensor
    first: int
    last: int
    coded: Bytes

    def decode(self, out: Bytes) -> tuple[int, int]:
        """Decode the blocks into the beginning of `out`; return their byte range (begin, end) in the tensor."""
        begin, end = self.tensor.decoded_span(self.first, self.last)
        self.tensor.decode(self.coded, self.first, self.last, out[: end - begin])
        return begin, end


class CodedTensorLoad(TensorLoad):
    """The load of a coded tensor, whose bytes may arrive in any order.

    A block that arrives complete is decoded from the memory in which it arrived. Only incomplete blocks, and bytes that
    arrive before the tensor's index, are copied first.
    """

    def __init__(self, placement: TensorPlacement, codec: WeightCodec) -> None:
        super().__init__(placement)
        info = placement.info
        self._info, self._codec = info, codec
        self._lock = threading.Lock()
        self._index = np.empty(index_bytes(info), np.uint8)
        self._missing_index_bytes = len(self._index)
        self._tensor: CodedTensor | None = None
        self._early_parts: list[tuple[int, Bytes]] = []
        self._partial_blocks: dict[int, tuple[Bytes, int]] = {}  # incomplete blocks and their missing bytes

    def add_coded_bytes(self, offset: int, data: Bytes) -> list[CodedRun]:
        """Add coded bytes that begin at `offset` in the tensor.

        Return the runs of blocks that can now be decoded. The runs may refer to `data`, so it must not be overwritten
        before they are decoded.
        """
        with self._lock:
            if self._tensor is None and not self._read_index(offset, data):
                return []
            parts, self._early_parts = [*self._early_parts, (offset, data)], []
            return [run for begin, part in parts for run in self._find_complete_runs(begin, part)]

    def _read_index(self, offset: int, data: Bytes) -> bool:
        """Store the part of `data` that belongs to the index of blocks; return whether the index is complete."""
        part = data[: max(0, len(self._index) - offset)]
        self._index[offset : offset + len(part)] = part
        self._missing_index_bytes -= len(part)
        if self._missing_index_bytes:
            self._early_parts.append((offset, data.copy()))
            return False
        self._tensor = CodedTensor.open(self.name, self._info, lambda begin, end: self._index[begin:end], self._codec)
        return True

    def _find_complete_runs(self, offset: int, data: Bytes) -> Iterator[CodedRun]:
        assert self._tensor is not None
        starts, step = self._tensor.block_starts, max(1, MAX_RUN_BYTES // (BLOCK_ELEMENTS * self._tensor.element_bytes))
        begin, end = (
            max(offset, int(starts[0])),
            min(offset + len(data), int(starts[-1])),
        )  # without the index and the padding
        if begin >= end:
            return
        first = int(np.searchsorted(starts, begin))  # the first block that begins here
        last = int(np.searchsorted(starts, end, "right")) - 1  # the first that does not end here
        if begin < starts[first]:
            yield from self._add_block_part(
                first - 1, begin, data[begin - offset : min(end, int(starts[first])) - offset]
            )
        for block in range(first, last, step):
            stop = min(block + step, last)
            yield CodedRun(self, self._tensor, block, stop, data[starts[block] - offset : starts[stop] - offset])
        if first <= last and starts[last] < end:
            yield from self._add_block_part(last, int(starts[last]), data[starts[last] - offset : end - offset])

    def _add_block_part(self, block: int, offset: int, part: Bytes) -> Iterator[CodedRun]:
        """Add a part of a block that arrives in several chunks; yield the block if it is complete now."""
        assert self._tensor is not None
        begin, end = (int(start) for start in self._tensor.block_starts[block : block + 2])
        if block not in self._partial_blocks:
            self._partial_blocks[block] = np.empty(end - begin, np.uint8), end - begin
        whole, missing = self._partial_blocks.pop(block)
        whole[offset - begin : offset - begin + len(part)] = part
        if missing > len(part):
            self._partial_blocks[block] = whole, missing - len(part)
        else:
            yield CodedRun(self, self._tensor, block, block + 1, whole)


class CheckedTensorLoad(TensorLoad):
    """The load of a tensor that a packed file stores uncoded, with a check of its CRC-32."""

    def __init__(self, placement: TensorPlacement, codec: WeightCodec) -> None:
        super().__init__(placement)
        info = placement.info
        self._info, self._crc32, self._codec = info, TensorDescription.from_info(info).crc32, codec
        self._parts: list[tuple[int, int, int]] = []  # offset, length and CRC-32 of each part
        self._unverified_bytes = self.num_bytes

    def verify_part(self, offset: int, part: Tensor) -> None:
        self._parts.append((offset, len(part), self._codec.crc32(part.numpy())))
        self._unverified_bytes -= len(part)
        if self._unverified_bytes == 0 and combine_crc32(self._parts) != self._crc32:
            raise damaged_tensor_error(self.name, self._info, "the checksum of the tensor's bytes does not match")


def combine_crc32(parts: list[tuple[int, int, int]]) -> int:
    """Return the CRC-32 of a byte string, given the (offset, length, CRC-32) of its parts.

    Appending a part multiplies the CRC of the bytes before it by x to the power of the part's length in bits.
    """
    return reduce(
        lambda crc, part: _multiply_polynomials(_x_power_modulo(8 * part[1]), crc) ^ part[2], sorted(parts), 0
    )


def _x_power_modulo(bits: int) -> int:
    """Return x^bits modulo the CRC-32 polynomial."""
    out, square = 1 << 31, 1 << 30
    while bits:
        out = _multiply_polynomials(out, square) if bits & 1 else out
        square, bits = _multiply_polynomials(square, square), bits >> 1
    return out


def _multiply_polynomials(a: int, b: int) -> int:
    out = 0
    for bit in range(31, -1, -1):
        out ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return out
