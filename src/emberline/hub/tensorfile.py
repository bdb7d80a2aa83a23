"""Safetensors files: a strict header reader and a streaming writer. Standard library only.

[u64 n | n bytes of JSON | tensor data ...]      offsets in the header count from 8 + n

A packed file (docs/unweight-format.md) is a safetensors file whose metadata describes the original tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.core.jsonfile import parse_object

MAX_HEADER = 100 << 20
MAX_DIMENSIONS = 16
MAX_SIZE = 1 << 62
ALIGN = 64
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
}


PACKED, PACKED_VERSION = "unweight", "1"  # "format" and "version" in the metadata


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    file: Path
    offset: int  # in bytes from the start of the file
    nbytes: int  # size in the file
    packed: Mapping[str, Any] | None = None  # metadata of a tensor in a packed file; None: stored plain

    @property
    def logical_bytes(self) -> int:
        """Size of the tensor when it is not coded."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Header:
    text: bytes
    metadata: dict[str, Any]
    entries: dict[str, Any]
    data: int  # start of the tensor data
    size: int

    @staticmethod
    def parse(text: bytes, path: Path, size: int) -> Header:
        entries = parse_object(text, f"the header of {path}")
        metadata = entries.pop("__metadata__", None)
        return Header(text, metadata if isinstance(metadata, dict) else {}, entries, 8 + len(text), size)

    @property
    def packed(self) -> bool:
        return self.metadata.get("format") == PACKED


def read_tensors(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a file, packed or not. Raises ModelFileError if the file is damaged."""
    header = read_header(path)
    tensors = stored_tensors(path, header)
    return _unpacked(path, header, tensors) if header.packed else tensors


def stored_tensors(path: Path, header: Header) -> dict[str, TensorInfo]:
    """Return the tensors as the safetensors header lists them; in a packed file, the coded ones are bytes."""
    tensors = {name: _info(path, name, entry, header.data) for name, entry in header.entries.items()}
    _check_places(path, tensors, header.data, header.size)
    return tensors


def _check_places(path: Path, tensors: dict[str, TensorInfo], at: int, size: int) -> None:
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if t.offset != at:
            raise _bad(path, f"tensor {name!r} overlaps the one before it, or leaves a gap")
        at += t.nbytes
    if at != size:
        raise _bad(path, f"its tensors need {at} bytes, the file has {size}")


def read_header(path: Path) -> Header:
    try:
        if not path.is_file():  # opening a pipe would block
            raise ModelFileError(f"{path} is missing or is not a regular file", hint="download the model again")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise _bad(path, f"a header of {length} bytes does not fit the file of {size} bytes")
            text = file.read(length)
    except OSError as e:
        raise ModelFileError(f"cannot read {path}: {e.strerror or e}") from e
    return Header.parse(text, path, size)


def header_check(text: bytes, found: str) -> str:
    """Return the SHA-256 of a packed file's header, computed with zeros in place of the hash stored in it."""
    return hashlib.sha256(text.replace(found.encode(), b"0" * 64, 1)).hexdigest()


def _unpacked(path: Path, header: Header, tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the original dtype and shape of each tensor, from a packed file's metadata."""
    if header.metadata.get("version") != PACKED_VERSION:
        version = str(header.metadata.get("version"))[:20]
        hint = f"this release reads version {PACKED_VERSION}: pack the model again, or update Emberline"
        raise UnsupportedModel(f"{path} has version {version!r} of the packed format", hint=hint)
    check = str(header.metadata.get("check"))
    if len(check) != 64 or not check.isascii() or header_check(header.text, check) != check:
        raise _bad(path, "the checksum of its header does not match")
    descriptions = parse_object(str(header.metadata.get("tensors")), f"the list of tensors in {path}")
    if descriptions.keys() != tensors.keys():
        raise _bad(path, "its metadata lists other tensors than its header")
    return {name: _as_packed(path, name, tensors[name], descriptions[name]) for name in tensors}


def _as_packed(path: Path, name: str, stored: TensorInfo, said: Any) -> TensorInfo:
    if not isinstance(said, dict):
        raise _bad(path, f"the metadata of tensor {name!r} is malformed")
    dtype, shape = said.get("dtype"), said.get("shape")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES or not isinstance(shape, list) or not _sizes(shape):
        raise _bad(path, f"the metadata of tensor {name!r} is malformed")
    return TensorInfo(dtype, tuple(shape), path, stored.offset, stored.nbytes, said)


def _info(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as e:
        raise _bad(path, f"the entry of tensor {name!r} is malformed") from e
    if not _sizes(shape) or not _sizes((start, end)) or not isinstance(dtype, str):
        raise _bad(path, f"the entry of tensor {name!r} is malformed")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(
            f"tensor {name!r} in {path} has the unsupported dtype {dtype}", hint=f"supported: {' '.join(DTYPE_BYTES)}"
        )
    if end - start != prod(shape) * DTYPE_BYTES[dtype]:
        raise _bad(path, f"tensor {name!r} of shape {shape} and dtype {dtype} has {end - start} bytes")
    return TensorInfo(dtype, shape, path, data + start, end - start)


def _sizes(numbers: Sequence[Any]) -> bool:
    """Return whether these are non-negative integers, few and small enough to multiply."""
    return len(numbers) <= MAX_DIMENSIONS and all(type(n) is int and 0 <= n <= MAX_SIZE for n in numbers)


def _bad(path: Path, why: str) -> ModelFileError:
    return ModelFileError(f"{path} is damaged: {why}", hint="download the file again")


def write_tensors(
    path: Path, specs: dict[str, tuple[str, tuple[int, ...]]], chunks: Iterable[bytes | memoryview]
) -> None:
    """Write a file; `specs`: dtype and shape of each tensor; `chunks`: their bytes in order, split anywhere.

    Tensors of wide dtypes must come first, so that all are aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, last = 0, 8
    for name, (dtype, shape) in specs.items():
        assert DTYPE_BYTES[dtype] <= last
        end, last = at + prod(shape) * DTYPE_BYTES[dtype], DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        written = sum(file.write(chunk) for chunk in chunks)
        assert written == at, (written, at)
        file.flush()
        os.fsync(file.fileno())
