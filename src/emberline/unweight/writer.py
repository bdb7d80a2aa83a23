"""PackedFileWriter: writes a packed file tensor by tensor.

The header and each tensor's index precede the data but are known only after it, so their space is reserved first.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from emberline.hub.tensorfile import PACKED, PACKED_VERSION, Header, TensorInfo, header_check
from emberline.unweight.code import Code
from emberline.unweight.description import Description
from emberline.unweight.format import ALIGN, BITS, Bytes

UNKNOWN = "0" * 64  # replaced by the hash when the file is complete
LONGEST = Code(np.full(256, BITS, np.uint8))  # the code whose text is longest, to reserve space for the header


class PackedWriter:
    def __init__(self, path: Path, source: Header, tensors: dict[str, TensorInfo]) -> None:
        self._source = source
        self._entries: dict[str, Any] = {}
        self._descriptions: dict[str, Any] = {}
        for name, t in tensors.items():
            self._note(name, Description(t.dtype, t.shape, UNKNOWN, 2**32 - 1, LONGEST, 99.9999), 0, 2 * source.size)
        self._data = -(-(8 + len(self._text(UNKNOWN))) // ALIGN) * ALIGN
        self._entries.clear()
        self._descriptions.clear()
        self._file = path.open("xb")
        self._begin = self._at = self._data

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._finish()

    def begin(self, index_bytes: int = 0) -> None:
        self._begin = self._at
        self._at += index_bytes
        self._file.seek(self._at)

    def put(self, part: Bytes) -> None:
        self._at += self._file.write(part.data)

    def end(self, name: str, description: Description, index: Bytes | None = None) -> None:
        if index is not None:
            self._at += self._file.write(bytes(-self._at % ALIGN))
            self._file.seek(self._begin)
            self._file.write(index.data)
            self._file.seek(self._at)
        self._note(name, description, self._begin - self._data, self._at - self._data)

    def _finish(self) -> None:
        text = self._text(UNKNOWN)
        text += b" " * (self._data - 8 - len(text))
        text = text.replace(UNKNOWN.encode(), header_check(text, UNKNOWN).encode(), 1)
        self._file.seek(0)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _note(self, name: str, description: Description, begin: int, end: int) -> None:
        shape = [end - begin] if description.code is not None else list(description.shape)
        dtype = "U8" if description.code is not None else description.dtype
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        self._descriptions[name] = description.as_dict()

    def _text(self, check: str) -> bytes:
        metadata = {  # `check` comes first, because `_write_header` replaces the first occurrence of the placeholder
            "format": PACKED,
            "version": PACKED_VERSION,
            "check": check,
            "tensors": json.dumps(self._descriptions, separators=(",", ":")),
            "source": self._source.text.decode(),
        }
        return json.dumps({"__metadata__": metadata, **self._entries}, separators=(",", ":")).encode()
