"""silu_mul, gelu_mul: compute silu(gate) * up or gelu(gate) * up; gate and up columns alternate in one tensor.

They round after each operation, as torch does.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from emberline.kernels.triton.jit import jit, pdl_trigger_and_wait

SMALL_BATCH_ROWS = 128  # up to this many rows, smaller blocks are faster, since they give more programs


@jit
def _gated_mul(
    gate_up: tensor,
    out: tensor,
    in_stride: tensor,
    out_stride: tensor,
    COLUMNS: constexpr,
    GROUP: constexpr,
    BLOCK: constexpr,
    GELU: constexpr,
    PDL: constexpr,
) -> None:
    pdl_trigger_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    at = gate_up + row * in_stride + column // GROUP * (2 * GROUP) + column % GROUP
    gate = tl.load(at, inside, 0.0).to(tl.float32)
    up = tl.load(at + GROUP, inside, 0.0).to(tl.float32)
    inner = gate
    if GELU:  # the approximation by a tanh: 1 + tanh(u) is 2 / (1 + e^-2u)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate / (1.0 + tl.exp(-inner))).to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + row * out_stride + column, (activated * up).to(out.dtype.element_ty), inside)


def silu_mul(gate_up: Tensor, out: Tensor, group: int, *, pdl: bool = False) -> Tensor:
    """Write silu(gate) * up into `out` [T, F] and return it.

    `gate_up` [T, 2F] has `group` gate columns, then their `group` up columns, and so on. With group = F, the first half
    is gate and the second half is up.
    """
    return _launch(gate_up, out, group, gelu=False, pdl=pdl)


def gelu_mul(gate_up: Tensor, out: Tensor, group: int, *, pdl: bool = False) -> Tensor:
    """Write gelu(gate) * up into `out` [T, F] and return it. gelu is approximated by a tanh.

    `gate_up`, `group`: as for `silu_mul`."""
    return _launch(gate_up, out, group, gelu=True, pdl=pdl)


def _launch(gate_up: Tensor, out: Tensor, group: int, *, gelu: bool, pdl: bool) -> Tensor:
    rows, columns = out.shape
    assert gate_up.shape == (rows, 2 * columns) and columns % group == 0
    assert gate_up.stride(1) == out.stride(1) == 1
    block = 1024 if rows <= SMALL_BATCH_ROWS else 2048
    if rows:
        _gated_mul[(rows, -(-columns // block))](
            gate_up, out, gate_up.stride(0), out.stride(0), columns, group, block, gelu, pdl,
            num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out
