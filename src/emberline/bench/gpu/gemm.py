"""The linear layers of Llama 3.1 8B for 256 to 8,192 rows beside cuBLAS, with what follows each in a model: in a short
burst, and for so long that the card is at its power limit.
`python -m emberline.bench.gpu.gemm [--json | --variants]`."""

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

from emberline.bench.gpu.timing import copies_for, replay
from emberline.bench.report import Report
from emberline.kernels.cuda import gemm
from emberline.kernels.cuda.linear import Weight
from emberline.kernels.tiles import GATED_ROWS
from emberline.kernels.triton import activation

FLOPS = 758e12  # of a dense bf16 product on an H200
SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}  # k, n
ADDED, GATED = ("o", "down"), "gate_up"
ROWS = (256, 512, 1024, 2048, 4096, 8192)
COPIES = 4  # of the weights, at least
MANY, SECONDS, FEW_SECONDS = 2048, 0.8, 0.3  # rows from which on a load is kept up longer; for how long, and else
REST = 0.05  # seconds before a burst
VARIANTS_SECONDS = 28.0

Call = Callable[[], object]


def measure(report: Report) -> None:
    """Bursts are in microseconds, the rest in TFLOP/s."""
    for name, (k, n) in SHAPES.items():
        weights = _weights(n, k)
        for m in ROWS:
            ours, theirs = [_ours(name, weights, m)], [_cublas(name, weights, m)]
            flop = 2.0 * m * n * k
            bursts = [_burst(calls) for calls in ours + theirs]
            rates = [flop / _sustained(calls, SECONDS if m >= MANY else FEW_SECONDS) / 1e6 for calls in ours + theirs]
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


def variants() -> None:
    """Plans around the chosen one: TFLOP/s in a burst, then sustained. Stops when the time is up."""
    end = time.monotonic() + VARIANTS_SECONDS
    for name, m in ((GATED, 8192), ("down", 8192), (GATED, 2048), ("qkv", 2048), ("o", 1024), (GATED, 512)):
        k, n = SHAPES[name]
        weights, flop = _weights(n, k), 2.0 * m * n * k
        for plan in dict.fromkeys(_plans(m, n, k)):
            if time.monotonic() > end:
                return
            calls = _ours(name, weights, m, plan)
            burst, load = flop / _burst(calls) / 1e6, flop / _sustained(calls, 0.4) / 1e6
            print(f"{name} m={m} {_text(plan)}: burst {burst:.0f}, sustained {load:.0f} TFLOP/s", flush=True)
        del weights
        torch.cuda.empty_cache()


def _plans(m: int, n: int, k: int) -> Iterator[gemm.Plan]:
    rule = gemm.choose(m, n, k)
    yield rule
    yield from (replace(rule, lag=lag) for lag in (0, 2))
    yield from (replace(rule, band=band) for band in (4, 16))
    yield from gemm.PLANS


def _text(plan: gemm.Plan) -> str:
    return f"{plan.width}x{plan.ctas} band {plan.band} lag {plan.lag}"


def _ours(name: str, weights: list[Weight], m: int, plan: gemm.Plan | None = None) -> list[Call]:
    """Where the product is added to what is there, it grows; never by much."""
    x, n = _random(m, weights[0].k), weights[0].n
    gated = name == GATED
    out = _random(m, n // 2 if gated else n)
    residual = out if name in ADDED else None

    def call(weight: Weight) -> Call:
        return lambda: gemm.linear(x, weight, out=out, residual=residual, gated=gated, plan=plan)

    return [call(weight) for weight in weights]


def _cublas(name: str, weights: list[Weight], m: int) -> list[Call]:
    x, n = _random(m, weights[0].k), weights[0].n
    out = _random(m, n // 2 if name == GATED else n)

    def call(w: Tensor) -> Call:
        if name == GATED:
            return lambda: activation.silu_mul(F.linear(x, w), out, GATED_ROWS, pdl=True)
        return (lambda: out.addmm_(x, w.t())) if name in ADDED else (lambda: torch.mm(x, w.t(), out=out))

    return [call(weight.data) for weight in weights]


def _burst(calls: list[Call]) -> float:
    """Microseconds of a call, on a card that has rested."""
    torch.cuda.synchronize()
    time.sleep(REST)
    return replay(calls, replays=3)


def _sustained(calls: list[Call], seconds: float) -> float:
    """Microseconds of a call in the second half of so many seconds of nothing else."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        half = _rounds(graph, seconds / 2)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for replays, mark in ((half, begin), (half, end)):
            for _ in range(replays):
                graph.replay()
            mark.record()
        end.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    return float(begin.elapsed_time(end)) * 1e3 / (half * len(calls))


def _rounds(graph: torch.cuda.CUDAGraph, seconds: float) -> int:
    """How often a graph runs in so many seconds, from a few of its replays."""
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(3):
        graph.replay()
    end.record()
    end.synchronize()
    return max(1, round(seconds * 3e3 / float(begin.elapsed_time(end))))


def _weights(n: int, k: int) -> list[Weight]:
    return [Weight(_random(n, k)) for _ in range(max(COPIES, copies_for(2 * n * k)))]


def _random(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the report's last line, for machines")
    parser.add_argument("--variants", action="store_true", help="plans beside the chosen ones")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.variants:
        variants()
        return
    report = Report("gpu-gemm")
    measure(report)
    if args.json:
        print(json.dumps(report.as_dict()), flush=True)
    else:
        report.emit()


if __name__ == "__main__":
    main()
