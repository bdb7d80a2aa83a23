"""Random GGUF blocks, and the exact products of such weights with inputs rounded to int8."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from emberline.kernels.gguf_blocks import BLOCK_FORMATS, dequantise_blocks

INPUT_BLOCK = 32  # consecutive inputs with a common scale
FLOAT16_OFFSETS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}


def random_blocks(type_name: str, n: int, k: int, seed: int = 0) -> Tensor:
    """Return random codes with scales of plausible size, so that neither sums nor weights overflow."""
    rng, size = np.random.default_rng(seed), BLOCK_FORMATS[type_name].file_bytes
    blocks = rng.integers(0, 256, (n, k // BLOCK_FORMATS[type_name].elements, size), dtype=np.uint8)
    for at in FLOAT16_OFFSETS.get(type_name, (0,)):
        scales = rng.normal(0, 0.02, blocks.shape[:2]).astype("<f2")
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if type_name == "MXFP4":
        blocks[..., 0] = rng.integers(118, 124, blocks.shape[:2])
    return torch.from_numpy(blocks.reshape(n, -1))


def round_inputs(x: Tensor) -> Tensor:
    """Return float64 inputs as the kernels round them: each 32 to int8, with the scale of the largest."""
    blocks = x.view(len(x), -1, INPUT_BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest < 1e-30, 0.0, 127 / largest)
    return ((blocks * inverse).round().double() * (largest * torch.tensor(1 / 127)).double()).view(x.shape)


def exact_product(x: Tensor, blocks: Tensor, type_name: str) -> tuple[Tensor, Tensor]:
    """Return the product in float64, and the sum of the sizes of its terms, to which its rounding error is related."""
    weight = dequantise_blocks(blocks, type_name, x.shape[1]).double()
    rounded = round_inputs(x)
    return rounded @ weight.T, rounded.abs() @ weight.abs().T
