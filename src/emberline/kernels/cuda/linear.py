"""linear: computes y = x w^T for at most 32 rows of x, where reading the weights is the bottleneck.

`linear.cu` has the kernel. A row's result is the same, bit for bit, for every number of rows that `supports` accepts,
for every index of the row, and for plain and packed weights. For more rows cuBLAS is used, which sums in a different
order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import CudaKernel, CudaModule, TensorMap, count_sms, make_tensor_map
from emberline.kernels.cuda.fp8_weight import FP8Weight
from emberline.kernels.cuda.uw12 import UNIT_BYTES, PackedUnits, UW12Weight

FILE = "linear.cu"
MAX_ROWS = 32  # with more rows, tiles of x take more of the L2's bandwidth than the weights
SLOT_K = 64  # columns (k) in a slot of the pipeline: rows of 128 bytes, the widest TMA swizzle
MAX_SHARED_BYTES = 227 << 10
MIN_IN_FLIGHT_BYTES = 96 << 10  # weights that an SM must have requested to keep memory busy
WARPS = 8  # warps split k, which determines the order of sums: the same for all shapes
EPILOGUES = ("STORE", "STORE_F32", "ADD", "GATED")
# For packed weights, where a sweep on an H200 found better plans: (tiles, n, k): (blocks, CTAs per SM, stages).
MEASURED_PACKED = {
    (1, 6144, 4096): (2, 2, 3),
    (2, 6144, 4096): (2, 2, 2),
    (4, 6144, 4096): (3, 1, 2),
    (1, 4096, 4096): (1, 2, 3),
    (2, 4096, 4096): (1, 2, 2),
    (4, 4096, 4096): (1, 2, 2),
    (1, 4096, 14336): (2, 1, 5),
    (2, 4096, 14336): (2, 1, 4),
    (4, 4096, 14336): (2, 1, 2),
    (1, 128256, 4096): (4, 1, 3),
}

MEASURED_FP8 = {  # the same for float8 weights
    (1, 6144, 4096): (2, 2, 2),
    (2, 6144, 4096): (3, 1, 2),
    (1, 4096, 4096): (2, 2, 2),
    (2, 4096, 4096): (3, 1, 2),
    (4, 4096, 4096): (2, 1, 2),
    (4, 4096, 14336): (2, 1, 2),
}
MEASURED_FP8_GATED = {(1, 28672, 4096): (2, 1, 3)}  # the same for gated float8 weights


@dataclass(frozen=True, slots=True)
class SkinnyPlan:
    """The tile sizes and the launch parameters with which a product of one shape is computed."""

    blocks: int  # blocks of 16 outputs in a CTA's tile
    tiles: int  # tiles of 8 rows of x
    warps: int
    stages: int  # stages of each warp's pipeline
    buffers: int  # sets of partial sums besides the pipeline's own memory
    grid: int  # CTAs
    header_stride: int = 0  # bytes of a header of packed weights; 0: plain bf16 rows
    max_ctas_per_sm: int = 0  # CTAs that shall run on an SM at once; 0: as many as fit
    fp8_source: str = ""  # `FP8Weight.kernel_source`; "": not float8

    def kernel_name(self, epilogue: str) -> str:
        source = self.fp8_source or ("PackedUnits" if self.header_stride else "PlainRows")
        return f"linear<{source}, {self.blocks}, {self.tiles}, {self.warps}, {epilogue}>"

    @property
    def x_tiles(self) -> int:
        """The number of tiles of x in a pipeline stage. A tile has SLOT_K columns."""
        return 2 if self.fp8_source else 1

    @property
    def stage_weight_bytes(self) -> int:
        """Bytes of weights in one stage of the pipeline."""
        return (UNIT_BYTES if self.header_stride else 2048) * self.blocks

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory: the layout in linear.cu with padding for alignment.

        A small layout is enlarged so that no more than `max_ctas_per_sm` CTAs fit on an SM. Otherwise several CTAs of
        the next kernel could start on one SM while other SMs are idle.
        """
        minimum = MAX_SHARED_BYTES // (self.max_ctas_per_sm + 1) + 16 if self.max_ctas_per_sm else 0
        return max(minimum, self._layout_bytes)

    @property
    def _layout_bytes(self) -> int:
        slot = 1024 * (self.x_tiles * self.tiles + -(-self.stage_weight_bytes // 1024))
        partial = 4 * 8 * self.tiles * (16 * self.blocks + 4)
        headers = 2 * (self.blocks * self.header_stride + 8) if self.header_stride else 0
        return 1024 + headers + self.warps * (self.stages * (slot + 8) + self.buffers * partial)


class BF16Weight:
    """A bf16 weight [n, k] and its TMA tensor maps.

    A gated weight has groups of 32 rows: 16 gate rows, then their 16 up rows (`work_limits.GATE_GROUP_ROWS`).
    """

    def __init__(self, data: Tensor) -> None:
        assert data.dtype is torch.bfloat16 and data.dim() == 2
        self.data = data
        self.n, self.k = data.shape
        self._maps: dict[tuple[int, bool], TensorMap] = {}

    def drop_tensor_maps(self) -> None:
        """Drop the tensor maps, because the data may be at a different address on the next use."""
        self._maps.clear()

    def get_tensor_map(self, row_blocks: int, *, paired: bool = False) -> TensorMap:
        """Return the tensor map for tiles of 16 * `row_blocks` rows.

        With `paired`, the map is for half a tile of a gated weight: 8 of each 16 gate rows, and the 8 matching up rows.
        """
        if (row_blocks, paired) not in self._maps:
            if paired:
                result = make_tensor_map(self.data.unflatten(0, (-1, 2, 16)), (row_blocks // 2, 2, 8, SLOT_K))
            else:
                result = make_tensor_map(self.data, (16 * row_blocks, SLOT_K))
            self._maps[row_blocks, paired] = result
        return self._maps[row_blocks, paired]


def supports(m: int, n: int, k: int) -> bool:
    """Return whether `linear` supports this shape. For a gated weight, n must also be a multiple of 32."""
    return 1 <= m <= MAX_ROWS and n > 0 and n % 16 == 0 and k > 0 and k % SLOT_K == 0


def supports_fp8(m: int, n: int, k: int) -> bool:
    """Return whether `linear` supports this shape of a float8 weight."""
    return 1 <= m <= MAX_ROWS and n > 0 and n % 16 == 0 and k > 0 and k % 16 == 0


def linear(
    x: Tensor,
    w: BF16Weight | UW12Weight | FP8Weight,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = True,
    plan: SkinnyPlan | None = None,
) -> Tensor:
    """Write x w^T into `out`, which is bf16 or float32, and return it.

    `bias` is float32 [n], in the order of w's rows. `residual` is added to the product and may be `out` itself. With
    `gated`, the result is silu(gate) * up, [m, n / 2]. `plan` overrides the chosen plan, for benchmarks.
    """
    m, k = x.shape
    fp8_source = w.kernel_source if isinstance(w, FP8Weight) else ""
    assert (supports_fp8 if fp8_source else supports)(m, w.n, k) and k == w.k and x.dtype is torch.bfloat16
    assert out.shape == (m, w.n // 2 if gated else w.n) and out.is_contiguous()
    assert bias is None or (bias.dtype is torch.float32 and bias.shape == (w.n,) and bias.is_contiguous())
    epilogue = choose_epilogue(out, residual, gated)
    stride = w.header_stride if isinstance(w, UW12Weight) else 0
    plan = plan or choose_plan(m, w.n, k, gated=gated, header_stride=stride, fp8_source=fp8_source)
    assert plan.header_stride == stride and plan.fp8_source == fp8_source and plan.stages > 0
    _get_kernel(plan.kernel_name(epilogue))(
        (plan.grid, 1, 1),
        32 * plan.warps,
        (
            _make_weight_argument(w, plan.blocks),
            make_tensor_map(x, (m, SLOT_K)),
            *(out, residual, bias, w.n, k, m),
            *(plan.stages, plan.buffers, int(pdl)),
        ),
        pdl=pdl,
        shared_bytes=plan.shared_bytes,
    )
    return out


def _make_weight_argument(w: BF16Weight | UW12Weight | FP8Weight, blocks: int) -> ctypes.Structure:
    match w:
        case UW12Weight():
            return PackedUnits.from_weight(w)
        case FP8Weight():
            return w.get_kernel_rows(blocks)
        case BF16Weight():
            return w.get_tensor_map(blocks)


@cache
def choose_plan(
    m: int, n: int, k: int, *, gated: bool = False, header_stride: int = 0, fp8_source: str = ""
) -> SkinnyPlan:
    """Return the plan for a shape.

    For packed and float8 weights, plans that were measured for some shapes are used first. Otherwise the plan has the
    tile size with which the busiest CTA has the fewest rows, and of several equal sizes the largest. For the shapes of
    Llama 8B with 1, 8, 16 and 32 rows, this choice was the fastest one measured or within 1 % of it. The plan has only
    as many CTAs as the tiles need, and as many pipeline stages as fit into shared memory.
    """
    tiles = next(size for size in (1, 2, 4) if 8 * size >= m)
    measured = _select_measured_plans(gated, header_stride, fp8_source)
    if (tiles, n, k) in measured:
        blocks, ctas_per_sm, stages = measured[tiles, n, k]
        plan = make_plan(
            n,
            k,
            blocks,
            tiles,
            ctas=ctas_per_sm * count_sms(),
            shared_bytes=MAX_SHARED_BYTES // ctas_per_sm,
            header_stride=header_stride,
            fp8_source=fp8_source,
        )
        if plan.stages:
            # With one CTA per SM, the shared memory that it leaves is for the next kernel.
            return replace(plan, stages=min(plan.stages, stages), max_ctas_per_sm=ctas_per_sm if ctas_per_sm > 1 else 0)
    return _choose_plan_by_rows(n, k, tiles, gated, header_stride, fp8_source)


def _select_measured_plans(
    gated: bool, header_stride: int, fp8_source: str
) -> dict[tuple[int, int, int], tuple[int, int, int]]:
    if fp8_source:
        return MEASURED_FP8_GATED if gated else MEASURED_FP8
    return MEASURED_PACKED if header_stride and not gated else {}


def _choose_plan_by_rows(n: int, k: int, tiles: int, gated: bool, header_stride: int, fp8_source: str) -> SkinnyPlan:
    make = partial(make_plan, n, k, tiles=tiles, header_stride=header_stride, fp8_source=fp8_source)

    def sort_key(plan: SkinnyPlan) -> tuple[int, int]:
        blocks = plan.blocks * -(-n // (16 * plan.blocks * count_sms()))
        return (0 if header_stride and tiles == 4 and blocks > 4 else blocks), -plan.blocks

    plans = [make(blocks) for blocks in ((2, 4) if gated else (2, 3, 4))]
    min_stages = min(2, -(-k // (plans[0].x_tiles * SLOT_K * WARPS)))
    fitting = [plan for plan in plans if plan.stages >= min_stages]  # headers with many escapes leave little memory
    return min(fitting or [make(2 if gated else 1)], key=sort_key)


def make_plan(
    n: int,
    k: int,
    blocks: int,
    tiles: int,
    *,
    header_stride: int = 0,
    warps: int = WARPS,
    ctas: int = 0,
    shared_bytes: int = MAX_SHARED_BYTES,
    fp8_source: str = "",
) -> SkinnyPlan:
    """Return the plan for a tile size, with the work spread evenly over at most `ctas` CTAs, by default one on each SM.

    Partial sums get separate buffers in shared memory if enough pipeline stages still fit; otherwise they overwrite
    stages.
    """
    count = -(-n // (16 * blocks))
    waves = -(-count // (ctas or count_sms()))
    grid = -(-count // waves)
    base = SkinnyPlan(blocks, tiles, warps, 0, 0, grid, header_stride, fp8_source=fp8_source)
    base = replace(base, stages=waves * -(-k // (base.x_tiles * SLOT_K * warps)))  # steps of a warp
    for buffers in (2, 1) if waves > 1 else ():
        plan = _limit_stages(replace(base, buffers=buffers), shared_bytes)
        if plan.stages * plan.warps * plan.stage_weight_bytes >= MIN_IN_FLIGHT_BYTES:
            return plan
    return _limit_stages(base, shared_bytes)


def _limit_stages(plan: SkinnyPlan, shared_bytes: int) -> SkinnyPlan:
    """Return the plan with no more stages than fit into shared memory."""
    base = replace(plan, stages=0)._layout_bytes
    stage = replace(plan, stages=1)._layout_bytes - base
    return replace(plan, stages=max(0, min(plan.stages, (shared_bytes - base) // stage)))


def choose_epilogue(out: Tensor, residual: Tensor | None, gated: bool) -> str:
    if gated:
        assert residual is None and out.dtype is torch.bfloat16 and out.shape[1] % 16 == 0
        return "GATED"
    if residual is not None:
        assert residual.shape == out.shape and residual.is_contiguous()
        assert residual.dtype is out.dtype is torch.bfloat16
        return "ADD"
    assert out.dtype in (torch.bfloat16, torch.float32)
    return "STORE" if out.dtype is torch.bfloat16 else "STORE_F32"


def _list_kernel_names() -> Sequence[str]:
    shapes = list(product((0, 16), ("",), (1, 2, 3, 4), (1, 2, 4)))
    shapes += product((0,), ("Fp8Rows", "Fp8Blocks"), (2, 3, 4), (1, 2, 4))
    return [
        SkinnyPlan(blocks, tiles, WARPS, 1, 0, 1, stride, fp8_source=source).kernel_name(epilogue)
        for stride, source, blocks, tiles in shapes
        for epilogue in EPILOGUES
        if epilogue != "GATED" or blocks % 2 == 0
    ]


VARIANTS = tuple(_list_kernel_names())  # all kernels that `choose_plan` may select


@cache
def _get_kernel(kernel_name: str) -> CudaKernel:
    """Return the kernel with this name.

    It is compiled on first use, because a model needs only a few kernels.
    """
    return CudaModule(FILE, [kernel_name]).kernel(kernel_name, MAX_SHARED_BYTES)
