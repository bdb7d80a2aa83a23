"""A safetensors file: a strict header reader and a writer that streams one tensor at a time. Standard library only.

[u64 n | n bytes of JSON | tensor data ...]      offsets in the header count from 8 + n
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.core.jsonfile import parse_object

MAX_HEADER = 100 << 20
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


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    file: Path
    offset: int  # absolute, in bytes
    nbytes: int


def read_tensors(path: Path) -> dict[str, TensorInfo]:
    header, data, size = _read_header(path)
    header.pop("__metadata__", None)
    tensors = {name: _info(path, name, entry, data) for name, entry in header.items()}
    at = data
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if t.offset != at:
            raise _bad(path, f"tensor {name!r} overlaps its neighbour or leaves a hole")
        at += t.nbytes
    if at != size:
        raise _bad(path, f"its tensors need {at} bytes and it has {size}")
    return tensors


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise _bad(path, f"a header of {length} bytes does not fit")
            return parse_object(file.read(length), f"the header of {path}"), 8 + length, size
    except OSError as e:
        raise ModelFileError(f"cannot read {path}: {e.strerror or e}") from e


def _info(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as e:
        raise _bad(path, f"the entry of tensor {name!r} is malformed") from e
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)) or not isinstance(dtype, str):
        raise _bad(path, f"the entry of tensor {name!r} is malformed")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(
            f"tensor {name!r} in {path} has the dtype {dtype}", hint=f"known: {' '.join(DTYPE_BYTES)}"
        )
    if end - start != prod(shape) * DTYPE_BYTES[dtype]:
        raise _bad(path, f"tensor {name!r} of shape {shape} and dtype {dtype} has {end - start} bytes")
    return TensorInfo(dtype, shape, path, data + start, end - start)


def _bad(path: Path, why: str) -> ModelFileError:
    return ModelFileError(f"{path} is damaged: {why}", hint="download the file again")


def write_tensors(
    path: Path, specs: dict[str, tuple[str, tuple[int, ...]]], chunks: Iterable[bytes | memoryview]
) -> None:
    """`chunks`: the tensors' bytes in order, cut anywhere. Wide dtypes come first, so all are aligned."""
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
