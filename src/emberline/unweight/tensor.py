"""CodedTensor: decodes a tensor of a packed file.

Any range of its blocks can be decoded on its own, by any thread, into memory of the caller. The index at the start of
the tensor gives the position of each block, so the file may be read in parts.
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
from emberline.unweight.code import Code
from emberline.unweight.codec import Codec
from emberline.unweight.description import Description
from emberline.unweight.format import ALIGN, BLOCK, INDEX, WIDTHS, Bytes, blocks_of
from emberline.unweight.order import in_order

RUN = 32  # decoded by one call of a thread

Fetch: TypeAlias = Callable[[int, int], Bytes]  # returns bytes [begin, end) of the coded tensor


@dataclass(frozen=True)
class CodedTensor:
    name: str
    info: TensorInfo
    code: Code
    width: int
    count: int
    index: Bytes  # INDEX_ENTRY_BYTES per block
    starts: NDArray[np.int64]  # offset of each block from the tensor's start in the file, then the end
    codec: Codec

    @staticmethod
    def open(name: str, info: TensorInfo, fetch: Fetch, codec: Codec) -> CodedTensor:
        """Read and check the index, the first `index_bytes` of the tensor. Raises ModelFileError if damaged."""
        description = Description.of(info)
        assert description.code is not None
        width, count = WIDTHS[info.dtype], description.count
        size = index_bytes(info)
        index = np.array(fetch(0, min(size, info.nbytes)))
        if len(index) < size or codec.crc32(index) != description.crc32:
            raise damaged(name, info, "its index")
        entries = index.reshape(-1, INDEX)
        sizes = entries[:, :8].copy().view("<u2").sum(1, dtype=np.int64) + (width - 1) * BLOCK
        sizes[-1:] -= (width - 1) * (BLOCK * blocks_of(count) - count)
        starts = size + np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        if -(-int(starts[-1]) // ALIGN) * ALIGN != info.nbytes:
            raise damaged(name, info, "its size")
        return CodedTensor(name, info, description.code, width, count, index, starts, codec)

    @property
    def blocks(self) -> int:
        return len(self.starts) - 1

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of decoded bytes that the blocks [first, last) hold."""
        return first * BLOCK * self.width, min(last * BLOCK, self.count) * self.width

    def decode(self, coded: Bytes, first: int, last: int, out: Bytes, *, check: bool = True) -> None:
        """Decode the blocks [first, last) into `out`. Raises ModelFileError if a block is damaged.

        `coded`: their bytes in the file. `check`: verify the CRC-32 of the blocks.
        """
        begin, end = self.span(first, last)
        assert len(coded) == self.starts[last] - self.starts[first] and len(out) == end - begin
        index = self.index[first * INDEX : last * INDEX]
        bad = self.codec.decode(coded, index, self.width, self.code, out, check=check)
        if bad >= 0:
            raise damaged(self.name, self.info, f"block {first + bad}")

    def decode_all(self, stored: Bytes, out: Bytes, pool: ThreadPoolExecutor) -> None:
        """Decode the whole tensor into `out` with the threads of `pool`."""
        runs = [(first, min(first + RUN, self.blocks)) for first in range(0, self.blocks, RUN)]

        def decode_run(run: tuple[int, int]) -> None:
            begin, end = self.span(*run)
            self.decode(stored[self.starts[run[0]] : self.starts[run[1]]], *run, out[begin:end])

        for _ in pool.map(decode_run, runs):
            pass

    def chunks(self, fetch: Fetch, pool: ThreadPoolExecutor) -> Iterator[Bytes]:
        """Yield all decoded bytes in order, with only a few runs of blocks in memory."""

        def decode_run(first: int) -> Bytes:
            last = min(first + RUN, self.blocks)
            begin, end = self.span(first, last)
            out = np.empty(end - begin, np.uint8)
            self.decode(fetch(int(self.starts[first]), int(self.starts[last])), first, last, out)
            return out

        return in_order(pool, decode_run, range(0, self.blocks, RUN))

    def read(self, fetch: Fetch, begin: int, end: int) -> Bytes:
        """Return bytes [begin, end) of the decoded tensor."""
        if begin == end:
            return np.empty(0, np.uint8)
        step = BLOCK * self.width
        first, last = begin // step, -(-end // step)
        start, stop = self.span(first, last)
        out = np.empty(stop - start, np.uint8)
        self.decode(fetch(int(self.starts[first]), int(self.starts[last])), first, last, out)
        return out[begin - start : end - start]


def index_bytes(info: TensorInfo) -> int:
    return INDEX * blocks_of(info.logical_bytes // WIDTHS[info.dtype])


def is_coded(info: TensorInfo) -> bool:
    return info.packed is not None and info.packed.get("codec") != "raw"


def check_raw(name: str, info: TensorInfo, stored: Bytes, codec: Codec) -> None:
    """Raise ModelFileError if a tensor that a packed file stores raw does not match its CRC-32."""
    if codec.crc32(stored) != Description.of(info).crc32:
        raise damaged(name, info, "its bytes")


def damaged(name: str, info: TensorInfo, what: str) -> ModelFileError:
    return ModelFileError(
        f"tensor {name!r} in {info.file} is damaged: {what}", hint="download the file again, or pack the model again"
    )
