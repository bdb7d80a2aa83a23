"""GGUFFile: reads metadata and tensors of a GGUF file (versions 2 and 3), checking every count and offset.

[magic version counts | metadata | tensor infos | pad to alignment | tensor data ...]
0                                                                  data           size
"""

from __future__ import annotations

import mmap
import struct
import sys
from array import array
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

from emberline.core.errors import ModelFileError, UnsupportedModel

MAX_HEADER = 128 << 20  # the largest vocabularies in use need about 15 MiB
MAX_ARRAY = 1 << 22
MAX_DEPTH = 3
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class TensorType:
    name: str
    block: int  # elements in a block
    size: int  # bytes in a block


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
LAST_KNOWN_TYPE = 41  # ids up to this belong to formats that exist but are not supported


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    type: TensorType
    shape: tuple[int, ...]  # outermost dimension first, as in torch; the file stores the reverse
    start: int  # in bytes from the start of the file
    nbytes: int


class GGUF:
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:  # ValueError: mmap of an empty file
            raise ModelFileError(f"cannot open GGUF file {path}: {e}") from e
        try:
            self.metadata, self.tensors = _Header(self._map, str(path)).read()
        except BaseException:
            self._map.close()
            raise

    def raw(self, tensor: GGUFTensor) -> memoryview:
        return memoryview(self._map)[tensor.start : tensor.start + tensor.nbytes]

    def __enter__(self) -> GGUF:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with suppress(BufferError):  # a traceback may hold a view; the map is then closed with it
            self._map.close()


class _Header:
    """A cursor that never passes `end`, so that no count in the file can cause an allocation beyond its size."""

    def __init__(self, data: mmap.mmap, what: str) -> None:
        self.data, self.what, self.size = data, what, len(data)
        self.at, self.end = 0, min(len(data), MAX_HEADER)

    def bad(self, why: str) -> ModelFileError:
        return ModelFileError(
            f"{self.what} is not a usable GGUF file: {why} (byte {self.at})", hint="download the file again"
        )

    def take(self, n: int) -> int:
        start = self.at
        if n > self.end - start:
            raise self.bad("the header exceeds the file or the size limit")
        self.at += n
        return start

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self.data, self.take(size))[0]

    def string(self) -> str:
        n = self.scalar("Q")
        start = self.take(n)
        try:
            return self.data[start : start + n].decode()
        except UnicodeDecodeError as e:
            raise self.bad("a string is not UTF-8") from e

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(depth)
        if kind not in SCALARS:
            raise self.bad(f"unknown value type {kind}")
        value = self.scalar(SCALARS[kind])
        if kind == BOOL and value > 1:
            raise self.bad(f"a boolean is {value}")
        return bool(value) if kind == BOOL else value

    def array(self, depth: int) -> Any:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > MAX_ARRAY or depth >= MAX_DEPTH:
            raise self.bad(f"an array of {count} values at depth {depth} exceeds the limits")
        if kind not in SCALARS:
            return [self.value(kind, depth + 1) for _ in range(count)]  # each takes at least 8 bytes of the file
        values = array(SCALARS[kind])
        start = self.take(count * values.itemsize)
        values.frombytes(self.data[start : self.at])
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self.data[:4] != b"GGUF":
            raise self.bad("it does not begin with the bytes GGUF")
        self.take(4)
        version = self.scalar("I")
        if version not in (2, 3):
            why = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
            raise UnsupportedModel(
                f"{self.what}: {why} GGUF is not supported", hint="use a little-endian v2 or v3 file"
            )
        tensor_count, key_count = self.scalar("Q"), self.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):  # a wrong count raises at the end of the file
            key = self.string()
            if key in metadata:
                raise self.bad(f"the key {key!r} occurs twice")
            metadata[key] = self.value(self.scalar("I"))
        infos = [self.tensor() for _ in range(tensor_count)]
        return metadata, self.placed(infos, metadata.get("general.alignment", 32))

    def tensor(self) -> GGUFTensor:
        name, dims = self.string(), self.scalar("I")
        if not 1 <= dims <= 4:
            raise self.bad(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
        kind, offset = self.scalar("I"), self.scalar("Q")
        if kind not in TYPES:
            if kind > LAST_KNOWN_TYPE:
                raise self.bad(f"tensor {name!r} has the unknown type {kind}")
            known = " ".join(t.name for t in TYPES.values())
            raise UnsupportedModel(
                f"tensor {name!r} has GGUF type {kind}, which is not supported", hint=f"supported: {known}"
            )
        type_ = TYPES[kind]
        count = prod(shape)
        if count == 0 or shape[-1] % type_.block or count // type_.block * type_.size > self.size:
            raise self.bad(f"tensor {name!r} of shape {shape} cannot be {type_.name}")
        return GGUFTensor(name, type_, shape, offset, count // type_.block * type_.size)

    def placed(self, infos: list[GGUFTensor], alignment: Any) -> dict[str, GGUFTensor]:
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self.bad(f"general.alignment is {alignment!r}")
        data = -(-self.at // alignment) * alignment
        end, out = 0, {}
        for t in sorted(infos, key=lambda t: t.start):
            if t.start % alignment or t.start < end or data + t.start + t.nbytes > self.size:
                raise self.bad(f"tensor {t.name!r} is misaligned, overlaps another or runs past the end")
            end = t.start + t.nbytes
            if t.name in out:
                raise self.bad(f"tensor {t.name!r} occurs twice")
            out[t.name] = GGUFTensor(t.name, t.type, t.shape, data + t.start, t.nbytes)
        return out
