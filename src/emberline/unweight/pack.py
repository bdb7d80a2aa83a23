"""pack_file: packs a safetensors file.

It reads each tensor twice: to count exponents, then to encode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emberline.core.errors import ModelFileError
from emberline.hub.tensorfile import DTYPE_BYTES
from emberline.unweight.codec import WeightCodec
from emberline.unweight.description import TensorDescription
from emberline.unweight.file import ModelFile
from emberline.unweight.format import (
    BLOCK_ELEMENTS,
    ELEMENT_BYTES,
    INDEX_ENTRY_BYTES,
    MAX_CODED_RATIO,
    MIN_ELEMENTS,
    Bytes,
    count_blocks,
)
from emberline.unweight.ordered_map import map_in_order
from emberline.unweight.prefix_code import PrefixCode, entropy_bits
from emberline.unweight.tensor import BLOCKS_PER_TASK
from emberline.unweight.writer import PackedFileWriter

ReportProgress = Callable[[int], None]  # called with the number of bytes processed since the last call


def pack_file(
    source: Path, target: Path, codec: WeightCodec, pool: ThreadPoolExecutor, report_progress: ReportProgress
) -> None:
    file = ModelFile(source, codec)
    if file.header.is_packed:
        raise ModelFileError(f"{source} is packed already")
    with PackedFileWriter(target, file.header, file.tensors) as writer:
        packer = _FilePacker(file, writer, pool, report_progress)
        kept = [name for name in file.tensors if not packer.try_encode(name)]
        # Wide dtypes first, so that all tensors are aligned; coded tensors end at a multiple of ALIGN_BYTES.
        for name in sorted(kept, key=lambda name: -DTYPE_BYTES[file.tensors[name].dtype]):
            packer.copy_raw(name)


class _FilePacker:
    def __init__(
        self, file: ModelFile, writer: PackedFileWriter, pool: ThreadPoolExecutor, report_progress: ReportProgress
    ) -> None:
        self._file, self._codec, self._writer, self._pool, self._report_progress = (
            file,
            file.codec,
            writer,
            pool,
            report_progress,
        )

    def try_encode(self, name: str) -> bool:
        """Write the encoded tensor and return True, or return False if encoding does not make it smaller."""
        info = self._file.tensors[name]
        width = ELEMENT_BYTES.get(info.dtype, 0)
        if not width or len(info.shape) < 2 or info.nbytes < MIN_ELEMENTS * width:
            return False
        step = BLOCKS_PER_TASK * BLOCK_ELEMENTS * width

        def read_run(start: int) -> Bytes:
            return self._file.read(info, start, min(start + step, info.nbytes))

        def encode_run(start: int) -> tuple[Bytes, tuple[Bytes, Bytes]]:
            return (elements := read_run(start)), self._codec.encode(elements, width, code)

        starts = range(0, info.nbytes, step)
        run_counts = self._pool.map(lambda start: self._codec.count_symbols(read_run(start), width), starts)
        counts: NDArray[np.uint64] = np.sum(list(run_counts), axis=0)
        code, count = PrefixCode.from_counts(counts), info.nbytes // width
        size = INDEX_ENTRY_BYTES * count_blocks(count) + (width - 1) * count + code.total_bits(counts) / 8
        if size > MAX_CODED_RATIO * info.nbytes:
            return False
        digest, index = hashlib.sha256(), []
        self._writer.begin_tensor(INDEX_ENTRY_BYTES * count_blocks(count))
        for elements, (coded, entries) in map_in_order(self._pool, encode_run, starts):
            digest.update(elements.data)
            self._writer.write(coded)
            index.append(entries)
            self._report_progress(len(elements))
        whole, sha256 = np.concatenate(index), digest.hexdigest()
        crc32 = self._codec.crc32(whole)
        self._writer.end_tensor(
            name, TensorDescription(info.dtype, info.shape, sha256, crc32, code, entropy_bits(counts)), whole
        )
        return True

    def copy_raw(self, name: str) -> None:
        info, digest, crc32 = self._file.tensors[name], hashlib.sha256(), 0
        self._writer.begin_tensor()
        for chunk in self._file.iter_chunks(name, self._pool):
            digest.update(chunk.data)
            crc32 = self._codec.crc32(chunk, crc32)
            self._writer.write(chunk)
            self._report_progress(len(chunk))
        self._writer.end_tensor(name, TensorDescription(info.dtype, info.shape, digest.hexdigest(), crc32))
