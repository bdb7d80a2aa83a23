"""MappedFiles: the files of a checkpoint, each mapped into memory when one of its tensors is first viewed."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from emberline.core.errors import ModelFileError
from emberline.hub.dequant import Bytes
from emberline.hub.tensorfile import TensorInfo


class MappedFiles:
    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def view(self, info: TensorInfo) -> Bytes:
        """Return the stored bytes of a tensor, without a copy. Raises ModelFileError if the file cannot be read."""
        return np.frombuffer(self._map(info.file), np.uint8, info.nbytes, info.offset)

    def release_pages(self, info: TensorInfo) -> None:
        """Drop the mapped pages of a tensor from this process's memory; the page cache may keep them."""
        begin, end = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE, info.offset + info.nbytes
        if info.file in self._maps and (size := (end - begin) // mmap.PAGESIZE * mmap.PAGESIZE) > 0:
            self._maps[info.file].madvise(mmap.MADV_DONTNEED, begin, size)

    def clear(self) -> None:
        """Forget the files. A file stays mapped while a view of one of its tensors is used."""
        self._maps.clear()

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            try:
                with file.open("rb") as f:
                    # Copy-on-write only because torch requires a writable buffer; nothing is written.
                    self._maps[file] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as e:
                raise ModelFileError(f"cannot read {file}: {e}") from e
        return self._maps[file]
