"""ModelFile: reads tensors of a safetensors file, packed or not, in chunks.

The file is read, not mapped into memory: if it is truncated or overwritten meanwhile, a read raises an error, whereas a
mapping would crash or give mixed content.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from emberline.core.errors import ModelFileError
from emberline.hub.tensorfile import TensorInfo, read_header, read_tensors
from emberline.unweight.codec import WeightCodec
from emberline.unweight.description import TensorDescription
from emberline.unweight.format import Bytes
from emberline.unweight.tensor import CodedTensor, damaged_tensor_error, is_coded

CHUNK_BYTES = 4 << 20


class ModelFile:
    def __init__(self, path: Path, codec: WeightCodec) -> None:
        self.path, self.codec = path, codec
        try:
            self._opened_state = _file_identity(path.stat())
        except OSError as e:
            raise self._read_error(e) from e
        self.header = read_header(path)
        self.tensors = read_tensors(path)

    def read(self, info: TensorInfo, begin: int, end: int) -> Bytes:
        """Return bytes [begin, end) of a tensor as the file stores them.

        Raises ModelFileError if the file changed.
        """
        out = np.empty(end - begin, np.uint8)
        try:
            with self.path.open("rb") as file:
                file.seek(info.offset + begin)
                count = file.readinto(out.data)
                changed = _file_identity(os.fstat(file.fileno())) != self._opened_state
        except OSError as e:
            raise self._read_error(e) from e
        if changed or count < len(out):
            raise ModelFileError(f"{self.path} was changed while it was read", hint="try again when it is complete")
        return out

    def iter_chunks(self, name: str, pool: ThreadPoolExecutor) -> Iterator[Bytes]:
        """Yield the tensor's decoded bytes in order. Raises ModelFileError if a CRC-32 does not match."""
        info = self.tensors[name]
        if is_coded(info):
            fetch = partial(self.read, info)
            return CodedTensor.open(name, info, fetch, self.codec).iter_chunks(fetch, pool)
        return self._iter_raw_chunks(name, info)

    def _iter_raw_chunks(self, name: str, info: TensorInfo) -> Iterator[Bytes]:
        expected, crc32 = None if info.packing is None else TensorDescription.from_info(info).crc32, 0
        for start in range(0, info.nbytes, CHUNK_BYTES):
            chunk = self.read(info, start, min(start + CHUNK_BYTES, info.nbytes))
            crc32 = self.codec.crc32(chunk, crc32)
            yield chunk
        if expected is not None and crc32 != expected:
            raise damaged_tensor_error(name, info, "the checksum of the tensor's bytes does not match")

    def _read_error(self, error: OSError) -> ModelFileError:
        return ModelFileError(f"cannot read {self.path}: {error.strerror or error}")


def _file_identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
