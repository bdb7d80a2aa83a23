"""Measures kernel plans of `cuda.wide` for compressed (64 to 256 rows) and plain weights (96 and 160 to 256 rows).

It prints a JSON line for each plan, then the best plan of each shape as Python dictionaries to paste into
`wide.MEASURED_PACKED` and `wide.MEASURED`. Run it with `python -m emberline.bench.gpu.wide_sweep [--seconds S]`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.bench.gpu.linear import SHAPES
from emberline.bench.gpu.timing import bind_arguments, count_input_sets, time_graph_replay
from emberline.kernels.cuda import nvrtc, wide
from emberline.kernels.cuda.driver import CudaDriverError, count_sms
from emberline.kernels.cuda.linear import BF16Weight
from emberline.kernels.cuda.uw12 import UW12Weight, pack
from emberline.kernels.triton import activation
from emberline.kernels.work_limits import GATE_GROUP_ROWS

# Rows of x, and whether weights are packed.
SWEEP_CASES = (
    *((rows, True) for rows in (64, 96, 128, 160, 192, 256)),
    *((rows, False) for rows in (96, 160, 192, 256)),
)
SPLITS = range(1, 9)
MAX_CLUSTER_CTAS = 8
SWEEP_SECONDS = 70.0
MAX_PLANS = 50  # plans measured for one case, in the order of their estimates
ROWS_PER_DRAW = 8192  # rows of random weights drawn at once
DEGREES_OF_FREEDOM = 5  # of Student's t distribution, whose tails give as many escapes as trained weights


AnyWeight = BF16Weight | UW12Weight


def sweep(seconds: float = SWEEP_SECONDS, row_counts: Sequence[int] = ()) -> None:
    """Measure plans for each shape, each for an equal share of the time, and compare them with cuBLAS.

    `row_counts`: only these numbers of rows of x; none: all of SWEEP_CASES."""
    cases = [case for case in SWEEP_CASES if not row_counts or case[0] in row_counts]
    end = time.monotonic() + seconds
    compile_variants([rows for rows, _ in cases])
    best: dict[bool, dict[tuple[int, int, int], wide.TileConfig | None]] = {True: {}, False: {}}
    shapes = list(SHAPES.items())
    for i, (name, (k, n)) in enumerate(shapes):
        shape_deadline = time.monotonic() + (end - time.monotonic()) / (len(shapes) - i)
        plain, packed_weights = make_weights(n, k)
        for j, (m, packed) in enumerate(cases):
            share = (shape_deadline - time.monotonic()) / (len(cases) - j)
            found = sweep_shape(name, plain, packed_weights if packed else plain, m, time.monotonic() + share)
            best[packed][m, n, k] = found
        del plain, packed_weights
        torch.cuda.empty_cache()
    print(json.dumps({"seconds": round(seconds - end + time.monotonic(), 1)}))
    print("MEASURED_PACKED =", best[True])
    print("MEASURED =", best[False], flush=True)


def sweep_shape(
    shape_name: str, plain_weights: list[BF16Weight], candidate_weights: Sequence[AnyWeight], m: int, deadline: float
) -> wide.TileConfig | None:
    n, k, packed = plain_weights[0].n, plain_weights[0].k, isinstance(candidate_weights[0], UW12Weight)
    x = torch.empty(m, k, device="cuda", dtype=torch.bfloat16).normal_()
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    labels = {"shape": shape_name, "m": m, "packed": packed}
    cublas = time_graph_replay([bind_arguments(F.linear, x, weight.data) for weight in plain_weights])
    ours = time_graph_replay([bind_arguments(wide.linear, x, weight, out=out) for weight in plain_weights])
    read = (
        candidate_weights[0].nbytes
        if isinstance(candidate_weights[0], UW12Weight)
        else candidate_weights[0].data.nbytes
    )
    _print_json_line(labels, cublas=cublas, plain=ours, limit=read / wide.MEMORY_BYTES_PER_US)
    rule, known = wide.choose_plan(m, n, k, packed=packed), candidate_plans(m, n, k, packed=packed)
    tried: dict[wide.WidePlan, float] = {}
    for plan in dict.fromkeys([rule, *known]):
        if time.monotonic() > deadline and tried:
            break
        try:
            tried[plan] = time_graph_replay(
                [bind_arguments(wide.linear, x, weight, out=out, plan=plan) for weight in candidate_weights], replays=5
            )
            _print_json_line(labels, plan=asdict(plan), us=tried[plan])
        except CudaDriverError as error:  # clusters of this size may not fit
            _print_json_line(labels, plan=asdict(plan), refused=str(error))
    best = min((plan for plan in tried if plan in known), key=lambda plan: tried[plan])
    fastest_us = time_graph_replay(
        [bind_arguments(wide.linear, x, weight, out=out, plan=best) for weight in candidate_weights]
    )
    alone = time_graph_replay(
        [bind_arguments(wide.linear, x, weight, out=out, plan=best, pdl=False) for weight in candidate_weights]
    )
    speedup = cublas / fastest_us
    _print_json_line(
        labels, best=asdict(best), us=fastest_us, without_pdl=alone, rule=tried.get(rule), over_cublas=speedup
    )
    beats_cublas = not wide.is_large(m) or measure_fused_speedup(labels, plain_weights, candidate_weights, x, best) > 1
    return known[best] if packed or beats_cublas else None


def measure_fused_speedup(
    labels: dict[str, object],
    plain_weights: list[BF16Weight],
    candidate_weights: Sequence[AnyWeight],
    x: Tensor,
    plan: wide.WidePlan,
) -> float:
    """Return the speedup of our fused matrix product over cuBLAS.

    Our kernel also applies the operation that follows the product (gated activation or addition of the residual). With
    cuBLAS, a separate kernel applies it where cuBLAS cannot.
    """
    m, n, name = len(x), plain_weights[0].n, labels["shape"]
    kind = torch.float32 if name == "lm_head" else torch.bfloat16
    out = torch.zeros(m, n // 2 if name == "gate_up" else n, device="cuda", dtype=kind)
    options: dict[str, object] = {"gated": name == "gate_up", "residual": out if name in ("o", "down") else None}

    def run_cublas(weight: Tensor) -> Tensor:
        if name == "gate_up":
            return activation.silu_mul(F.linear(x, weight), out, GATE_GROUP_ROWS, pdl=True)
        if name == "lm_head":
            return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        return F.linear(x, weight) if name == "qkv" else out.addmm_(x, weight.t())

    ours = time_graph_replay(
        [bind_arguments(wide.linear, x, weight, out=out, plan=plan, **options) for weight in candidate_weights]
    )
    cublas = time_graph_replay([bind_arguments(run_cublas, weight.data) for weight in plain_weights])
    _print_json_line(labels, with_ends=ours, cublas_with_ends=cublas, over_cublas=cublas / ours)
    return cublas / ours


def candidate_plans(columns: int, n: int, k: int, *, packed: bool) -> dict[wide.WidePlan, wide.TileConfig]:
    """Return the plans to measure and the tile configuration of each plan, the shortest estimated time first."""
    result = {}
    for row in _tile_configs(columns, packed):
        if row.split > k // 64 or (row.split * row.share > MAX_CLUSTER_CTAS and not row.unclustered):
            continue
        plan = wide.make_plan(columns, n, k, row, packed=packed)
        fits = (
            plan.grid <= row.ctas_per_sm * count_sms()
            and plan.shared_bytes <= wide.SHARED_BYTES_BY_CTAS[row.ctas_per_sm]
        )
        if fits and plan.stages > 1 and (plan.can_exchange_sums or not row.unclustered):
            result[plan] = row
    return dict(sorted(result.items(), key=lambda item: wide.estimate_us(item[0], n, k))[:MAX_PLANS])


def _tile_configs(columns: int, packed: bool) -> Iterator[wide.TileConfig]:
    shares = wide.SHARES if wide.is_large(columns) else (1,)
    for groups in (groups for groups, wide_ in (wide.PACKED_TILES if packed else wide.PLAIN_TILES) if wide_ == columns):
        two = packed and groups <= 2 and groups * columns <= wide.MAX_SIZE_OF_TWO_CTAS
        for ctas_per_sm, split, share in product((1, 2) if two else (1,), SPLITS, shares):
            yield wide.TileConfig(groups, split, ctas_per_sm, share)
            if packed and split > 1 and share == 1:
                yield wide.TileConfig(groups, split, ctas_per_sm, unclustered=True)


def make_weights(n: int, k: int) -> tuple[list[BF16Weight], list[UW12Weight]]:
    """Return plain and compressed copies of one random weight. There are more copies than the L2 cache holds."""
    data = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
    for rows in data.split(ROWS_PER_DRAW):
        spread = torch.zeros(rows.shape, device="cuda")
        for _ in range(DEGREES_OF_FREEDOM):
            spread += torch.randn_like(spread).square_() / DEGREES_OF_FREEDOM
        rows.copy_(0.02 * torch.randn_like(spread) / spread.sqrt_())
    packed = pack(data)
    assert packed is not None
    plain = [BF16Weight(data)] + [BF16Weight(data.clone()) for _ in range(1, count_input_sets(data.nbytes))]
    count = count_input_sets(packed.nbytes)
    copies = [UW12Weight(packed.planes.clone(), packed.headers.clone(), n, k) for _ in range(1, count)]
    return plain, [packed, *copies]


def compile_variants(columns: Collection[int]) -> None:
    """Compile the kernels for these tiles in parallel threads; the compiler releases the GIL."""
    variants = [variant for variant in wide.VARIANTS if any(variant.endswith(f", {count}>") for count in columns)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda variant: nvrtc.compile_cached(wide.FILE, [variant], nvrtc.compiler_options()), variants))


def _print_json_line(labels: dict[str, object], **values: object) -> None:
    rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in values.items()}
    print(json.dumps(labels | rounded), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SWEEP_SECONDS, help="seconds after which the sweep stops")
    parser.add_argument("--rows", default="", help="rows of x, separated by commas (default: all)")
    args = parser.parse_args()
    sweep(args.seconds, [int(rows) for rows in args.rows.split(",") if rows])


if __name__ == "__main__":
    main()
