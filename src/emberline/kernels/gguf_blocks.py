"""The GGUF block formats whose codes CPU kernels multiply directly, and their conversion to floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.hub.dequant import dequantise
from emberline.kernels.packed_weight import WeightLayout


class UnsupportedBlocks(ValueError):
    """A matrix of GGUF blocks that has no kernel; the message says why."""


class DamagedBlocks(ValueError):
    """A matrix of GGUF blocks that has a scale that is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class GGUFBlockFormat:
    """One block format: how many weights a block has, its size in the file, and the layout in memory."""

    elements: int
    file_bytes: int
    layout: WeightLayout


BLOCK_FORMATS = {
    "Q4_0": GGUFBlockFormat(32, 18, WeightLayout.Q4_0),
    "Q4_1": GGUFBlockFormat(32, 20, WeightLayout.Q4_1),
    "Q5_0": GGUFBlockFormat(32, 22, WeightLayout.Q5_0),
    "Q5_1": GGUFBlockFormat(32, 24, WeightLayout.Q5_1),
    "Q8_0": GGUFBlockFormat(32, 34, WeightLayout.Q8_0),
    "Q4_K": GGUFBlockFormat(256, 144, WeightLayout.Q4_K),
    "Q5_K": GGUFBlockFormat(256, 176, WeightLayout.Q5_K),
    "Q6_K": GGUFBlockFormat(256, 210, WeightLayout.Q6_K),
    "IQ4_NL": GGUFBlockFormat(32, 18, WeightLayout.IQ4_NL),
    "MXFP4": GGUFBlockFormat(32, 17, WeightLayout.MXFP4),
}


def find_block_format(blocks: Tensor, type_name: str, k: int) -> GGUFBlockFormat:
    """Return the format of a matrix [n, k] of blocks.

    Raises UnsupportedBlocks for an unknown type, or if rows of k weights do not consist of whole blocks.
    """
    if type_name not in BLOCK_FORMATS:
        raise UnsupportedBlocks(f"GGUF type {type_name!r} has no CPU kernel; supported: {', '.join(BLOCK_FORMATS)}")
    found = BLOCK_FORMATS[type_name]
    if k <= 0 or k % found.elements:
        raise UnsupportedBlocks(
            f"rows of {k} weights are not whole blocks of {type_name}, {found.elements} weights each"
        )
    row_bytes = k // found.elements * found.file_bytes
    if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] != row_bytes:
        raise UnsupportedBlocks(
            f"rows of {k} weights of {type_name} have {row_bytes} bytes each; "
            f"the tensor has the dtype {blocks.dtype} and the shape {tuple(blocks.shape)}"
        )
    return found


def dequantise_blocks(blocks: Tensor, type_name: str, k: int) -> Tensor:
    """Return the matrix as float32 [n, k]. Raises UnsupportedBlocks as `find_block_format` does."""
    found = find_block_format(blocks, type_name, k)
    raw = blocks.cpu().contiguous().numpy().data.cast("B")
    return torch.from_numpy(dequantise(raw, type_name, found.file_bytes)).view(len(blocks), k)
