"""GGUFFile: reads metadata and tensors of a GGUF file (version 2 or 3), and checks every count and offset.

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

MAX_HEADER_BYTES = 128 << 20  # the largest vocabularies in use need about 15 MiB
MAX_ARRAY_LENGTH = 1 << 22
MAX_ARRAY_DEPTH = 3
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GGUFTensorType:
    name: str
    block_elements: int  # elements in a block
    block_bytes: int  # bytes in a block


TENSOR_TYPES = {
    0: GGUFTensorType("F32", 1, 4),
    1: GGUFTensorType("F16", 1, 2),
    2: GGUFTensorType("Q4_0", 32, 18),
    3: GGUFTensorType("Q4_1", 32, 20),
    6: GGUFTensorType("Q5_0", 32, 22),
    7: GGUFTensorType("Q5_1", 32, 24),
    8: GGUFTensorType("Q8_0", 32, 34),
    10: GGUFTensorType("Q2_K", 256, 84),
    11: GGUFTensorType("Q3_K", 256, 110),
    12: GGUFTensorType("Q4_K", 256, 144),
    13: GGUFTensorType("Q5_K", 256, 176),
    14: GGUFTensorType("Q6_K", 256, 210),
    20: GGUFTensorType("IQ4_NL", 32, 18),
    23: GGUFTensorType("IQ4_XS", 256, 136),
    30: GGUFTensorType("BF16", 1, 2),
    39: GGUFTensorType("MXFP4", 32, 17),
}
UNSUPPORTED_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}
LAST_KNOWN_TYPE = 41  # smaller ids without a name belonged to formats that were removed


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    type: GGUFTensorType
    shape: tuple[int, ...]  # outermost dimension first, as in torch; the file stores the reverse
    start: int  # in bytes from the start of the file
    nbytes: int


class GGUFFile:
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
            self.metadata, self.tensors = _GGUFHeaderReader(self._map, str(path)).read_metadata_and_tensors()
        except BaseException:
            self._map.close()
            raise

    def raw_bytes(self, tensor: GGUFTensor) -> memoryview:
        return self.view_bytes(tensor.start, tensor.nbytes)

    def view_bytes(self, start: int, size: int) -> memoryview:
        return memoryview(self._map)[start : start + size]

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with suppress(BufferError):  # a traceback may hold a view; the map is then closed with it
            self._map.close()


class _GGUFHeaderReader:
    """Reads the header from start to `end`, and never beyond it.

    So no count in the file can cause an allocation that is larger than the file.
    """

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data, self.name, self.size = data, name, len(data)
        self.position, self.end = 0, min(len(data), MAX_HEADER_BYTES)

    def make_damaged_file_error(self, reason: str) -> ModelFileError:
        return ModelFileError(
            f"{self.name} is not a usable GGUF file: {reason} (byte {self.position})", hint="download the file again"
        )

    def advance(self, byte_count: int) -> int:
        start = self.position
        if byte_count > self.end - start:
            raise self.make_damaged_file_error(
                f"the header continues past byte {self.end}, the end of the file or the maximum header size"
            )
        self.position += byte_count
        return start

    def read_scalar(self, struct_code: str) -> Any:
        size = struct.calcsize("<" + struct_code)
        return struct.unpack_from("<" + struct_code, self.data, self.advance(size))[0]

    def read_string(self) -> str:
        n = self.read_scalar("Q")
        start = self.advance(n)
        try:
            return self.data[start : start + n].decode()
        except UnicodeDecodeError as e:
            raise self.make_damaged_file_error("a string in the header is not UTF-8") from e

    def read_value(self, value_type: int, depth: int = 0) -> Any:
        if value_type == STRING:
            return self.read_string()
        if value_type == ARRAY:
            return self.read_array(depth)
        if value_type not in SCALARS:
            raise self.make_damaged_file_error(f"a metadata value has the unknown type {value_type}")
        value = self.read_scalar(SCALARS[value_type])
        if value_type == BOOL and value > 1:
            raise self.make_damaged_file_error(f"a boolean metadata value must be 0 or 1, not {value}")
        return bool(value) if value_type == BOOL else value

    def read_array(self, depth: int) -> Any:
        kind, count = self.read_scalar("I"), self.read_scalar("Q")
        if count > MAX_ARRAY_LENGTH or depth >= MAX_ARRAY_DEPTH:
            raise self.make_damaged_file_error(
                f"an array has {count} values at nesting depth {depth}, which exceeds the limits"
            )
        if kind not in SCALARS:
            return [self.read_value(kind, depth + 1) for _ in range(count)]  # each takes at least 8 bytes of the file
        values = array(SCALARS[kind])
        start = self.advance(count * values.itemsize)
        values.frombytes(self.data[start : self.position])
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def read_metadata_and_tensors(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self.data[:4] != b"GGUF":
            raise self.make_damaged_file_error("the file does not begin with the bytes GGUF")
        self.advance(4)
        version = self.read_scalar("I")
        if version not in (2, 3):
            why = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
            raise UnsupportedModel(
                f"{self.name} is a {why} GGUF file, which is not supported", hint="use a little-endian v2 or v3 file"
            )
        tensor_count, key_count = self.read_scalar("Q"), self.read_scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):  # a wrong count raises at the end of the file
            key = self.read_string()
            if key in metadata:
                raise self.make_damaged_file_error(f"the metadata key {key!r} occurs twice")
            metadata[key] = self.read_value(self.read_scalar("I"))
        infos = [self.read_tensor_info() for _ in range(tensor_count)]
        return metadata, self.check_offsets(infos, metadata.get("general.alignment", 32))

    def read_tensor_info(self) -> GGUFTensor:
        name, dims = self.read_string(), self.read_scalar("I")
        if not 1 <= dims <= 4:
            raise self.make_damaged_file_error(f"tensor {name!r} must have 1 to 4 dimensions, not {dims}")
        shape = tuple(self.read_scalar("Q") for _ in range(dims))[::-1]
        kind, offset = self.read_scalar("I"), self.read_scalar("Q")
        if kind not in TENSOR_TYPES:
            if kind > LAST_KNOWN_TYPE:
                raise self.make_damaged_file_error(f"tensor {name!r} has the unknown type {kind}")
            known = " ".join(t.name for t in TENSOR_TYPES.values())
            raise UnsupportedModel(
                f"tensor {name!r} in {self.name} has GGUF type {UNSUPPORTED_TYPES.get(kind, kind)}, "
                "which is not supported",
                hint=f"supported: {known}",
            )
        type_ = TENSOR_TYPES[kind]
        count = prod(shape)
        size = count // type_.block_elements * type_.block_bytes
        if count == 0 or shape[-1] % type_.block_elements:
            raise self.make_damaged_file_error(
                f"tensor {name!r} has the shape {shape}; the size of {type_.name} rows is a multiple of "
                f"{type_.block_elements} values"
            )
        if size > self.size:
            raise self.make_damaged_file_error(f"tensor {name!r} has {size} bytes, and the file only {self.size}")
        return GGUFTensor(name, type_, shape, offset, size)

    def check_offsets(self, tensors: list[GGUFTensor], alignment: Any) -> dict[str, GGUFTensor]:
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self.make_damaged_file_error(
                f"general.alignment must be a power of two from 8 to 65536, not {alignment!r}"
            )
        data = -(-self.position // alignment) * alignment
        end, out = 0, {}
        for t in sorted(tensors, key=lambda t: t.start):
            if t.start % alignment or t.start < end or data + t.start + t.nbytes > self.size:
                raise self.make_damaged_file_error(
                    f"tensor {t.name!r} is misaligned, overlaps a tensor or ends after the file"
                )
            end = t.start + t.nbytes
            if t.name in out:
                raise self.make_damaged_file_error(f"two tensors have the name {t.name!r}")
            out[t.name] = GGUFTensor(t.name, t.type, t.shape, data + t.start, t.nbytes)
        return out
