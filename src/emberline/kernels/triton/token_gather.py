"""gather_tokens: inserts the newest sampled tokens into the input on the GPU, without the host."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.triton.jit import jit, pdl_trigger_and_wait

TOKENS_PER_PROGRAM = 128


@jit
def _gather_tokens(
    tokens: tensor, rows: tensor, newest: tensor, out: tensor, count: tensor, SIZE: constexpr, PDL: constexpr
) -> None:
    pdl_trigger_and_wait(PDL)
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    token = tl.load(tokens + i, i < count, 0)
    missing = (token < 0) & (i < count)
    row = tl.load(rows + i, missing, 0)
    newest_token = tl.load(newest + row, missing, 0)
    tl.store(out + i, tl.where(missing, newest_token, token), i < count)


def gather_tokens(tokens: Tensor, rows: Tensor, newest: Tensor, out: Tensor, *, pdl: bool = False) -> Tensor:
    """Set out[i] to tokens[i], or to newest[rows[i]] where tokens[i] is negative, and return out."""
    if count := len(tokens):
        _gather_tokens[(-(-count // TOKENS_PER_PROGRAM),)](
            tokens, rows, newest, out, count, TOKENS_PER_PROGRAM, pdl, num_warps=4, launch_pdl=pdl
        )
    return out
