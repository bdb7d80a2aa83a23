"""run_chain: one kernel for several matrix products with 4-bit weights, one after the other, for few rows of x.

`chain.cu` has the kernel. A row's result does not depend, bit for bit, on its index or on other rows.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from emberline.kernels.arguments import LayerProducts
from emberline.kernels.cuda.driver import CudaKernel, CudaModule, count_sms
from emberline.kernels.cuda.linear import MAX_SHARED_BYTES
from emberline.kernels.cuda.narrow import FORMATS
from emberline.kernels.cuda.narrow_layout import FourBitWeight
from emberline.kernels.four_bit_size import UNIT_COLUMNS

FILE = "chain.cu"
WARPS, BLOCKS, GROUP_ROWS, MAX_PRODUCTS = 16, 2, 32, 4  # as in chain.cu
MAX_ROWS = 2  # as in chain.cu; with more rows, a kernel for each product is faster
SQUARES, STEP_UNITS, STEP_BYTES = MAX_ROWS * WARPS, 2, 16
MAX_NORMED_COLUMNS = 8192
MIN_STAGES, MAX_STAGES = 2, 8
KERNELS = VARIANTS = tuple(f"chain<{name}>" for name in FORMATS)


@dataclass(frozen=True, slots=True)
class ChainedProduct:
    """out = norm(x) w^T + bias + residual, or silu(gate) * up if w has gates and ups. The norm is optional."""

    x: Tensor  # bf16 [rows, k]; may be the output of an earlier product of the chain
    w: FourBitWeight
    out: Tensor  # bf16
    norm: Tensor | None = None  # float32 [k]: weight of an RMS norm of x
    eps: float = 0.0
    bias: Tensor | None = None  # float32 [n]
    residual: Tensor | None = None  # may be `out` itself


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "x", "norm", "row_scales", "bias", "out", "residual")),
        *((name, ctypes.c_int) for name in ("n", "units", "gated")),
        *((name, ctypes.c_float) for name in ("factor", "eps")),
    )


class _Chain(ctypes.Structure):
    _fields_ = (
        ("products", _Product * MAX_PRODUCTS),
        ("arrivals", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("count", "rows", "stages", "x_bytes", "max_steps")),
    )


def supports(rows: int, weights: Sequence[FourBitWeight], normed_columns: int) -> bool:
    """Return whether `run_chain` can multiply `rows` rows of x by these weights.

    `normed_columns`: the largest number of columns of an x to which a norm is applied."""
    if not 1 <= len(weights) <= MAX_PRODUCTS or not 1 <= rows <= MAX_ROWS or normed_columns > MAX_NORMED_COLUMNS:
        return False
    if len({w.format for w in weights}) > 1 or any(w.columns is not None for w in weights):
        return False
    if any(w.n % GROUP_ROWS or w.k % UNIT_COLUMNS for w in weights):
        return False
    return ChainMemory.make(rows, weights).stages >= MIN_STAGES


def run_layer_products(mixed: Tensor, x: Tensor, products: LayerProducts) -> Tensor | None:
    """Do what `layer_ops.run_layer_products` describes; return None if `run_chain` cannot do it."""
    if len(x) > MAX_ROWS:
        return None
    used = products.o, products.gate_up, products.down, products.qkv
    weights = [each.weight.handle for each in used if isinstance(each.weight.handle, FourBitWeight)]
    if len(weights) < len(used) or x.dtype is not torch.bfloat16 or any(each.weight.fixed_order for each in used):
        return None
    if not supports(len(x), weights, x.shape[1]):
        return None
    if (arrivals := get_arrivals(x.device)) is None:
        return None
    o, gate_up, down, qkv = weights
    inner, out = x.new_empty(len(x), gate_up.n // 2), x.new_empty(len(x), qkv.n)
    (norm, eps), (next_norm, next_eps) = ((each.norm, each.eps) for each in (products.gate_up, products.qkv))
    chain = (
        ChainedProduct(mixed, o, x, bias=products.o.bias, residual=x),
        ChainedProduct(x, gate_up, inner, norm, eps),
        ChainedProduct(inner, down, x, bias=products.down.bias, residual=x),
        ChainedProduct(x, qkv, out, next_norm, next_eps, products.qkv.bias),
    )
    run_chain(chain, arrivals)
    return out


def get_arrivals(device: torch.device) -> Tensor | None:
    """Return the counter that `run_chain` needs on the current stream, or None if it must not run on this stream.

    Call this once before a launch on the stream is captured. The CTAs of a launch wait for each other. So two launches
    at the same time could each occupy some of the multiprocessors, and wait forever. Therefore only the first stream
    that calls this gets a counter, and no stream does if kernels of other processes may run at the same time."""
    return _get_arrivals(device, torch.cuda.current_stream(device).cuda_stream)


@cache
def _get_arrivals(device: torch.device, stream: int) -> Tensor | None:
    assert not torch.cuda.is_current_stream_capturing(), "a captured graph would zero the counter in every replay"
    if _first_streams.setdefault(device, stream) != stream or _shares_gpu():
        return None
    return torch.zeros(1, dtype=torch.int32, device=device)


_first_streams: dict[torch.device, int] = {}


def _shares_gpu() -> bool:
    """Return whether CUDA's multi-process service (MPS) runs kernels of several processes at the same time."""
    return "CUDA_MPS_PIPE_DIRECTORY" in os.environ or Path("/tmp/nvidia-mps").exists()


