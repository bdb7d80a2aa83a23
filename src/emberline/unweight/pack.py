"""pack_file: a safetensors file becomes a packed one, in two passes over each tensor: count its symbols, code them."""

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

Advance = Callable[[int], None]  # told of bytes done


def pack_file(source: Path, target: Path, codec: Codec, pool: ThreadPoolExecutor, advance: Advance) -> None:
    file = ModelFile(source, codec)
    if file.header.packed:
        raise ModelFileError(f"{source} is packed already")
    with PackedWriter(target, file.header, file.tensors) as writer:
        packer = _Packer(file, writer, pool, advance)
        kept = [name for name in file.tensors if not packer.code(name)]
        # Wide ones first: then all are aligned, since coded ones end on a multiple of ALIGN.
        for name in sorted(kept, key=lambda name: -DTYPE_BYTES[file.tensors[name].dtype]):
            packer.keep(name)


class _Packer:
    def __init__(self, file: ModelFile, writer: PackedWriter, pool: ThreadPoolExecutor, advance: Advance) -> None:
        self._file, self._codec, self._writer, self._pool, self._advance = file, file.codec, writer, pool, advance

    def code(self, name: str) -> bool:
        """Whether it was worth it; otherwise nothing is written."""
        info = self._file.tensors[name]
        width = WIDTHS.get(info.dtype, 0)
        if not width or len(info.shape) < 2 or info.nbytes < LEAST * width:
            return False
        step = RUN * BLOCK * width

        def run(at: int) -> Bytes:
            return self._file.read(info, at, min(at + step, info.nbytes))

        def encoded(at: int) -> tuple[Bytes, tuple[Bytes, Bytes]]:
            return (elements := run(at)), self._codec.encode(elements, width, code)

        runs = range(0, info.nbytes, step)
        found = self._pool.map(lambda at: self._codec.count(run(at), width), runs)
        counts: NDArray[np.uint64] = np.sum(list(found), axis=0)
        code, count = Code.fit(counts), info.nbytes // width
        size = INDEX * blocks_of(count) + (width - 1) * count + code.bits(counts) / 8
        if size > GAIN * info.nbytes:
            return False
        digest, index = hashlib.sha256(), []
        self._writer.begin(INDEX * blocks_of(count))
        for elements, (coded, entries) in in_order(self._pool, encoded, runs):
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
