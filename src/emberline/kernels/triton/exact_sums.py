"""sum_exactly: adds the outputs of each row's experts as `kernels.exact_sums` defines, in one kernel."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.exact_sums import ROUNDER
from emberline.kernels.triton.jit import jit, next_power_of_two, pdl_trigger_and_wait

MAX_BLOCK = 512  # columns of a program


@jit
def _round_term(term: tensor, ROUNDER: constexpr) -> tensor:
    return (term.to(tl.float64) + ROUNDER) - ROUNDER


@jit
def _sum_exactly(
    outputs: tensor, shared: tensor, sums: tensor,
    COLUMNS: constexpr, TERMS: constexpr, BLOCK: constexpr, ROUNDER: constexpr, HAS_SHARED: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    pdl_trigger_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    total = tl.zeros([BLOCK], tl.float64)
    if HAS_SHARED:
        total += _round_term(tl.load(shared + row * COLUMNS + column, inside, 0.0), ROUNDER)
    for number in tl.static_range(TERMS):
        total += _round_term(tl.load(outputs + (row * TERMS + number) * COLUMNS + column, inside, 0.0), ROUNDER)
    tl.store(sums + row * COLUMNS + column, total, inside)


def sum_exactly(outputs: Tensor, terms: int, *, shared: Tensor | None = None, pdl: bool = False) -> Tensor:
    """Return the float64 sum of the `terms` outputs of each row: [rows * terms, n] becomes [rows, n].

    `shared`: one more term of each row, [rows, n]."""
    count, columns = outputs.shape
    assert outputs.is_contiguous() and count % terms == 0
    sums = torch.empty(count // terms, columns, dtype=torch.float64, device=outputs.device)
    assert shared is None or (shared.is_contiguous() and shared.shape == sums.shape)
    block = min(MAX_BLOCK, max(32, next_power_of_two(columns)))
    _sum_exactly[(len(sums), -(-columns // block))](
        outputs, outputs if shared is None else shared, sums, columns, terms, block, ROUNDER, shared is not None, pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return sums
