"""Measures plans of `cuda.wide`: packed weights with 64, 128 and 256 rows, and plain weights with 256 rows.

It prints a JSON line for each plan, then the best plan of each shape in the form of `wide.MEASURED_PACKED` and
`wide.MEASURED`. Run it by `python -m emberline.bench.gpu.wide_sweep [--seconds S]`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.bench.gpu.linear import SHAPES
from emberline.bench.gpu.timing import copies_for, replay
from emberline.kernels.cuda import nvrtc, wide
from emberline.kernels.cuda.driver import DriverError
from emberline.kernels.cuda.linear import SMS, Weight
from emberline.kernels.cuda.uw12 import Packed, pack
from emberline.kernels.tiles import GATED_ROWS
from emberline.kernels.triton import activation

JOBS = ((64, True), (128, True), (256, True), (256, False))  # rows of x, and whether weights are packed
SPLITS = range(1, 9)
MOST_CTAS = 8
SECONDS = 70.0
MOST_PLANS = 50  # plans measured for one case, in the order of their estimates
GENERATED = 8192  # rows of random weights drawn at once
FREEDOM = 5  # of Student's t distribution, whose tails give as many escapes as trained weights


Source = Weight | Packed


def sweep(seconds: float = SECONDS) -> None:
    """Measure each shape for an equal share of the remaining time, compared with cuBLAS and plain weights."""
    end = time.monotonic() + seconds
    compile_all()
    best: dict[bool, dict[tuple[int, int, int], wide.Row | None]] = {True: {}, False: {}}
    shapes = list(SHAPES.items())
    for i, (name, (k, n)) in enumerate(shapes):
        until = time.monotonic() + (end - time.monotonic()) / (len(shapes) - i)
        plain, made = weights(n, k)
        for j, (m, packed) in enumerate(JOBS):
            share = (until - time.monotonic()) / (len(JOBS) - j)
            found = sweep_shape(name, plain, made if packed else plain, m, time.monotonic() + share)
            best[packed][m, n, k] = found
        del plain, made
        torch.cuda.empty_cache()
    print(json.dumps({"seconds": round(seconds - end + time.monotonic(), 1)}))
    print("MEASURED_PACKED =", best[True])
    print("MEASURED =", best[False], flush=True)


def sweep_shape(name: str, plain: list[Weight], swept: Sequence[Source], m: int, until: float) -> wide.Row | None:
    n, k, packed = plain[0].n, plain[0].k, isinstance(swept[0], Packed)
    x = torch.empty(m, k, device="cuda", dtype=torch.bfloat16).normal_()
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    labels = {"shape": name, "m": m, "packed": packed}
    cublas = replay([_bind(F.linear, x, weight.data) for weight in plain])
    ours = replay([_bind(wide.linear, x, weight, out=out) for weight in plain])
    read = swept[0].nbytes if isinstance(swept[0], Packed) else swept[0].data.nbytes
    _print_line(labels, cublas=cublas, plain=ours, limit=read / wide.MEMORY_RATE)
    rule, known = wide.choose(m, n, k, packed=packed), plans(m, n, k, packed=packed)
    tried: dict[wide.Plan, float] = {}
    for plan in dict.fromkeys([rule, *known]):
        if time.monotonic() > until and tried:
            break
        try:
            tried[plan] = replay([_bind(wide.linear, x, weight, out=out, plan=plan) for weight in swept], replays=5)
            _print_line(labels, plan=asdict(plan), us=tried[plan])
        except DriverError as error:  # clusters of this size may not fit
            _print_line(labels, plan=asdict(plan), refused=str(error))
    best = min((plan for plan in tried if plan in known), key=lambda plan: tried[plan])
    fastest_us = replay([_bind(wide.linear, x, weight, out=out, plan=best) for weight in swept])
    alone = replay([_bind(wide.linear, x, weight, out=out, plan=best, pdl=False) for weight in swept])
    speedup = cublas / fastest_us
    _print_line(labels, best=asdict(best), us=fastest_us, without_pdl=alone, rule=tried.get(rule), over_cublas=speedup)
    beats_cublas = m < wide.LARGE or with_ends(labels, plain, swept, x, best) > 1
    return known[best] if packed or beats_cublas else None


def with_ends(
    told: dict[str, object], plain: list[Weight], swept: Sequence[Source], x: Tensor, plan: wide.Plan
) -> float:
    """Return how much faster the product with its fused epilogue is than cuBLAS with separate kernels."""
    m, n, name = len(x), plain[0].n, told["shape"]
    kind = torch.float32 if name == "lm_head" else torch.bfloat16
    out = torch.zeros(m, n // 2 if name == "gate_up" else n, device="cuda", dtype=kind)
    options: dict[str, object] = {"gated": name == "gate_up", "residual": out if name in ("o", "down") else None}

    def by_cublas(weight: Tensor) -> Tensor:
        if name == "gate_up":
            return activation.silu_mul(F.linear(x, weight), out, GATED_ROWS, pdl=True)
        if name == "lm_head":
            return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        return F.linear(x, weight) if name == "qkv" else out.addmm_(x, weight.t())

    ours = replay([_bind(wide.linear, x, weight, out=out, plan=plan, **options) for weight in swept])
    cublas = replay([_bind(by_cublas, weight.data) for weight in plain])
    _print_line(told, with_ends=ours, cublas_with_ends=cublas, over_cublas=cublas / ours)
    return cublas / ours


def plans(columns: int, n: int, k: int, *, packed: bool) -> dict[wide.Plan, wide.Row]:
    """Return the plans to measure with the configuration of each, the best estimates first."""
    made = {}
    for row in _configs(columns, packed):
        if row.split > k // 64 or (row.split * row.share > MOST_CTAS and not row.apart):
            continue
        plan = wide.planned(columns, n, k, row, packed=packed)
        fits = plan.grid <= row.beside * SMS and plan.shared <= wide.SHARED_LIMITS[row.beside]
        if fits and plan.stages > 1 and (plan.fits_the_table or not row.apart):
            made[plan] = row
    return dict(sorted(made.items(), key=lambda item: wide.estimate(item[0], n, k))[:MOST_PLANS])


def _configs(columns: int, packed: bool) -> Iterator[wide.Row]:
    shares = wide.SHARES if columns == wide.LARGE else (1,)
    for groups in (groups for groups, wide_ in (wide.PACKED if packed else wide.PLAIN) if wide_ == columns):
        two = packed and groups <= 2 and groups * columns <= wide.MOST_OF_TWO
        for beside, split, share in product((1, 2) if two else (1,), SPLITS, shares):
            yield wide.Row(groups, split, beside, share)
            if packed and split > 1 and share == 1:
                yield wide.Row(groups, split, beside, apart=True)


def weights(n: int, k: int) -> tuple[list[Weight], list[Packed]]:
    """Return plain and packed copies of a random weight, more than the L2 cache holds."""
    data = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
    for rows in data.split(GENERATED):
        spread = torch.zeros(rows.shape, device="cuda")
        for _ in range(FREEDOM):
            spread += torch.randn_like(spread).square_() / FREEDOM
        rows.copy_(0.02 * torch.randn_like(spread) / spread.sqrt_())
    packed = pack(data)
    assert packed is not None
    plain = [Weight(data)] + [Weight(data.clone()) for _ in range(1, copies_for(data.nbytes))]
    count = copies_for(packed.nbytes)
    copies = [Packed(packed.planes.clone(), packed.headers.clone(), n, k) for _ in range(1, count)]
    return plain, [packed, *copies]


def compile_all() -> None:
    """Compile all variants in parallel; the compiler releases the GIL."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda variant: nvrtc.compiled(wide.FILE, [variant]), wide.VARIANTS))


def _bind(function: Callable[..., Tensor], *arguments: object, **options: object) -> Callable[[], Tensor]:
    return lambda: function(*arguments, **options)


def _print_line(labels: dict[str, object], **more: object) -> None:
    rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in more.items()}
    print(json.dumps(labels | rounded), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="seconds after which the sweep stops")
    sweep(parser.parse_args().seconds)


if __name__ == "__main__":
    main()
