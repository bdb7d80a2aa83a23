"""pack_file: packs a safetensors file in two passes over each tensor: count its symbols, then encode."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emberline.core.errors import ModelFileError
from emberline.hub.tensorfile import DTYPE_BYTES
from emberline.unweight.code import Code, entropy
from emberline.unweight.codec import Codec
from emberline.unweight.description import Description
from emberline.unweight.file import ModelFile
from emberline.unweight.format import BLOCK, GAIN, INDEX, LEAST, WIDTHS, Bytes, blocks_of
from emberline.unweight.order import in_order
from emberline.unweight.tensor import RUN
from emberline.unweight.writer import PackedWriter

Advance = Callable[[int], None]  # called with the number of bytes processed since the last call


def pack_file(source: Path, target: Path, codec: Codec, pool: ThreadPoolExecutor, advance: Advance) -> None:
    file = ModelFile(source, codec)
    if file.header.packed:
        raise ModelFileError(f"{source} is packed already")
    with PackedWriter(target, file.header, file.tensors) as writer:
        packer = _Packer(file, writer, pool, advance)
        kept = [name for name in file.tensors if not packer.code(name)]
        # Wide dtypes first, so that all tensors are aligned; coded tensors end at a multiple of ALIGN_BYTES.
        for name in sorted(kept, key=lambda name: -DTYPE_BYTES[file.tensors[name].dtype]):
            packer.keep(name)


class _Packer:
    def __init__(self, file: ModelFile, writer: PackedWriter, pool: ThreadPoolExecutor, advance: Advance) -> None:
        self._file, self._codec, self._writer, self._pool, self._advance = file, file.codec, writer, pool, advance

    def code(self, name: str) -> bool:
        """Encode the tensor and return True, or write nothing and return False if encoding does not shrink it."""
        info = self._file.tensors[name]
        width = WIDTHS.get(info.dtype, 0)
        if not width or len(info.shape) < 2 or info.nbytes < LEAST * width:
            return False
        step = RUN * BLOCK * width

        def read_run(start: int) -> Bytes:
            return self._file.read(info, start, min(start + step, info.nbytes))

        def encode_run(start: int) -> tuple[Bytes, tuple[Bytes, Bytes]]:
            return (elements := read_run(start)), self._codec.encode(elements, width, code)

        starts = range(0, info.nbytes, step)
        run_counts = self._pool.map(lambda start: self._codec.count(read_run(start), width), starts)
        counts: NDArray[np.uint64] = np.sum(list(run_counts), axis=0)
        code, count = Code.fit(counts), info.nbytes // width
        size = INDEX * blocks_of(count) + (width - 1) * count + code.bits(counts) / 8
        if size > GAIN * info.nbytes:
            return False
        digest, index = hashlib.sha256(), []
        self._writer.begin(INDEX * blocks_of(count))
        for elements, (coded, entries) in in_order(self._pool, encode_run, starts):
            digest.update(elements.data)
            self._writer.put(coded)
            index.append(entries)
            self._advance(len(elements))
        whole, sha256 = np.concatenate(index), digest.hexdigest()
        crc32 = self._codec.crc32(whole)
        self._writer.end(name, Description(info.dtype, info.shape, sha256, crc32, code, entropy(counts)), whole)
        return True

    def keep(self, name: str) -> None:
        info, digest, crc32 = self._file.tensors[name], hashlib.sha256(), 0
        self._writer.begin()
        for chunk in self._file.chunks(name, self._pool):
            digest.update(chunk.data)
            crc32 = self._codec.crc32(chunk, crc32)
            self._writer.put(chunk)
            self._advance(len(chunk))
        self._writer.end(name, Description(info.dtype, info.shape, digest.hexdigest(), crc32))
