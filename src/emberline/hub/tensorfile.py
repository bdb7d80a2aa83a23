"""Safetensors files: a strict header reader and a streaming writer. Standard library only.

[u64 n | n bytes of JSON | tensor data ...]      offsets in the header count from 8 + n

A packed file (docs/unweight-format.md) is a safetensors file whose metadata describes the original tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.core.jsonfile import parse_object

MAX_HEADER_BYTES = 100 << 20
MAX_DIMENSIONS = 16
MAX_DIMENSION = 1 << 62
ALIGN_BYTES = 64
DTYPE_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}


PACKED_FORMAT, PACKED_VERSION = "unweight", "1"  # "format" and "version" in the metadata


@dataclass(frozen=True)
class TensorSlice:
    """A part of a stored tensor: the byte `ranges` of each of `num_records` consecutive records of equal size."""

    shape: tuple[int, ...]  # of the stored tensor
    record_bytes: int
    first_record: int
    num_records: int
    ranges: tuple[tuple[int, int], ...]  # (begin, end) in each record

    @property
    def num_bytes(self) -> int:
        return self.num_records * sum(end - begin for begin, end in self.ranges)

    def list_spans(self) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges of the part in the stored tensor, in order."""
        for record in range(self.first_record, self.first_record + self.num_records):
            start = record * self.record_bytes
            yield from ((start + begin, start + end) for begin, end in self.ranges)


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    file: Path
    offset: int  # in bytes from the start of the file
    nbytes: int  # size in the file
    packing: Mapping[str, Any] | None = None  # metadata of a tensor in a packed file; None: stored plain
    stored_slice: TensorSlice | None = None  # the part of the stored bytes that has this shape; None: all of them

    @property
    def whole(self) -> TensorInfo:
        """The stored tensor of which this is a part."""
        return self if self.stored_slice is None else replace(self, shape=self.stored_slice.shape, stored_slice=None)

    @property
    def logical_bytes(self) -> int:
        """The size of the tensor in bytes when it is not packed."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class SafetensorsHeader:
    text: bytes
    metadata: dict[str, Any]
    entries: dict[str, Any]
    data_offset: int  # start of the tensor data
    file_bytes: int

    @staticmethod
    def parse(text: bytes, path: Path, file_bytes: int) -> SafetensorsHeader:
        entries = parse_object(text, f"the header of {path}")
        metadata = entries.pop("__metadata__", None)
        return SafetensorsHeader(
            text, metadata if isinstance(metadata, dict) else {}, entries, 8 + len(text), file_bytes
        )

    @property
    def is_packed(self) -> bool:
        return self.metadata.get("format") == PACKED_FORMAT


def read_tensors(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file, packed or not. Raise ModelFileError if it is damaged."""
    header = read_header(path)
    tensors = list_stored_tensors(path, header)
    return _read_packed_infos(path, header, tensors) if header.is_packed else tensors


def list_stored_tensors(path: Path, header: SafetensorsHeader) -> dict[str, TensorInfo]:
    """Return the tensors as the safetensors header lists them.

    In a packed file, each packed tensor is listed as an array of bytes.
    """
    tensors = {
        name: _parse_stored_info(path, name, entry, header.data_offset) for name, entry in header.entries.items()
    }
    _check_offsets(path, tensors, header.data_offset, header.file_bytes)
    return tensors


def _check_offsets(path: Path, tensors: dict[str, TensorInfo], start: int, file_bytes: int) -> None:
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if t.offset != start:
            raise _make_damaged_error(path, f"tensor {name!r} overlaps the tensor before it or leaves a gap")
        start += t.nbytes
    if start != file_bytes:
        raise _make_damaged_error(path, f"the tensors need {start} bytes, but the file has {file_bytes}")


def read_header(path: Path) -> SafetensorsHeader:
    try:
        if not path.is_file():  # opening a pipe would block
            raise ModelFileError(f"{path} is missing or is not a regular file", hint="download the model again")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise _make_damaged_error(path, f"a header of {length} bytes does not fit the file of {size} bytes")
            text = file.read(length)
    except OSError as e:
        raise ModelFileError(f"cannot read {path}: {e.strerror or e}") from e
    return SafetensorsHeader.parse(text, path, size)


