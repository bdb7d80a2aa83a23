"""Measures the linear layers of Llama 3.1 8B for up to 128 rows, compared with cuBLAS.

It measures each layer alone, and all layers of a step in one CUDA graph. The options search for faster kernel plans
instead. Run it with `python -m emberline.bench.gpu.linear [--sweep | --sweep-wide | --sweep-packed]`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.bench.gpu.timing import bind_arguments, count_input_sets, time_graph_replay
from emberline.bench.report import BenchReport
from emberline.kernels.cuda import nvrtc, wide
from emberline.kernels.cuda.driver import count_sms
from emberline.kernels.cuda.linear import (
    FILE,
    MAX_SHARED_BYTES,
    WARPS,
    BF16Weight,
    SkinnyPlan,
    choose_plan,
    linear,
    make_plan,
)
from emberline.kernels.cuda.linear import supports as is_skinny
from emberline.kernels.cuda.uw12 import UW12Weight, pack, unpack

BYTES_PER_US = 4.39e6  # read bandwidth of an H200, measured by a plain reduction
SHAPES = {  # k, n
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "lm_head": (4096, 128256),
}
ROWS = (1, 8, 16, 32, 64, 128)
DISTINCT_LAYERS, LAYERS = 8, 32  # the weights of eight layers are several times the size of any cache
SWEEP_SECONDS, WIDE_SECONDS, PACKED_SECONDS = 80.0, 40.0, 40.0
HALF_SHARED_BYTES = MAX_SHARED_BYTES // 2  # leaves room for the next kernel's CTA on the same SM

AnyWeight = BF16Weight | UW12Weight


def measure(report: BenchReport) -> None:
    for name, (k, n) in SHAPES.items():
        weights = _make_weights(n, k)
        packed = _make_packed_copies(weights)
        for m in ROWS:
            _measure_shape(report, f"{name} m={m}", weights, packed, m)
        _measure_packing(report, name, weights[0], packed[0])
        del weights, packed
        torch.cuda.empty_cache()
    _measure_all_layers(report)


def sweep_plans(seconds: float = SWEEP_SECONDS) -> None:
    """Print the time of the chosen kernel plan and of the fastest plans, for each shape, until the time is up."""
    end = time.monotonic() + seconds
    for name, (k, n) in SHAPES.items():
        weights = _make_weights(n, k)
        for m in ROWS:
            if not is_skinny(m, n, k) or time.monotonic() > end:
                continue
            rule = choose_plan(m, n, k)
            plans = dict.fromkeys(_candidate_plans(m, n, k))
            tried = {plan: _time_our_linear(weights, m, plan=plan, replays=3) for plan in plans}
            best = sorted(tried, key=lambda plan: tried[plan])
            print(
                f"{name} m={m}: limit {_min_memory_time_us(m, n, k):.2f}, rule {tried[rule]:.2f} {_describe_plan(rule)}"
            )
            for warps in (WARPS, 2 * WARPS):
                these = [plan for plan in best if plan.warps == warps][:4]
                print("    " + "  ".join(f"{tried[plan]:.2f} {_describe_plan(plan)}" for plan in these), flush=True)
        del weights
        torch.cuda.empty_cache()
    print(f"sweep: {seconds - end + time.monotonic():.0f} s", flush=True)


def sweep_packed(seconds: float = PACKED_SECONDS) -> None:
    """Print the fastest kernel plans for compressed (uw12) weights, for each shape, until the time is up.

    The plans differ in tile size, pipeline stages, sets of partial sums and CTAs per SM. The number of warps is fixed,
    because it determines the last bits of the result.
    """
    end = time.monotonic() + seconds
    for name, (k, n) in SHAPES.items():
        packed = _make_packed_copies(_make_weights(n, k))
        torch.cuda.empty_cache()
        for m in (m for m in ROWS if is_skinny(m, n, k)):
            rule = choose_plan(m, n, k, header_stride=packed[0].header_stride)
            plans = dict.fromkeys([rule, *_candidate_packed_plans(rule, n, k)])
            _compile_variants({plan.kernel_name("STORE") for plan in plans})
            tried: dict[SkinnyPlan, float] = {}
            for plan in plans:
                if time.monotonic() < end or plan == rule:
                    tried[plan] = _time_our_linear(packed, m, plan=plan, replays=3)
            best = sorted(tried, key=lambda plan: tried[plan])[:8]
            limit_us = _min_memory_time_us(m, n, k, packed[0])
            print(f"{name} m={m}: limit {limit_us:.2f}, rule {tried[rule]:.2f} {_describe_plan(rule)}")
            print("    " + "  ".join(f"{tried[plan]:.2f} {_describe_plan(plan)}" for plan in best), flush=True)
        del packed
        torch.cuda.empty_cache()
    print(f"sweep: {seconds - end + time.monotonic():.0f} s", flush=True)


def _candidate_packed_plans(chosen_plan: SkinnyPlan, n: int, k: int) -> Iterator[SkinnyPlan]:
    sms = count_sms()
    for (ctas, shared), blocks in product(
        ((sms, MAX_SHARED_BYTES), (sms, HALF_SHARED_BYTES), (2 * sms, HALF_SHARED_BYTES)), (2, 3, 4, 1)
    ):
        deep = make_plan(
            n, k, blocks, chosen_plan.tiles, ctas=ctas, shared_bytes=shared, header_stride=chosen_plan.header_stride
        )
        sets = {deep.buffers, 0} if deep.buffers else {0}
        depths = (deep.stages + 1, deep.stages, deep.stages - 1)
        similar = [replace(deep, stages=stages, buffers=buffers) for stages, buffers in product(depths, sets)]
        yield from (plan for plan in similar if plan.stages > 1 and plan.shared_bytes <= shared)


def _compile_variants(variants: set[str]) -> None:
    """Compile the kernel variants in parallel, before they are needed."""
    with ThreadPoolExecutor(len(variants)) as pool:
        list(pool.map(lambda variant: nvrtc.compile_cached(FILE, [variant], nvrtc.compiler_options()), variants))


def sweep_wide(seconds: float = WIDE_SECONDS) -> None:
    """Print the fastest plans of the kernel `cuda.wide`, for each shape, until the time is up.

    The plans differ in tile size, in how the k dimension is split, in pipeline stages and in grid size.
    """
    end = time.monotonic() + seconds
    for name, (k, n) in SHAPES.items():
        weights = _make_weights(n, k)
        for m in ROWS:
            if not wide.supports(m, n, k):
                continue
            rule = wide.choose_plan(64 if m <= 64 else 128, n, k)
            tried: dict[wide.WidePlan, float] = {}
            for plan in dict.fromkeys([rule, *_candidate_wide_plans(rule, n, k)]):
                if time.monotonic() < end:
                    tried[plan] = _time_our_linear(weights, m, wide_plan=plan, replays=3)
            best = sorted(tried, key=lambda plan: tried[plan])[:8]
            texts = [f"{tried[plan]:.2f} {_describe_wide_plan(plan)}" for plan in best]
            rule_us = f"{tried[rule]:.2f}" if rule in tried else "no time"
            print(f"{name} m={m}: limit {_min_memory_time_us(m, n, k):.2f}, rule {rule_us} {_describe_wide_plan(rule)}")
            print("    " + "  ".join(texts), flush=True)
        del weights
        torch.cuda.empty_cache()
    print(f"sweep: {seconds - end + time.monotonic():.0f} s", flush=True)


def _candidate_wide_plans(chosen_plan: wide.WidePlan, n: int, k: int) -> Iterator[wide.WidePlan]:
    """Yield plans to measure, the shortest estimated time first, because the time may not suffice for all plans."""
    tiles = product(wide.GROUPS, wide.MAX_CLUSTERS)
    deep = [wide.make_plan(chosen_plan.columns, n, k, wide.TileConfig(groups, split)) for groups, split in tiles]
    deep = sorted((p for p in deep if p.grid <= count_sms()), key=lambda plan: wide.estimate_us(plan, n, k))[:9]
    yield from deep
    for plan in deep[:5]:
        half = (MAX_SHARED_BYTES // 2 - 1024) // (
            plan.stage_bytes + 16
        )  # leaves room for the next kernel's CTA on the SM
        yield from (replace(plan, stages=stages) for stages in (plan.stages - 1, half) if 1 < stages < plan.stages)
        if plan.split == 1:
            yield wide.make_plan(chosen_plan.columns, n, k, wide.TileConfig(plan.groups), ctas=112)


def _describe_wide_plan(plan: wide.WidePlan) -> str:
    return f"G{plan.groups} K{plan.split} S{plan.stages} C{plan.grid}"


def _measure_shape(report: BenchReport, name: str, weights: list[BF16Weight], packed: list[UW12Weight], m: int) -> None:
    n, k = weights[0].n, weights[0].k
    x = _random_matrix(m, k)
    cublas = time_graph_replay([bind_arguments(F.linear, x, weight.data) for weight in weights])
    ours, alone = _time_our_linear(weights, m), _time_our_linear(weights, m, pdl=False)
    report.add(name, ours, "us", peer=cublas, limit=_min_memory_time_us(m, n, k))
    report.add(f"{name} without pdl", alone, "us", peer=cublas, limit=_min_memory_time_us(m, n, k))
    print(f"{name}: {ours:.2f} us, without pdl {alone:.2f}, cublas {cublas:.2f}", flush=True)
    limit = _min_memory_time_us(m, n, k, packed[0])
    ours, alone = _time_our_linear(packed, m), _time_our_linear(packed, m, pdl=False)
    report.add(f"{name} packed", ours, "us", peer=cublas, limit=limit)
    report.add(f"{name} packed without pdl", alone, "us", peer=cublas, limit=limit)
    print(f"{name} packed: {ours:.2f} us, without pdl {alone:.2f}, limit {limit:.2f}", flush=True)


def _measure_packing(report: BenchReport, name: str, weight: BF16Weight, packed: UW12Weight) -> None:
    """Measure how fast a weight is compressed (once, at load time) and decompressed (before a large batch)."""
    out = torch.empty_like(weight.data)
    limit = (packed.nbytes + weight.data.nbytes) / BYTES_PER_US
    unpacking = time_graph_replay([lambda: unpack(packed, out)])
    assert torch.equal(out.view(torch.int16), weight.data.view(torch.int16))
    begin = time.perf_counter()
    pack(weight.data)
    packing = (time.perf_counter() - begin) * 1e6
    report.add(f"{name} unpack", unpacking, "us", limit=limit)
    report.add(f"{name} pack", packing, "us", limit=limit)
    rate = weight.data.nbytes / packing / 1e3
    bits = packed.nbytes * 8 / weight.data.numel()
    print(f"{name}: unpack {unpacking:.2f} us (limit {limit:.2f}), pack {rate:.0f} GB/s, {bits:.3f} bit", flush=True)


def _time_our_linear(
    weights: Sequence[AnyWeight],
    m: int,
    *,
    plan: SkinnyPlan | None = None,
    wide_plan: wide.WidePlan | None = None,
    pdl: bool = True,
    replays: int = 11,
) -> float:
    x, out = _random_matrix(m, weights[0].k), torch.empty(m, weights[0].n, device="cuda", dtype=torch.bfloat16)

    def make_call(weight: AnyWeight) -> Callable[[], Tensor]:
        if plan:
            return lambda: linear(x, weight, out=out, plan=plan, pdl=pdl)
        if wide_plan:
            return lambda: wide.linear(x, weight, out=out, plan=wide_plan, pdl=pdl)
        return lambda: _select_linear(weight, m)(x, weight, out=out, pdl=pdl)

    return time_graph_replay([make_call(weight) for weight in weights], replays=replays)


def _select_linear(weight: AnyWeight, m: int) -> Callable[..., Tensor]:
    """Return the kernel that a model would use for this weight and `m` rows."""
    return wide.linear if wide.supports(m, weight.n, weight.k, packed=isinstance(weight, UW12Weight)) else linear


def _candidate_plans(m: int, n: int, k: int) -> Iterator[SkinnyPlan]:
    """Yield the chosen plan and plans that differ from it in tiles, warps, CTAs per SM, buffers and stages."""
    rule = choose_plan(m, n, k)
    yield rule
    for blocks, warps, two_ctas in product((1, 2, 3, 4), (WARPS, 2 * WARPS), (False, True)):
        ctas, shared = (2 * count_sms(), MAX_SHARED_BYTES // 2) if two_ctas else (count_sms(), MAX_SHARED_BYTES)
        deep = make_plan(n, k, blocks, rule.tiles, warps=warps, ctas=ctas, shared_bytes=shared)
        sets = {deep.buffers, 0} if deep.buffers else {0}
        depths = (deep.stages + 1, deep.stages, deep.stages - 1)
        similar = [replace(deep, stages=stages, buffers=buffers) for stages, buffers in product(depths, sets)]
        yield from (plan for plan in similar if plan.stages > 1 and plan.shared_bytes <= shared)


def _describe_plan(plan: SkinnyPlan) -> str:
    return f"R{plan.blocks} W{plan.warps} S{plan.stages} B{plan.buffers} G{plan.grid}"


def _measure_all_layers(report: BenchReport) -> None:
    """Measure all linear layers of one step in one CUDA graph, without the other kernels of a model."""
    torch.manual_seed(0)
    names = ("qkv", "o", "gate_up", "down")
    layers = [
        [BF16Weight(_heavy_tailed_matrix(SHAPES[name][1], SHAPES[name][0])) for name in names]
        for _ in range(DISTINCT_LAYERS)
    ]
    head = BF16Weight(_heavy_tailed_matrix(128256, 4096))
    packed_layers, packed_head = [[_pack_weight(w) for w in layer] for layer in layers], _pack_weight(head)
    sizes = [
        (sum(weight.nbytes for layer in weights_by_layer for weight in layer) * LAYERS // DISTINCT_LAYERS + last.nbytes)
        / BYTES_PER_US
        / 1e3
        for weights_by_layer, last in (
            ([[w.data for w in layer] for layer in layers], head.data),
            (packed_layers, packed_head),
        )
    ]
    for m in ROWS:
        cublas = time_graph_replay([_make_cublas_layers_call(layers, head, m)]) / 1e3
        print(f"chain m={m}: cublas {cublas:.3f} ms", flush=True)
        for label, pdl in (("", True), (" without pdl", False)):
            ours = time_graph_replay([_make_our_layers_call(layers, head, m, pdl=pdl)]) / 1e3
            report.add(f"chain m={m}{label}", ours, "ms", peer=cublas, limit=sizes[0])
            print(f"chain m={m}{label}: {ours:.3f} ms", flush=True)
            ours = time_graph_replay([_make_our_layers_call(packed_layers, packed_head, m, pdl=pdl)]) / 1e3
            report.add(f"chain m={m} packed{label}", ours, "ms", peer=cublas, limit=sizes[1])
            print(f"chain m={m} packed{label}: {ours:.3f} ms, limit {sizes[1]:.3f}", flush=True)


def _make_our_layers_call(
    layers: Sequence[Sequence[AnyWeight]], head: AnyWeight, m: int, *, pdl: bool
) -> Callable[[], None]:
    """Return a function that runs all linear layers with the fused operations of a model.

    Every call uses the same inputs, so that no value grows.
    """
    x, inner, residual = _random_matrix(m, 4096), _random_matrix(m, 14336), _random_matrix(m, 4096)
    qkv_out, hidden, active = (torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for n in (6144, 4096, 14336))
    logits = torch.empty(m, head.n, device="cuda")

    def run_linear(x: Tensor, weight: AnyWeight, out: Tensor, **options: object) -> None:
        _select_linear(weight, m)(x, weight, out=out, pdl=pdl, **options)

    def run_all_layers() -> None:
        for layer in range(LAYERS):
            qkv, o, gate_up, down = layers[layer % DISTINCT_LAYERS]
            run_linear(x, qkv, qkv_out)
            run_linear(x, o, hidden, residual=residual)
            run_linear(x, gate_up, active, gated=True)
            run_linear(inner, down, hidden, residual=residual)
        run_linear(x, head, logits)

    return run_all_layers


def _make_cublas_layers_call(layers: list[list[BF16Weight]], head: BF16Weight, m: int) -> Callable[[], None]:
    inputs = {k: _random_matrix(m, k) for k in (4096, 14336)}

    def run_all_layers() -> None:
        for layer in range(LAYERS):
            for weight in layers[layer % DISTINCT_LAYERS]:
                F.linear(inputs[weight.k], weight.data)
        F.linear(inputs[4096], head.data)

    return run_all_layers


def _make_weights(n: int, k: int) -> list[BF16Weight]:
    return [BF16Weight(_heavy_tailed_matrix(n, k)) for _ in range(count_input_sets(2 * n * k))]


def _make_packed_copies(weights: Sequence[BF16Weight]) -> list[UW12Weight]:
    """Return compressed copies of the first weight, one for each weight.

    All copies have headers of the same size, because a kernel plan is made for one header size.
    """
    packed = _pack_weight(weights[0])
    return [replace(packed, planes=packed.planes.clone(), headers=packed.headers.clone()) for _ in weights]


def _pack_weight(weight: BF16Weight) -> UW12Weight:
    packed = pack(weight.data)
    assert packed is not None, "these weights are all worth packing"
    return packed


def _heavy_tailed_matrix(n: int, k: int) -> Tensor:
    """Return random weights with the heavy tails of trained weights (Student's t distribution).

    Their rare large values are stored separately (as escapes) when the weights are compressed.
    """
    weight = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
    for rows in weight.split(4096):
        squares = torch.zeros(rows.shape, device="cuda")
        for _ in range(5):
            squares.add_(torch.randn_like(squares).square_(), alpha=0.2)
        rows.copy_(torch.randn_like(squares).mul_(0.0155).div_(squares.sqrt_()))
    return weight


def _random_matrix(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)


def _min_memory_time_us(m: int, n: int, k: int, packed: UW12Weight | None = None) -> float:
    return ((2 * n * k if packed is None else packed.nbytes) + 2 * (m * k + m * n)) / BYTES_PER_US


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sweep", action="store_true", help="search for fast plans instead of measuring the chosen ones"
    )
    parser.add_argument("--sweep-wide", action="store_true", help="search for fast plans for 64 and 128 rows")
    parser.add_argument(
        "--sweep-packed", action="store_true", help="search for fast plans for packed weights and up to 32 rows"
    )
    args = parser.parse_args()
    sweeps = [(args.sweep, sweep_plans), (args.sweep_wide, sweep_wide), (args.sweep_packed, sweep_packed)]
    if chosen := [function for is_selected, function in sweeps if is_selected]:
        for function in chosen:
            function()
        return
    report = BenchReport("gpu-linear")
    measure(report)
    report.print_and_save()


if __name__ == "__main__":
    main()
