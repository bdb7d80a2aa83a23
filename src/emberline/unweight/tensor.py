"""CodedTensor: decodes a tensor of a packed file.

Each block can be decoded independently of the others, by any thread, into memory of the caller. The index at the start
of the tensor has the position of each block, so the file may be read in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from emberline.core.errors import ModelFileError
from emberline.hub.tensorfile import TensorInfo
from emberline.unweight.codec import WeightCodec
from emberline.unweight.description import TensorDescription
from emberline.unweight.format import ALIGN_BYTES, BLOCK_ELEMENTS, ELEMENT_BYTES, INDEX_ENTRY_BYTES, Bytes, count_blocks
from emberline.unweight.ordered_map import map_in_order
from emberline.unweight.prefix_code import PrefixCode

BLOCKS_PER_TASK = 32  # decoded by one call of a thread

ReadBytes: TypeAlias = Callable[[int, int], Bytes]  # returns bytes [begin, end) of the coded tensor


@dataclass(frozen=True)
class CodedTensor:
    name: str
    info: TensorInfo
    code: PrefixCode
    element_bytes: int
    num_elements: int
    index: Bytes  # INDEX_ENTRY_BYTES per block
    block_starts: NDArray[np.int64]  # offset of each block from the tensor's start in the file, then the end
    codec: WeightCodec

    @staticmethod
    def open(name: str, info: TensorInfo, read_bytes: ReadBytes, codec: WeightCodec) -> CodedTensor:
        """Open a coded tensor: read and check its index, which is its first `index_bytes` bytes.

        Raises ModelFileError if the index is damaged.
        """
        description = TensorDescription.from_info(info)
        assert description.code is not None
        width, count = ELEMENT_BYTES[info.dtype], description.num_elements
        size = index_bytes(info)
        index = np.array(read_bytes(0, min(size, info.nbytes)))
        if len(index) < size or codec.crc32(index) != description.crc32:
            raise damaged_tensor_error(name, info, "the checksum of the tensor's index does not match")
        entries = index.reshape(-1, INDEX_ENTRY_BYTES)
        sizes = entries[:, :8].copy().view("<u2").sum(1, dtype=np.int64) + (width - 1) * BLOCK_ELEMENTS
        sizes[-1:] -= (width - 1) * (BLOCK_ELEMENTS * count_blocks(count) - count)
        starts = size + np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        if -(-int(starts[-1]) // ALIGN_BYTES) * ALIGN_BYTES != info.nbytes:
            raise damaged_tensor_error(name, info, "the tensor's size does not match its index")
        return CodedTensor(name, info, description.code, width, count, index, starts, codec)

    @property
    def num_blocks(self) -> int:
        return len(self.block_starts) - 1

    def decoded_span(self, first: int, last: int) -> tuple[int, int]:
        """Return the byte range (begin, end) of the blocks [first, last) in the decoded tensor."""
        return first * BLOCK_ELEMENTS * self.element_bytes, min(
            last * BLOCK_ELEMENTS, self.num_elements
        ) * self.element_bytes

    def decode(self, coded: Bytes, first: int, last: int, out: Bytes, *, verify_crc: bool = True) -> None:
        """Decode the blocks [first, last) into `out`. Raises ModelFileError if a block is damaged.

        `coded` are the bytes of these blocks in the file. With `verify_crc`, the CRC-32 of each block is verified.
        """
        begin, end = self.decoded_span(first, last)
        assert len(coded) == self.block_starts[last] - self.block_starts[first] and len(out) == end - begin
        index = self.index[first * INDEX_ENTRY_BYTES : last * INDEX_ENTRY_BYTES]
        bad = self.codec.decode(coded, index, self.element_bytes, self.code, out, verify_crc=verify_crc)
        if bad >= 0:
            raise damaged_tensor_error(self.name, self.info, f"block {first + bad} cannot be decoded")

    def decode_all(self, stored: Bytes, out: Bytes, pool: ThreadPoolExecutor) -> None:
        """Decode the whole tensor from its stored bytes into `out`, with the threads of `pool`."""
        runs = [
            (first, min(first + BLOCKS_PER_TASK, self.num_blocks))
            for first in range(0, self.num_blocks, BLOCKS_PER_TASK)
        ]

        def decode_run(run: tuple[int, int]) -> None:
            begin, end = self.decoded_span(*run)
            self.decode(stored[self.block_starts[run[0]] : self.block_starts[run[1]]], *run, out[begin:end])

        for _ in pool.map(decode_run, runs):
            pass

    def iter_chunks(self, read_bytes: ReadBytes, pool: ThreadPoolExecutor) -> Iterator[Bytes]:
        """Yield all decoded bytes in order, with only a few runs of blocks in memory."""

        def decode_run(first: int) -> Bytes:
            last = min(first + BLOCKS_PER_TASK, self.num_blocks)
            begin, end = self.decoded_span(first, last)
            out = np.empty(end - begin, np.uint8)
            self.decode(read_bytes(int(self.block_starts[first]), int(self.block_starts[last])), first, last, out)
            return out

        return map_in_order(pool, decode_run, range(0, self.num_blocks, BLOCKS_PER_TASK))

    def read(self, read_bytes: ReadBytes, begin: int, end: int) -> Bytes:
        """Return bytes [begin, end) of the decoded tensor; only blocks with these bytes are read and decoded."""
        if begin == end:
            return np.empty(0, np.uint8)
        step = BLOCK_ELEMENTS * self.element_bytes
        first, last = begin // step, -(-end // step)
        start, stop = self.decoded_span(first, last)
        out = np.empty(stop - start, np.uint8)
        self.decode(read_bytes(int(self.block_starts[first]), int(self.block_starts[last])), first, last, out)
        return out[begin - start : end - start]


def index_bytes(info: TensorInfo) -> int:
    return INDEX_ENTRY_BYTES * count_blocks(info.logical_bytes // ELEMENT_BYTES[info.dtype])


def is_coded(info: TensorInfo) -> bool:
    return info.packing is not None and info.packing.get("codec") != "raw"


def check_raw_crc(name: str, info: TensorInfo, stored: Bytes, codec: WeightCodec) -> None:
    """Raise ModelFileError if an uncompressed tensor of a packed file does not match its CRC-32."""
    if codec.crc32(stored) != TensorDescription.from_info(info).crc32:
        raise damaged_tensor_error(name, info, "the checksum of the tensor's bytes does not match")


def damaged_tensor_error(name: str, info: TensorInfo, reason: str) -> ModelFileError:
    return ModelFileError(
        f"tensor {name!r} in {info.file} is damaged: {reason}", hint="download the file again, or pack the model again"
    )