def compute_header_sha256(text: bytes, embedded_hash: str) -> str:
    """Return the SHA-256 of a packed file's header.

    The header contains its own hash, `embedded_hash`, which is replaced by zeros before hashing.
    """
    return hashlib.sha256(text.replace(embedded_hash.encode(), b"0" * 64, 1)).hexdigest()


def _read_packed_infos(path: Path, header: SafetensorsHeader, tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors with their original dtype and shape, from a packed file's metadata."""
    if header.metadata.get("version") != PACKED_VERSION:
        version = str(header.metadata.get("version"))[:20]
        hint = f"this release reads version {PACKED_VERSION}: pack the model again, or update Emberline"
        raise UnsupportedModel(
            f"{path} has version {version!r} of the packed format, which is not supported", hint=hint
        )
    check = str(header.metadata.get("check"))
    if len(check) != 64 or not check.isascii() or compute_header_sha256(header.text, check) != check:
        raise _make_damaged_error(path, "the checksum of the header does not match")
    descriptions = parse_object(str(header.metadata.get("tensors")), f"the list of tensors in {path}")
    if descriptions.keys() != tensors.keys():
        raise _make_damaged_error(path, "the metadata and the header list different tensors")
    return {name: _parse_packed_info(path, name, tensors[name], descriptions[name]) for name in tensors}


def _parse_packed_info(path: Path, name: str, stored: TensorInfo, description: Any) -> TensorInfo:
    if not isinstance(description, dict):
        raise _make_damaged_error(path, f"the metadata of tensor {name!r} must have a valid dtype and shape")
    dtype, shape = description.get("dtype"), description.get("shape")
    if (
        not isinstance(dtype, str)
        or dtype not in DTYPE_BYTES
        or not isinstance(shape, list)
        or not _are_valid_sizes(shape)
    ):
        raise _make_damaged_error(path, f"the metadata of tensor {name!r} must have a valid dtype and shape")
    return TensorInfo(dtype, tuple(shape), path, stored.offset, stored.nbytes, description)


def _parse_stored_info(path: Path, name: str, entry: Any, data_offset: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as e:
        raise _make_damaged_error(path, f"the header entry of tensor {name!r} is malformed") from e
    if not _are_valid_sizes(shape) or not _are_valid_sizes((start, end)) or not isinstance(dtype, str):
        raise _make_damaged_error(path, f"the header entry of tensor {name!r} is malformed")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(
            f"tensor {name!r} in {path} has the unsupported dtype {dtype}", hint=f"supported: {' '.join(DTYPE_BYTES)}"
        )
    if end - start != prod(shape) * DTYPE_BYTES[dtype]:
        raise _make_damaged_error(
            path, f"tensor {name!r} has {end - start} bytes, which does not fit shape {shape} and dtype {dtype}"
        )
    return TensorInfo(dtype, shape, path, data_offset + start, end - start)


def _are_valid_sizes(numbers: Sequence[Any]) -> bool:
    """Return whether the numbers can be a shape or offsets: few non-negative integers of limited size."""
    return len(numbers) <= MAX_DIMENSIONS and all(type(n) is int and 0 <= n <= MAX_DIMENSION for n in numbers)


def _make_damaged_error(path: Path, reason: str) -> ModelFileError:
    return ModelFileError(f"{path} is damaged: {reason}", hint="download the file again")


def write_tensors(
    path: Path, dtypes_and_shapes: dict[str, tuple[str, tuple[int, ...]]], chunks: Iterable[bytes | memoryview]
) -> None:
    """Write a safetensors file.

    `dtypes_and_shapes` maps each tensor's name to its dtype and shape. `chunks` yields the bytes of all tensors in this
    order; a chunk may end anywhere. Tensors with wide dtypes must come first, so that all tensors are aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, last = 0, 8
    for name, (dtype, shape) in dtypes_and_shapes.items():
        assert DTYPE_BYTES[dtype] <= last
        end, last = at + prod(shape) * DTYPE_BYTES[dtype], DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        written = sum(file.write(chunk) for chunk in chunks)
        assert written == at, (written, at)
        file.flush()
        os.fsync(file.fileno())
