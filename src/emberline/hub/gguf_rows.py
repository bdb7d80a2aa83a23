"""Reads the rows of tensors in GGUF files, in the order of a checkpoint, and dequantises them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from emberline.core.errors import ModelFileError
from emberline.hub.dequant import Bytes, Floats, dequantise, round_to_bf16
from emberline.hub.gguf_tensors import PLAIN_TYPES, GGUFTensorInfo
from emberline.hub.tensorfile import TensorInfo

NAN_EXPONENT = 255  # of MXFP4
CHUNK_BYTES = 8 << 20  # of float32 values dequantised at once

ReadBytes = Callable[[TensorInfo], Bytes]  # returns the bytes of a tensor in its file
Values = np.ndarray[Any, Any]


def read_rows(info: GGUFTensorInfo, read: ReadBytes) -> Bytes:
    """Return the stored bytes of all rows [rows, bytes of a row], in the order of the checkpoint.

    Every GGUF type codes each row separately, so rows can be reordered without dequantisation."""
    rows = read(info)
    if info.rotary_heads:
        unit = info.row_bytes if len(info.shape) > 1 else info.block_type.block_bytes
        rows = _reorder_rotary_rows(rows.reshape(-1, unit), info.rotary_heads)
    return rows.reshape(-1, info.row_bytes)


def decode_rows(info: GGUFTensorInfo, rows: Bytes) -> Values:
    """Return the values of rows, which may be a part of what `read_rows` returns, as a flat array.

    Quantised values are returned in float32, and bf16 as 16-bit integers."""
    rows = np.ascontiguousarray(rows)
    if info.block_type.name not in PLAIN_TYPES:
        return _dequantise(info, rows)
    values = rows.reshape(-1).view({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[info.block_type.name])
    return (values - np.float32(info.added)) if info.added else values


def join_latents(info: GGUFTensorInfo, read: ReadBytes) -> Values:
    """Return the matrix of latent attention, whose keys are stored transposed, as a flat array."""
    assert info.latent_values is not None
    keys, values = (_read_floats(part, read) for part in (info, info.latent_values))
    rank, heads = info.shape[-1], info.latent_values.shape[0]
    keys, values = keys.reshape(heads, rank, -1), values.reshape(heads, -1, rank)
    whole = np.ascontiguousarray(np.concatenate([keys.transpose(0, 2, 1), values], axis=1)).reshape(-1)
    return whole.astype("<f2") if info.dtype == "F16" else whole


def iter_checkpoint_bytes(info: GGUFTensorInfo, read: ReadBytes) -> Iterator[bytes]:
    """Yield the bytes of a tensor in the checkpoint's dtype, a batch of rows at a time."""
    for values in _iter_values(info, read):
        if info.dtype == "BF16" and values.dtype == np.float32:
            values = round_to_bf16(values).astype("<u2", copy=False)
        yield values.tobytes()


def _iter_values(info: GGUFTensorInfo, read: ReadBytes) -> Iterator[Values]:
    if info.latent_values is not None:
        yield join_latents(info, read)
        return
    rows, batch = read_rows(info, read), max(1, CHUNK_BYTES // (4 * info.shape[-1]))
    for start in range(0, len(rows), batch):
        yield decode_rows(info, rows[start : start + batch])


def _read_floats(info: GGUFTensorInfo, read: ReadBytes) -> Floats:
    return _dequantise(info, read(info))


def _dequantise(info: GGUFTensorInfo, stored: Bytes) -> Floats:
    """Return the values of blocks. Raises ModelFileError if a scale is NaN or infinite."""
    kind = info.block_type
    with np.errstate(invalid="ignore"):
        values = dequantise(stored.data.cast("B"), kind.name, kind.block_bytes)
    is_nan_exponent = kind.name == "MXFP4" and (stored.reshape(-1, kind.block_bytes)[:, 0] == NAN_EXPONENT).any()
    if is_nan_exponent or (kind.name not in PLAIN_TYPES and not np.isfinite(values).all()):
        message = f"tensor {info.name!r} in {info.file}: a block of {kind.name} has a scale that is NaN or infinite"
        raise ModelFileError(message, hint="download the file again")
    return values


def _reorder_rotary_rows(rows: Bytes, heads: int) -> Bytes:
    """Reorder rows from llama.cpp's layout (rotary pairs side by side) to the usual one (first halves first)."""
    pairs = rows.reshape(heads, len(rows) // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)
