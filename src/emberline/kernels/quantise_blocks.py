"""quantise_blocks: rounds a matrix of floats to GGUF blocks of 32 weights with a common scale."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_COLUMNS = 32
MAX_Q8, Q4_ZERO = 127.0, 8.0
# Steps of Q4_0 that are tried, in parts of the largest value. A step below an eighth cuts off the largest value, which
# pays if the other values of the block are much smaller.
Q4_STEPS = (-1 / 8, -1 / 8.5, -1 / 9, -1 / 7.5, 1 / 7.5)
MIN_STEP = 2.0**-24  # the smallest float16, so that a block of zeros can be divided by its step


def quantise_blocks(values: Tensor, type_name: str) -> Tensor:
    """Return the blocks of a matrix [n, k] of finite values: uint8 [n, bytes of a row]. k is a multiple of 32.

    The type is Q8_0, or Q4_0 with the step of each block that has the least squared error among a few."""
    groups = values.to(torch.float32).unflatten(-1, (-1, BLOCK_COLUMNS))
    if type_name == "Q8_0":
        steps = _round_steps(groups.abs().amax(dim=-1) / MAX_Q8)
        codes = torch.round(groups / steps[..., None].float()).clamp_(-MAX_Q8, MAX_Q8).to(torch.int8).view(torch.uint8)
    else:
        assert type_name == "Q4_0", type_name
        steps, nibbles = _choose_q4(groups)
        codes = nibbles[..., :16] | nibbles[..., 16:] << 4
    return torch.cat([steps[..., None].view(torch.uint8), codes], dim=-1).flatten(-2)


def _round_steps(steps: Tensor) -> Tensor:
    """Return the steps as float16, none of them zero or infinite."""
    largest = torch.finfo(torch.float16).max
    return torch.where(steps.abs() < MIN_STEP, MIN_STEP, steps.clamp(-largest, largest)).to(torch.float16)


def _choose_q4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step of each block in float16, and its codes 0 to 15."""
    at = groups.abs().argmax(dim=-1, keepdim=True)
    largest = groups.gather(-1, at).squeeze(-1)
    chosen: tuple[Tensor, Tensor] | None = None
    least = torch.empty(0)
    for part in Q4_STEPS:
        steps = _round_steps(largest * part)
        codes = torch.round(groups / steps[..., None].float()).add_(Q4_ZERO).clamp_(0.0, 15.0)
        error = (codes - Q4_ZERO).mul_(steps[..., None].float()).sub_(groups).square_().sum(dim=-1)
        if chosen is None:
            chosen, least = (steps, codes), error
            continue
        is_better = error < least
        chosen = torch.where(is_better, steps, chosen[0]), torch.where(is_better[..., None], codes, chosen[1])
        least = torch.minimum(error, least)
    assert chosen is not None
    return chosen[0], chosen[1].to(torch.uint8)
