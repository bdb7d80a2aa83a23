"""linear: y = x w^T for at most 32 rows of x, where reading the weights is all the time there is. `linear.cu` says how.

A row's result does not depend on how many rows there are, nor on which of them it is: to the bit, for every m that
`supports` allows. Nor does it depend on whether the weights are packed. Larger m is cuBLAS's, which sums in another
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import Kernel, Module, TensorMap, tensor_map
from emberline.kernels.cuda.uw12 import UNIT_BYTES, Packed, Units

FILE = "linear.cu"
MOST_ROWS = 32  # beyond, the tiles of x take more of the L2's bandwidth than the weights do
UNIT = 64  # k in a slot: rows of 128 bytes, the widest swizzle
SMS = 132
SHARED_LIMIT = 227 << 10
IN_FLIGHT = 96 << 10  # bytes of weights that a multiprocessor must have asked for to keep memory busy
WARPS = 8  # they split k, so this is part of what a result is: the same for all shapes
EPILOGUES = ("STORE", "STORE_F32", "ADD", "GATED")
# Packed weights: tiles, n, k: blocks, CTAs on a multiprocessor, stages, where a sweep on an H200 knew better.
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


@dataclass(frozen=True, slots=True)
class Plan:
    """How one shape is computed. `blocks`: of 16 outputs, a CTA's tile. `tiles`: of 8 rows of x."""

    blocks: int
    tiles: int
    warps: int
    stages: int
    buffers: int
    grid: int
    stride: int = 0  # of the headers of packed weights; 0: rows of bf16
    at_once: int = 0  # CTAs of a multiprocessor, at most; 0: as many as there is room for

    def variant(self, epilogue: str) -> str:
        source = "Units" if self.stride else "Rows"
        return f"linear<{source}, {self.blocks}, {self.tiles}, {self.warps}, {epilogue}>"

    @property
    def weights(self) -> int:
        """Bytes of them in a slot."""
        return (UNIT_BYTES if self.stride else 2048) * self.blocks

    @property
    def shared(self) -> int:
        """The bytes of the layout in linear.cu, and what it takes to align it. Where it is small, so much that no more
        CTAs come together than should: the next kernel's would crowd on some multiprocessors while others are idle."""
        least = SHARED_LIMIT // (self.at_once + 1) + 16 if self.at_once else 0
        return max(least, self._layout)

    @property
    def _layout(self) -> int:
        slot = 1024 * (self.tiles + -(-self.weights // 1024))
        partial = 4 * 8 * self.tiles * (16 * self.blocks + 4)
        headers = 2 * (self.blocks * self.stride + 8) if self.stride else 0
        return 1024 + headers + self.warps * (self.stages * (slot + 8) + self.buffers * partial)


class Weight:
    """w [n, k] in bf16, and its maps for the copy engine. Gated: groups of 32 rows, 16 of gates and then the 16 of up
    that belong to them: `tiles.GATED_ROWS`."""

    def __init__(self, data: Tensor) -> None:
        assert data.dtype is torch.bfloat16 and data.dim() == 2
        self.data = data
        self.n, self.k = data.shape
        self._maps: dict[tuple[int, bool], TensorMap] = {}

    def forget(self) -> None:
        """The data may lie elsewhere when it is met again."""
        self._maps.clear()

    def map(self, blocks: int, *, paired: bool = False) -> TensorMap:
        """For tiles of so many times 16 rows. Paired: for half of one, 8 of each 16 gates and their ups."""
        if (blocks, paired) not in self._maps:
            if paired:
                made = tensor_map(self.data.unflatten(0, (-1, 2, 16)), (blocks // 2, 2, 8, UNIT))
            else:
                made = tensor_map(self.data, (16 * blocks, UNIT))
            self._maps[blocks, paired] = made
        return self._maps[blocks, paired]


def supports(m: int, n: int, k: int) -> bool:
    """Gated needs n to be a multiple of 32 besides."""
    return 1 <= m <= MOST_ROWS and n > 0 and n % 16 == 0 and k > 0 and k % UNIT == 0


def linear(
    x: Tensor,
    w: Weight | Packed,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = True,
    plan: Plan | None = None,
) -> Tensor:
    """Into `out`: bf16, or float32 where it is so. `bias` is float32 [n], in the order of w's rows. `residual` is added
    and may be `out` itself. Gated: silu(gate) * up, [m, n / 2]. `plan` overrides the choice, for measurements."""
    m, k = x.shape
    assert supports(m, w.n, k) and k == w.k and x.dtype is torch.bfloat16
    assert out.shape == (m, w.n // 2 if gated else w.n) and out.is_contiguous()
    assert bias is None or (bias.dtype is torch.float32 and bias.shape == (w.n,) and bias.is_contiguous())
    epilogue = epilogue_of(out, residual, gated)
    stride = w.stride if isinstance(w, Packed) else 0
    plan = plan or choose(m, w.n, k, gated=gated, stride=stride)
    assert plan.stride == stride and plan.stages > 0
    _kernel(plan.variant(epilogue))(
        (plan.grid, 1, 1),
        32 * plan.warps,
        (
            Units.of(w) if isinstance(w, Packed) else w.map(plan.blocks),
            tensor_map(x, (m, UNIT)),
            *(out, residual, bias, w.n, k, m),
            *(plan.stages, plan.buffers, int(pdl)),
        ),
        pdl=pdl,
        shared=plan.shared,
    )
    return out


@cache
def choose(m: int, n: int, k: int, *, gated: bool = False, stride: int = 0) -> Plan:
    """The tile that leaves the busiest CTA the fewest rows, the larger among equals: measured best or within 1 % of it
    for the shapes of an 8B Llama at 1, 8, 16 and 32 rows. Then only as many CTAs as that takes, and as deep a ring as
    memory holds. Packed weights come so fast that it pays to read x less often, or to leave the next kernel room."""
    tiles = next(size for size in (1, 2, 4) if 8 * size >= m)
    if stride and not gated and (tiles, n, k) in MEASURED_PACKED:
        blocks, beside, stages = MEASURED_PACKED[tiles, n, k]
        plan = planned(n, k, blocks, tiles, ctas=beside * SMS, shared=SHARED_LIMIT // beside, stride=stride)
        if plan.stages:
            # Where one is alone, what it leaves is for the next kernel.
            return replace(plan, stages=min(plan.stages, stages), at_once=beside if beside > 1 else 0)
    return _chosen(n, k, tiles, gated, stride)


def _chosen(n: int, k: int, tiles: int, gated: bool, stride: int) -> Plan:
    def rows(plan: Plan) -> tuple[int, int]:
        most = plan.blocks * -(-n // (16 * plan.blocks * SMS))
        return (0 if stride and tiles == 4 and most > 4 else most), -plan.blocks

    plans = [planned(n, k, blocks, tiles, stride=stride) for blocks in ((2, 4) if gated else (2, 3, 4))]
    least = min(2, -(-k // (UNIT * WARPS)))
    fitting = [plan for plan in plans if plan.stages >= least]  # lists of many escapes leave little memory
    return min(fitting or [planned(n, k, 2 if gated else 1, tiles, stride=stride)], key=rows)


def planned(
    n: int,
    k: int,
    blocks: int,
    tiles: int,
    *,
    stride: int = 0,
    warps: int = WARPS,
    ctas: int = SMS,
    shared: int = SHARED_LIMIT,
) -> Plan:
    """The plan for a tile: CTAs get about as many each; separate sets of partial sums where the ring stays deep enough
    beside them."""
    count = -(-n // (16 * blocks))
    waves = -(-count // ctas)
    grid, most = -(-count // waves), waves * -(-k // (UNIT * warps))  # steps of a warp: more stages are never used
    for buffers in (2, 1) if waves > 1 else ():
        plan = _filled(Plan(blocks, tiles, warps, most, buffers, grid, stride), shared)
        if plan.stages * plan.warps * plan.weights >= IN_FLIGHT:
            return plan
    return _filled(Plan(blocks, tiles, warps, most, 0, grid, stride), shared)


def _filled(plan: Plan, shared: int) -> Plan:
    """With no more stages than fit."""
    bare = replace(plan, stages=0)._layout
    a_stage = replace(plan, stages=1)._layout - bare
    return replace(plan, stages=max(0, min(plan.stages, (shared - bare) // a_stage)))


def epilogue_of(out: Tensor, residual: Tensor | None, gated: bool) -> str:
    if gated:
        assert residual is None and out.dtype is torch.bfloat16 and out.shape[1] % 16 == 0
        return "GATED"
    if residual is not None:
        assert residual.shape == out.shape and residual.is_contiguous()
        assert residual.dtype is out.dtype is torch.bfloat16
        return "ADD"
    assert out.dtype in (torch.bfloat16, torch.float32)
    return "STORE" if out.dtype is torch.bfloat16 else "STORE_F32"


def _variants() -> Sequence[str]:
    return [
        Plan(blocks, tiles, WARPS, 1, 0, 1, stride).variant(epilogue)
        for stride, blocks, tiles in product((0, 16), (1, 2, 3, 4), (1, 2, 4))
        for epilogue in EPILOGUES
        if epilogue != "GATED" or blocks % 2 == 0
    ]


VARIANTS = tuple(_variants())  # all that `choose` may choose


@cache
def _kernel(variant: str) -> Kernel:
    """Compiled one by one, when first used: a model needs few of them."""
    return Module(FILE, [variant]).kernel(variant, SHARED_LIMIT)
