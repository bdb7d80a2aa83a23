"""linear: computes y = x w^T for 33 to 256 rows of x, and from 17 rows on for tall packed weights.

In this range reading the weights takes about as long as the arithmetic, or longer. `wide.cu` has the kernel.

A row's result does not depend, bit for bit, on its index. It depends on the number of rows only through the range in
which that number is: up to 32, 64, 96, 128, 160, 192 or 256. Plain and packed weights give the same result if k is
split into the same number of parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from emberline.kernels.cuda.driver import H200_SMS, CudaKernel, CudaModule, KernelArgument, count_sms, make_tensor_map
from emberline.kernels.cuda.linear import EPILOGUES, MAX_SHARED_BYTES, SLOT_K, BF16Weight, choose_epilogue
from emberline.kernels.cuda.uw12 import UNIT_BYTES, UW12Weight

FILE = "wide.cu"
MIN_ROWS, MAX_ROWS = 33, 256
MIN_LARGE_ROWS = 225  # rows of x from which tiles of 256 columns may beat cuBLAS with plain weights
GROUPS = (1, 2, 3, 4)  # warpgroups of a CTA, each with 64 rows of w
SMALL_COLUMNS = (64, 96, 128)  # columns of a tile: rows of x
# Columns of large tiles, and for how many warpgroups registers suffice. CTAs of a cluster may share x.
LARGE_GROUPS = {160: (2, 3), 192: (2, 3), 256: (2,)}
COLUMNS = (*SMALL_COLUMNS, *LARGE_GROUPS)
SHARES = (1, 2)  # CTAs that may share x, with large tiles
# Tiles (groups, columns) for which a whole warpgroup only fetches and gives its registers to the others
REGISTER_TRADES = frozenset({(2, 256), (4, 96), (4, 128)})
# Tiles for 17 to 32 rows of x and packed weights: tall tiles read x less often. Used if w has enough rows for so many.
FEW_COLUMNS, MIN_FEW_ROWS, TALL_GROUPS, MIN_TALL_TILES = 32, 17, 4, 112
SPLITS = (1, 2, 3, 4)
SHARED_BYTES_BY_CTAS = {1: MAX_SHARED_BYTES, 2: 113 << 10}  # shared memory of a CTA, by the number of CTAs on an SM
MAX_SIZE_OF_TWO_CTAS = 128  # groups * columns of packed weights up to which registers suffice for two CTAs on an SM
MAX_CLUSTERS = {
    1: H200_SMS,
    2: 66,
    3: 40,
    4: 30,
    6: 18,
    8: 15,
}  # clusters of a size that an H200 runs at once; 3, 6: at least
# Limits of a plan: bytes per microsecond from memory, from the L2, and into one SM. Then the cost of splitting k within
# a cluster: its synchronisation, and the bytes per microsecond at which CTAs exchange sums.
MEMORY_BYTES_PER_US, L2_BYTES_PER_US, SM_BYTES_PER_US = 4.39e6, 7.8e6, 0.1e6
CLUSTER_SYNC_US, EXCHANGE_BYTES_PER_US = 0.7, 0.06e6
# Packed weights: a step of a CTA, plus each warpgroup, plus each column of a warpgroup.
STEP_US, GROUP_STEP_US, COLUMN_STEP_US = 0.15, 0.12, 0.0004
# Large tiles: a step of a warpgroup with 256 columns, as in gemm.cu; the fixed time of a tile; the L2's rate meanwhile.
# And cuBLAS for as many rows: FLOP per microsecond and the fixed time of a call.
LARGE_GROUP_STEP_US, LARGE_TILE_OVERHEAD_US, LARGE_L2_BYTES_PER_US = 0.36, 1.5, 6.0e6
CUBLAS_FLOP_PER_US, CUBLAS_CALL_US = 7.0e8, 6.0
# Unclustered CTAs exchange sums in global memory: floats for the sums of all tiles, a counter word for each fragment,
# and how often a CTA polls a counter (about 0.4 us each) before it leaves its sums to another CTA.
EXCHANGED_SUMS_PER_SM, EXCHANGED_FRAGMENTS_PER_SM, EXCHANGE_POLLS = 256 * 128, 32, 256


class TileConfig(NamedTuple):
    """The tile parameters from which `make_plan` makes a plan."""

    groups: int  # warpgroups of a CTA
    split: int = 1  # parts of k
    ctas_per_sm: int = 1  # CTAs on an SM
    share: int = 1  # CTAs that share x; large tiles only
    unclustered: bool = False  # whether the parts of k are separate CTAs, not a cluster; packed weights only


# (columns, n, k) for which a sweep on an H200 found a better plan than the estimate. None: cuBLAS is faster. For large
# tiles of plain weights that are not listed, `beats_cublas` estimates.
MEASURED: dict[tuple[int, int, int], TileConfig | None] = {
    (128, 6144, 4096): TileConfig(1),
    (64, 4096, 4096): TileConfig(1, 2),
    (128, 4096, 4096): TileConfig(1, 2),
    (64, 28672, 4096): TileConfig(2),
    (128, 28672, 4096): TileConfig(2),
    (64, 4096, 14336): TileConfig(1, 2),
    (128, 4096, 14336): TileConfig(1, 2),
    (64, 128256, 4096): TileConfig(2),
    (128, 128256, 4096): TileConfig(2),
    (96, 6144, 4096): TileConfig(1),
    (96, 4096, 4096): TileConfig(1, 2),
    (96, 28672, 4096): TileConfig(2),
    (96, 4096, 14336): TileConfig(1, 2),
    (96, 128256, 4096): TileConfig(2),
    (160, 6144, 4096): None,
    (192, 6144, 4096): TileConfig(2, 2),
    (160, 4096, 4096): TileConfig(2, 3),
    (192, 4096, 4096): TileConfig(2, 3),
    (160, 28672, 4096): None,
    (192, 28672, 4096): TileConfig(2),
    (160, 4096, 14336): TileConfig(2, 3),
    (192, 4096, 14336): TileConfig(2, 3),
    (160, 128256, 4096): None,
    (192, 128256, 4096): TileConfig(2),
    (256, 6144, 4096): None,
    (256, 4096, 4096): None,
    (256, 28672, 4096): TileConfig(2, share=2),
    (256, 4096, 14336): None,
    (256, 128256, 4096): None,
    (64, 5120, 2048): TileConfig(1),  # of Qwen3-30B-A3B, as the next
    (64, 2048, 4096): TileConfig(1, 3),
}
MEASURED_PACKED: dict[tuple[int, int, int], TileConfig] = {
    (64, 6144, 4096): TileConfig(2, 4, ctas_per_sm=2),
    (128, 6144, 4096): TileConfig(1, 2, ctas_per_sm=2),
    (64, 4096, 4096): TileConfig(1, 4, ctas_per_sm=2, unclustered=True),
    (128, 4096, 4096): TileConfig(1, 4, ctas_per_sm=2, unclustered=True),
    (64, 28672, 4096): TileConfig(2, ctas_per_sm=2),
    (128, 28672, 4096): TileConfig(4),
    (64, 4096, 14336): TileConfig(3, 6, unclustered=True),
    (128, 4096, 14336): TileConfig(3, 6, unclustered=True),
    (64, 128256, 4096): TileConfig(4),
    (128, 128256, 4096): TileConfig(4),
    (96, 6144, 4096): TileConfig(1, 2, ctas_per_sm=2),
    (96, 4096, 4096): TileConfig(1, 4, ctas_per_sm=2, unclustered=True),
    (96, 28672, 4096): TileConfig(4),
    (96, 4096, 14336): TileConfig(3, 6, unclustered=True),
    (96, 128256, 4096): TileConfig(4),
    (96, 6144, 8192): TileConfig(3, 4, unclustered=True),  # of an EAGLE-3 head, as the next
    (96, 4096, 12288): TileConfig(1, 4, ctas_per_sm=2, unclustered=True),
    (160, 6144, 4096): TileConfig(3, 4, unclustered=True),
    (192, 6144, 4096): TileConfig(2, 2),
    (160, 4096, 4096): TileConfig(2, 4, unclustered=True),
    (192, 4096, 4096): TileConfig(2, 4, unclustered=True),
    (160, 28672, 4096): TileConfig(2, share=2),
    (192, 28672, 4096): TileConfig(2),
    (160, 4096, 14336): TileConfig(3, 6, unclustered=True),
    (192, 4096, 14336): TileConfig(2, 4, unclustered=True),
    (160, 128256, 4096): TileConfig(3, share=2),
    (192, 128256, 4096): TileConfig(2, share=2),
    (256, 6144, 4096): TileConfig(2, 2),
    (256, 4096, 4096): TileConfig(2, 4, unclustered=True),
    (256, 28672, 4096): TileConfig(2, share=2),
    (256, 4096, 14336): TileConfig(2, 4, unclustered=True),
    (256, 128256, 4096): TileConfig(2),
}


@dataclass(frozen=True, slots=True)
class WidePlan:
    """The tile sizes and the launch parameters with which a product of one shape is computed."""

    groups: int  # warpgroups of a CTA, each with 64 rows of w
    columns: int  # rows of x in a tile
    stages: int  # stages of the shared-memory pipeline
    split: int  # CTAs that share a tile's k
    grid: int  # CTAs
    packed: bool = False
    share: int = 1  # CTAs that share a tile of x
    unclustered: bool = False  # whether the CTAs that share k are not a cluster

    @property
    def cluster(self) -> int:
        return self.share if self.unclustered else self.split * self.share

    @property
    def threads(self) -> int:
        return 128 * self.groups + (128 if (self.groups, self.columns) in REGISTER_TRADES else 32)

    @property
    def kernel_name(self) -> str:
        tile = f"{self.groups}, {self.columns}"
        return f"wide_packed<{tile}>" if self.packed else f"wide<{tile}>"

    @property
    def stage_bytes(self) -> int:
        return 128 * self.columns + self.groups * (4 * UNIT_BYTES if self.packed else 128 * 64)

    @property
    def fetched_stage_bytes(self) -> int:
        """Bytes of a pipeline stage that each CTA fetches itself; it gets other rows of x from its cluster."""
        return self.stage_bytes - 128 * self.columns * (self.share - 1) // self.share

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory: the pipeline, its barriers, and padding for alignment."""
        return 1024 + self.stages * (self.stage_bytes + 16)

    @property
    def can_exchange_sums(self) -> bool:
        """Whether CTAs can exchange partial sums through device memory, for plans that do not use clusters."""
        return (
            1 < self.split < 256
            and self.share == 1
            and self.grid * 64 * self.groups * self.columns <= max(count_sms(), H200_SMS) * EXCHANGED_SUMS_PER_SM
        )

    @property
    def min_stages(self) -> int:
        """The smallest number of pipeline stages whose memory can hold the exchanged partial sums.

        Partial sums overwrite the data of the pipeline. They must not overwrite its barriers, because a warp may
        arrive at a barrier after the cluster has synchronised.
        """
        fragments = -(-4 * self.groups // self.split) * self.split
        return -(-64 * self.columns * fragments // self.stage_bytes) if self.split > 1 and not self.unclustered else 1


PLAIN_TILES = (
    *product(GROUPS, SMALL_COLUMNS),
    *((groups, columns) for columns, counts in LARGE_GROUPS.items() for groups in counts),
)
PACKED_TILES = (*PLAIN_TILES, (TALL_GROUPS, FEW_COLUMNS))
VARIANTS = tuple(
    WidePlan(*tile, 1, 1, 1, tiles is PACKED_TILES).kernel_name
    for tiles in (PLAIN_TILES, PACKED_TILES)
    for tile in tiles
)


def supports(m: int, n: int, k: int, *, packed: bool = False) -> bool:
    """Return whether `linear` supports this shape and is the fastest kernel for it.

    For few rows, `cuda/linear.py` may be faster. For more than 128 rows, cuBLAS may be faster with plain weights;
    packed weights would have to be unpacked for cuBLAS first, which takes as long as the product itself.
    """
    if m < MIN_ROWS:
        return supports_shape(m, n, k) and packed and m >= MIN_FEW_ROWS and n >= 64 * TALL_GROUPS * MIN_TALL_TILES
    return supports_shape(m, n, k) and (m <= SMALL_COLUMNS[-1] or packed or beats_cublas(m, n, k))


def supports_shape(m: int, n: int, k: int) -> bool:
    return 1 <= m <= MAX_ROWS and n > 0 and n % 64 == 0 and k > 0 and k % SLOT_K == 0


@cache
def beats_cublas(m: int, n: int, k: int) -> bool:
    """Return whether large tiles are faster than cuBLAS for plain weights of this shape."""
    columns = choose_tile_columns(m)
    if columns == COLUMNS[-1] and m < MIN_LARGE_ROWS:
        return False
    if (columns, n, k) in MEASURED:
        return bool(MEASURED[columns, n, k])
    return estimate_us(choose_plan(columns, n, k), n, k) < 2 * columns * n * k / CUBLAS_FLOP_PER_US + CUBLAS_CALL_US


def linear(
    x: Tensor,
    w: BF16Weight | UW12Weight,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = True,
    plan: WidePlan | None = None,
    exchange_polls: int = EXCHANGE_POLLS,
) -> Tensor:
    """Write x w^T into `out` and return it; the arguments are those of `cuda.linear.linear`.

    `plan` and `exchange_polls` override the defaults for benchmarks and tests. Launches on one stream share the memory
    in which CTAs exchange partial sums, so they must not overlap.
    """
    m, k = x.shape
    assert supports_shape(m, w.n, k) and k == w.k and x.dtype is torch.bfloat16
    assert out.shape == (m, w.n // 2 if gated else w.n) and out.is_contiguous() and out.data_ptr() % 16 == 0
    assert residual is None or residual.data_ptr() % 16 == 0
    assert bias is None or (bias.dtype is torch.float32 and bias.shape == (w.n,) and bias.is_contiguous())
    epilogue = EPILOGUES.index(choose_epilogue(out, residual, gated))
    packed = isinstance(w, UW12Weight)
    plan = plan or choose_plan(choose_tile_columns(m, packed=packed), w.n, k, packed=packed, gated=gated)
    assert plan.columns >= m and plan.split <= k // SLOT_K and plan.packed is packed
    assert plan.stages > 1 or k <= SLOT_K * plan.split, "a slot is released when the next slot's products are issued"
    assert plan.stages >= plan.min_stages
    teams = -(-w.n // (64 * plan.groups * plan.share))
    assert plan.split == 1 or plan.grid == plan.split * plan.share * teams, "with a split, a CTA has one tile"
    assert plan.grid % plan.cluster == 0 and (plan.share == 1 or is_large(plan.columns))
    # A gated epilogue needs a cluster, within which CTAs exchange gates and ups.
    assert not plan.unclustered or (packed and plan.can_exchange_sums and not gated)
    _get_kernel(plan.kernel_name)(
        (plan.grid, 1, 1),
        plan.threads,
        (
            *_make_weight_arguments(w, plan, gated),
            make_tensor_map(x, (-(-m // (8 * plan.share)) * 8, SLOT_K)),
            *(out, residual, bias, w.n, k, m),
            *(plan.stages, plan.split, plan.share, epilogue, int(pdl)),
            *_make_exchange_arguments(plan, x.device, exchange_polls),
        ),
        pdl=pdl,
        cluster=plan.cluster,
        shared_bytes=plan.shared_bytes,
    )
    return out


def choose_tile_columns(m: int, *, packed: bool = False) -> int:
    return next(columns for columns in ((FEW_COLUMNS, *COLUMNS) if packed else COLUMNS) if columns >= m)


def is_large(columns: int) -> bool:
    return columns > SMALL_COLUMNS[-1]


@cache
def choose_plan(columns: int, n: int, k: int, *, packed: bool = False, gated: bool = False) -> WidePlan:
    """Return the measured plan for this shape, or else the plan with the least estimated time.

    The plan depends on nothing but the arguments and the GPU: the split of k determines the last bits of the result.
    """
    row = MEASURED_PACKED.get((columns, n, k)) if packed else MEASURED.get((columns, n, k))
    if row is not None and not (row.unclustered and gated):
        return make_plan(columns, n, k, row, packed=packed)
    group_counts = [groups for groups, wide in (PACKED_TILES if packed else PLAIN_TILES) if wide == columns]
    tiles = product(group_counts, SPLITS, SHARES if is_large(columns) else (1,))
    rows = (TileConfig(groups, split, share=share) for groups, split, share in tiles)
    plans = [make_plan(columns, n, k, row, packed=packed) for row in rows]
    fitting = [plan for plan in plans if plan.split == 1 or plan.grid <= plan.cluster * count_clusters(plan.cluster)]
    return min((plan for plan in fitting if plan.split <= k // SLOT_K), key=lambda plan: estimate_us(plan, n, k))


def count_clusters(size: int) -> int:
    """Return how many clusters of this size the GPU runs at once, estimated from those of an H200."""
    return MAX_CLUSTERS[size] * count_sms() // H200_SMS


def make_plan(
    columns: int, n: int, k: int, config: TileConfig, *, packed: bool = False, ctas: int | None = None
) -> WidePlan:
    """Return the plan for a configuration, with as many pipeline stages as fit into shared memory.

    If k is not split, at most `ctas` CTAs share the tiles evenly. If k is split, each CTA computes one part of one
    tile.
    """
    groups, split, ctas_per_sm, share, unclustered = config
    ctas, shared = ctas_per_sm * count_sms() if ctas is None else ctas, SHARED_BYTES_BY_CTAS[ctas_per_sm]
    teams = -(-n // (64 * groups * share))  # groups of tiles that share x
    waves = -(-teams // (ctas // share)) if split == 1 else 1
    base = WidePlan(groups, columns, 1, split, split * share * -(-teams // waves), packed, share, unclustered)
    max_stages = waves * -(-k // (SLOT_K * split))  # steps of a CTA: more stages are never used
    return replace(base, stages=max(base.min_stages, min(max_stages, (shared - 1024) // (base.stage_bytes + 16))))


def estimate_us(plan: WidePlan, n: int, k: int) -> float:
    """Return the estimated time in microseconds.

    Memory, the L2 cache, the SMs and arithmetic each limit the speed. The estimate is the longest of their times plus a
    tenth of the sum of all, because they interfere.
    """
    tiles, units = -(-n // (64 * plan.groups)), k // SLOT_K
    waves = -(-tiles * plan.split // plan.grid)
    steps = waves * -(-units // plan.split)  # of a CTA
    limits = [
        (1.5 if plan.packed else 2) * n * k / MEMORY_BYTES_PER_US,
        tiles
        * units
        * plan.fetched_stage_bytes
        / (LARGE_L2_BYTES_PER_US if is_large(plan.columns) else L2_BYTES_PER_US),
        steps * plan.stage_bytes / SM_BYTES_PER_US,
    ]
    exchanged = 4 * 64 * plan.groups * plan.columns * (plan.split - 1) / plan.split
    split_cost = CLUSTER_SYNC_US + exchanged / EXCHANGE_BYTES_PER_US if plan.split > 1 else 0.0
    if is_large(plan.columns):
        arithmetic = steps * plan.groups * LARGE_GROUP_STEP_US * plan.columns / COLUMNS[-1]
        return max(*limits, arithmetic) + waves * LARGE_TILE_OVERHEAD_US + split_cost
    if plan.packed:
        limits.append(steps * (STEP_US + plan.groups * (GROUP_STEP_US + plan.columns * COLUMN_STEP_US)))
    return max(limits) + sum(limits) / 10 + split_cost


def _make_weight_arguments(w: BF16Weight | UW12Weight, plan: WidePlan, gated: bool) -> tuple[KernelArgument, ...]:
    """Return the weight as arguments of the plan's kernel."""
    if isinstance(w, UW12Weight):
        return w.planes, w.headers, w.header_stride
    return (w.get_tensor_map(4 * plan.groups, paired=gated),)


def _make_exchange_arguments(plan: WidePlan, device: torch.device, exchange_polls: int) -> tuple[KernelArgument, ...]:
    if not plan.packed:
        return ()
    return *(get_exchange_memory(device) if plan.unclustered else (None, None)), exchange_polls


def get_exchange_memory(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the memory for `linear` on the current stream; call this once before a launch on it is captured."""
    return _get_partial_sum_memory(device, torch.cuda.current_stream().cuda_stream)


@cache
def _get_partial_sum_memory(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Return device memory in which CTAs without a cluster exchange partial sums, and zeroed counters."""
    assert not torch.cuda.is_current_stream_capturing(), "a captured graph would zero the counters in every replay"
    sms = max(count_sms(), H200_SMS)  # smaller GPUs use the measured plans too
    return torch.empty(sms * EXCHANGED_SUMS_PER_SM, device=device), torch.zeros(
        sms * EXCHANGED_FRAGMENTS_PER_SM, dtype=torch.int32, device=device
    )


@cache
def _get_kernel(kernel_name: str) -> CudaKernel:
    """Return the kernel with this name.

    It is compiled on first use, because a model needs only a few kernels.
    """
    return CudaModule(FILE, [kernel_name]).kernel(kernel_name, MAX_SHARED_BYTES)
