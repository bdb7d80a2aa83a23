"""ModelFile: a safetensors file, packed or not, mapped into memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from emberline.core.errors import ModelFileError
from emberline.hub.tensorfile import TensorInfo, read_header, read_tensors
from emberline.unweight.codec import Codec
from emberline.unweight.format import Bytes
from emberline.unweight.tensor import CodedTensor, check_raw, is_coded

CHUNK = 4 << 20


class ModelFile:
    def __init__(self, path: Path, codec: Codec) -> None:
        self.path, self.codec = path, codec
        self.header = read_header(path)
        self.tensors = read_tensors(path)
        try:
            with path.open("rb") as file:
                self._map = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as e:
            raise ModelFileError(f"cannot read {path}: {e}") from e

    def stored(self, info: TensorInfo) -> Bytes:
        """Its bytes as the file has them."""
        return self._map[info.offset : info.offset + info.nbytes]

    def chunks(self, name: str, pool: ThreadPoolExecutor) -> Iterator[Bytes]:
        """The tensor's own bytes, in order; damage that a CRC-32 shows is an error."""
        info = self.tensors[name]
        stored = self.stored(info)
        if is_coded(info):
            return CodedTensor.open(name, info, stored, self.codec).chunks(stored, pool)
        if info.packed is not None:
            check_raw(name, info, stored, self.codec)
        return (stored[at : at + CHUNK] for at in range(0, len(stored), CHUNK))