def run_chain(products: Sequence[ChainedProduct], arrivals: Tensor) -> None:
    """Compute the products in order. `arrivals`: int32 [1], zero before the first call. Calls must not overlap."""
    weights, rows = [each.w for each in products], len(products[0].x)
    memory = ChainMemory.make(rows, weights)
    chain = _Chain(arrivals=arrivals.data_ptr(), count=len(products), rows=rows, stages=memory.stages)
    chain.x_bytes, chain.max_steps = memory.x_bytes, memory.max_steps
    for i, product in enumerate(products):
        chain.products[i] = _describe(product, rows, gated=product.out.shape[1] < product.w.n)
    kernel = _get_kernel(f"chain<{weights[0].format}>")
    kernel((count_sms(), 1, 1), 32 * WARPS, (chain,), pdl=True, shared_bytes=memory.total_bytes)


def _describe(product: ChainedProduct, rows: int, *, gated: bool) -> _Product:
    x, w, out = product.x, product.w, product.out
    assert x.shape == (rows, w.k) and x.is_contiguous() and x.dtype is torch.bfloat16 and x.data_ptr() % 16 == 0
    assert out.shape == (rows, w.n // 2 if gated else w.n) and out.is_contiguous() and out.dtype is torch.bfloat16
    residual, norm, bias = product.residual, product.norm, product.bias
    assert residual is None or (residual.shape == out.shape and residual.is_contiguous() and not gated)
    for vector in (norm, bias):
        assert vector is None or (vector.dtype is torch.float32 and vector.is_contiguous())
    assert w.gated == gated
    pointers = (
        None if each is None else each.data_ptr() for each in (w.data, x, norm, w.row_scales, bias, out, residual)
    )
    return _Product(*pointers, w.n, w.k // UNIT_COLUMNS, gated, w.factor, product.eps)


@dataclass(frozen=True, slots=True)
class ChainMemory:
    """The shared memory of a CTA, in bytes: the layout in chain.cu."""

    x_bytes: int
    max_steps: int  # of a warp
    stages: int  # of each warp's ring; 0: there is no memory left for one
    total_bytes: int

    @staticmethod
    def make(rows: int, weights: Sequence[FourBitWeight]) -> ChainMemory:
        """Return the layout with as many pipeline stages as fit into shared memory, up to MAX_STAGES."""
        x_bytes = rows * (2 * max(w.k for w in weights) + 16)
        group_columns = UNIT_COLUMNS * STEP_UNITS * WARPS  # of all warps, in a step
        max_steps = sum(-(-w.n // (GROUP_ROWS * count_sms())) * -(-w.k // group_columns) for w in weights)
        sums = 2 * WARPS * rows * (GROUP_ROWS + 4) * 4
        base = x_bytes + sums + SQUARES * 4 + WARPS * max_steps * STEP_BYTES
        stage = WARPS * (STEP_UNITS * BLOCKS * weights[0].unit_bytes + 8)
        stages = max(0, min(MAX_STAGES, (MAX_SHARED_BYTES - base) // stage))
        return ChainMemory(x_bytes, max_steps, stages, base + stages * stage)


@cache
def _get_kernel(kernel_name: str) -> CudaKernel:
    return CudaModule(FILE, [kernel_name]).kernel(kernel_name, MAX_SHARED_BYTES)
