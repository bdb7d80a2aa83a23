"""Reads tensors of GGUF files: as the blocks that kernels of a CPU multiply, or dequantised."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from emberline.hub.gguf_rows import ReadBytes, Values, decode_rows, join_latents, read_rows
from emberline.hub.gguf_tensors import GGUFTensorInfo
from emberline.hub.tensorfile import TensorInfo

BATCH_VALUES = 2 << 20  # dequantised at once by a thread


def read_blocks(parts: Sequence[TensorInfo], read: ReadBytes) -> Tensor | None:
    """Return the blocks of matrices, stacked: uint8 [rows, bytes of a row].

    The result is None if the matrices are not all in blocks of one type."""
    infos = [info for info in parts if isinstance(info, GGUFTensorInfo) and info.has_blocks]
    if len(infos) < len(parts) or len({info.block_type for info in infos}) > 1:
        return None
    rows = [read_rows(info, read) for info in infos]
    return torch.from_numpy(rows[0] if len(rows) == 1 else np.concatenate(rows))


def dequantise_tensor(info: GGUFTensorInfo, read: ReadBytes, dtype: torch.dtype, pool: ThreadPoolExecutor) -> Tensor:
    """Return the values of a tensor in this dtype; several threads dequantise a large one."""
    if info.latent_values is not None:
        return _to_tensor(join_latents(info, read)).to(dtype).view(info.shape)
    rows, width = read_rows(info, read), info.shape[-1]
    batch, values = max(1, BATCH_VALUES // width), torch.empty(len(rows), width, dtype=dtype)

    def fill(start: int) -> None:
        part = rows[start : start + batch]
        values[start : start + batch] = _to_tensor(decode_rows(info, part)).view(-1, width)

    starts = range(0, len(rows), batch)
    for _ in map(fill, starts) if len(starts) == 1 else pool.map(fill, starts):
        pass
    return values.view(info.shape)


def _to_tensor(values: Values) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if tensor.dtype is torch.uint16 else tensor
