"""PackedFileWriter: writes a packed file tensor by tensor.

The header and each tensor's index come before the data in the file, but their content is known only after the data is
written. So space is reserved for them first.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from emberline.hub.tensorfile import PACKED_FORMAT, PACKED_VERSION, SafetensorsHeader, TensorInfo, compute_header_sha256
from emberline.unweight.description import TensorDescription
from emberline.unweight.format import ALIGN_BYTES, MAX_CODE_BITS, Bytes
from emberline.unweight.prefix_code import PrefixCode

UNKNOWN_SHA256 = "0" * 64  # replaced by the hash when the file is complete
LONGEST_CODE = PrefixCode(
    np.full(256, MAX_CODE_BITS, np.uint8)
)  # the code whose text is longest, to reserve space for the header


class PackedFileWriter:
    def __init__(self, path: Path, source: SafetensorsHeader, tensors: dict[str, TensorInfo]) -> None:
        self._source = source
        self._entries: dict[str, Any] = {}
        self._descriptions: dict[str, Any] = {}
        for name, t in tensors.items():
            self._add_entry(
                name,
                TensorDescription(t.dtype, t.shape, UNKNOWN_SHA256, 2**32 - 1, LONGEST_CODE, 99.9999),
                0,
                2 * source.file_bytes,
            )
        self._data_start = -(-(8 + len(self._format_header(UNKNOWN_SHA256))) // ALIGN_BYTES) * ALIGN_BYTES
        self._entries.clear()
        self._descriptions.clear()
        self._file = path.open("xb")
        self._tensor_start = self._position = self._data_start

    def __enter__(self) -> PackedFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._write_header()

    def begin_tensor(self, index_bytes: int = 0) -> None:
        self._tensor_start = self._position
        self._position += index_bytes
        self._file.seek(self._position)

    def write(self, part: Bytes) -> None:
        self._position += self._file.write(part.data)

    def end_tensor(self, name: str, description: TensorDescription, index: Bytes | None = None) -> None:
        if index is not None:
            self._position += self._file.write(bytes(-self._position % ALIGN_BYTES))
            self._file.seek(self._tensor_start)
            self._file.write(index.data)
            self._file.seek(self._position)
        self._add_entry(name, description, self._tensor_start - self._data_start, self._position - self._data_start)

    def _write_header(self) -> None:
        text = self._format_header(UNKNOWN_SHA256)
        text += b" " * (self._data_start - 8 - len(text))
        text = text.replace(UNKNOWN_SHA256.encode(), compute_header_sha256(text, UNKNOWN_SHA256).encode(), 1)
        self._file.seek(0)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _add_entry(self, name: str, description: TensorDescription, begin: int, end: int) -> None:
        shape = [end - begin] if description.code is not None else list(description.shape)
        dtype = "U8" if description.code is not None else description.dtype
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        self._descriptions[name] = description.as_dict()

    def _format_header(self, checksum: str) -> bytes:
        metadata = {  # `checksum` comes first, because `_write_header` replaces the first occurrence of the placeholder
            "format": PACKED_FORMAT,
            "version": PACKED_VERSION,
            "check": checksum,
            "tensors": json.dumps(self._descriptions, separators=(",", ":")),
            "source": self._source.text.decode(),
        }
        return json.dumps({"__metadata__": metadata, **self._entries}, separators=(",", ":")).encode()
