"""Measures the linear layers of Llama 3.1 8B for 256 to 8,192 rows, compared with cuBLAS.

Each layer is measured in a short burst, and under a load that is long enough for the GPU to reach its power limit. Run
it with `python -m emberline.bench.gpu.gemm [--json | --variants]`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.bench.gpu.timing import count_input_sets, time_graph_replay
from emberline.bench.report import BenchReport
from emberline.kernels.cuda import gemm
from emberline.kernels.cuda.linear import BF16Weight
from emberline.kernels.triton import activation
from emberline.kernels.work_limits import GATE_GROUP_ROWS

FLOPS = 758e12  # FLOP per second of a dense bf16 product on an H200, measured
SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}  # k, n
ADDING_LAYERS, GATED_LAYER = ("o", "down"), "gate_up"
ROWS = (256, 512, 1024, 2048, 4096, 8192)
MIN_COPIES = 4  # of each weight
MIN_LONG_LOAD_ROWS, LONG_LOAD_SECONDS, SHORT_LOAD_SECONDS = (
    2048,
    0.8,
    0.3,
)  # from 2048 rows on, the sustained load lasts longer
REST_SECONDS = 0.05  # idle time before a burst
VARIANTS_SECONDS = 28.0

Call = Callable[[], object]


def measure(report: BenchReport) -> None:
    """Add the microseconds per product in a burst and the TFLOP/s under sustained load to the report."""
    for name, (k, n) in SHAPES.items():
        weights = _make_weights(n, k)
        for m in ROWS:
            ours, theirs = [_make_gemm_calls(name, weights, m)], [_make_cublas_calls(name, weights, m)]
            flop = 2.0 * m * n * k
            bursts = [_time_burst(calls) for calls in ours + theirs]
            seconds = LONG_LOAD_SECONDS if m >= MIN_LONG_LOAD_ROWS else SHORT_LOAD_SECONDS
            rates = [flop / _time_sustained(calls, seconds) / 1e6 for calls in ours + theirs]
            report.add(f"{name} m={m}", bursts[0], "us", peer=bursts[1], limit=flop / FLOPS * 1e6)
            report.add(f"{name} m={m} sustained", rates[0], "TFLOP/s", peer=rates[1], limit=FLOPS / 1e12)
            burst = [flop / us / 1e6 for us in bursts]
            print(
                f"{name} m={m}: {bursts[0]:.1f} us, cuBLAS {bursts[1]:.1f}; TFLOP/s in a burst {burst[0]:.0f}, cuBLAS "
                f"{burst[1]:.0f}; sustained {rates[0]:.0f}, cuBLAS {rates[1]:.0f}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        del weights, ours, theirs
        torch.cuda.empty_cache()


def measure_variants() -> None:
    """Print the TFLOP/s of the chosen kernel plan and of similar plans, in a burst and under sustained load.

    The search stops when its time is up.
    """
    end = time.monotonic() + VARIANTS_SECONDS
    for name, m in (
        (GATED_LAYER, 8192),
        ("down", 8192),
        (GATED_LAYER, 2048),
        ("qkv", 2048),
        ("o", 1024),
        (GATED_LAYER, 512),
    ):
        k, n = SHAPES[name]
        weights, flop = _make_weights(n, k), 2.0 * m * n * k
        for plan in dict.fromkeys(_candidate_plans(m, n, k)):
            if time.monotonic() > end:
                return
            calls = _make_gemm_calls(name, weights, m, plan)
            burst, load = flop / _time_burst(calls) / 1e6, flop / _time_sustained(calls, 0.4) / 1e6
            print(f"{name} m={m} {_describe_plan(plan)}: burst {burst:.0f}, sustained {load:.0f} TFLOP/s", flush=True)
        del weights
        torch.cuda.empty_cache()


def _candidate_plans(m: int, n: int, k: int) -> Iterator[gemm.GemmPlan]:
    rule = gemm.choose_plan(m, n, k)
    yield rule
    yield from (replace(rule, lag=lag) for lag in (0, 2))
    yield from (replace(rule, band=band) for band in (4, 16))
    yield from gemm.PLANS


def _describe_plan(plan: gemm.GemmPlan) -> str:
    return f"{plan.width}x{plan.cluster} band {plan.band} lag {plan.lag}"


def _make_gemm_calls(name: str, weights: list[BF16Weight], m: int, plan: gemm.GemmPlan | None = None) -> list[Call]:
    """Return one function per weight that calls our GEMM kernel.

    In some layers the kernel adds the product to its output. The values of that output grow slightly with every call,
    which does not affect the time.
    """
    x, n = _random_matrix(m, weights[0].k), weights[0].n
    gated = name == GATED_LAYER
    out = _random_matrix(m, n // 2 if gated else n)
    residual = out if name in ADDING_LAYERS else None

    def make_call(weight: BF16Weight) -> Call:
        return lambda: gemm.linear(x, weight, out=out, residual=residual, gated=gated, plan=plan)

    return [make_call(weight) for weight in weights]


def _make_cublas_calls(name: str, weights: list[BF16Weight], m: int) -> list[Call]:
    x, n = _random_matrix(m, weights[0].k), weights[0].n
    out = _random_matrix(m, n // 2 if name == GATED_LAYER else n)

    def make_call(w: Tensor) -> Call:
        if name == GATED_LAYER:
            return lambda: activation.silu_mul(F.linear(x, w), out, GATE_GROUP_ROWS, pdl=True)
        return (lambda: out.addmm_(x, w.t())) if name in ADDING_LAYERS else (lambda: torch.mm(x, w.t(), out=out))

    return [make_call(weight.data) for weight in weights]


def _time_burst(calls: list[Call]) -> float:
    """Return the microseconds per call when the GPU was idle before."""
    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)
    return time_graph_replay(calls, replays=3)


def _time_sustained(calls: list[Call], seconds: float) -> float:
    """Return the microseconds per call in the second half of `seconds` of continuous load."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        half = _count_replays(graph, seconds / 2)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for replays, mark in ((half, begin), (half, end)):
            for _ in range(replays):
                graph.replay()
            mark.record()
        end.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    return float(begin.elapsed_time(end)) * 1e3 / (half * len(calls))


def _count_replays(graph: torch.cuda.CUDAGraph, seconds: float) -> int:
    """Return how often the CUDA graph can run in `seconds`, estimated from a few replays."""
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(3):
        graph.replay()
    end.record()
    end.synchronize()
    return max(1, round(seconds * 3e3 / float(begin.elapsed_time(end))))


def _make_weights(n: int, k: int) -> list[BF16Weight]:
    return [BF16Weight(_random_matrix(n, k)) for _ in range(max(MIN_COPIES, count_input_sets(2 * n * k)))]


def _random_matrix(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the report as one line of JSON")
    parser.add_argument("--variants", action="store_true", help="measure plans similar to the chosen ones")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.variants:
        measure_variants()
        return
    report = BenchReport("gpu-gemm")
    measure(report)
    if args.json:
        print(json.dumps(report.as_dict()), flush=True)
    else:
        report.print_and_save()


if __name__ == "__main__":
    main()
