"""Measures products with 4-bit weights: dense ones of Llama 8B, and layers of experts of gpt-oss-20b and Kimi K2.5."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from emberline.bench.gpu.timing import count_input_sets, time_graph_replay
from emberline.bench.report import BenchReport
from emberline.core.cpus import core_count
from emberline.kernels.cuda import narrow, narrow_experts, narrow_wide
from emberline.kernels.cuda.driver import CudaModule
from emberline.kernels.cuda.narrow import FourBitPlan
from emberline.kernels.cuda.narrow_layout import FourBitWeight, pack
from emberline.kernels.cuda.narrow_wide import WideFourBitPlan
from emberline.kernels.cuda.routing import route_rows
from emberline.kernels.mixture import ClampedSwiGLU, Routing
from emberline.kernels.quantised_matrix import CodeKind, QuantisedMatrix
from emberline.kernels.triton.grouped import add_expert_outputs
from emberline.kernels.triton.routing import SortedRows

BYTES_PER_US = 4.39e6  # of a reduction on an H200
DENSE_SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
DENSE_ROWS = (1, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    kind: CodeKind
    group: int  # columns that share a scale
    hidden: int
    width: int
    experts: int
    per_row: int
    biased: bool
    batches: tuple[int, ...]
    vllm_us: tuple[float, ...] = ()  # vLLM 0.26 for these batches


EXPERT_SHAPES = {
    "gpt-oss-20b": ExpertShape("mxfp4", 32, 2880, 2880, 32, 4, True, (1, 8, 32, 64, 256)),
    # The share of one of eight GPUs, which divide every expert.
    "kimi-k2.5-tp8": ExpertShape("int4", 32, 7168, 256, 384, 8, False, (1, 8, 64), (41.0, 111.0, 467.0)),
}


def draw_matrix(
    kind: CodeKind, n: int, k: int, group: int, experts: int = 0, *, device: str | torch.device = "cuda"
) -> QuantisedMatrix:
    """Return a quantised matrix with random codes, or one matrix for each expert if `experts` is not 0."""
    lead = (experts,) if experts else ()
    codes = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8, device=device)
    shape = (*lead, n, k // group)
    if kind == "mxfp4":
        return QuantisedMatrix(kind, codes, torch.randint(117, 120, shape, dtype=torch.uint8, device=device), 1, group)
    scales = (torch.rand(shape, device=device) + 0.5).mul_(0.2 * k**-0.5).bfloat16()
    return QuantisedMatrix(kind, codes, scales, 1, group)


def measure(report: BenchReport) -> None:
    torch.manual_seed(0)
    for name, (n, k) in DENSE_SHAPES.items():
        weights = _make_weights(n, k, gated=name == "gate_up")
        for m in DENSE_ROWS:
            us = time_graph_replay(_make_dense_calls(weights, m))
            _add(report, f"int4 {name} m={m}", us, weights[0].nbytes)
    for name, shape in EXPERT_SHAPES.items():
        layer = ExpertLayerBench(shape)
        for i, batch in enumerate(shape.batches):
            us = time_graph_replay(layer.make_calls(batch))
            peer = shape.vllm_us[i] if shape.vllm_us else None
            _add(report, f"{name} experts b{batch}", us, layer.count_bytes(batch), peer)


def _add(report: BenchReport, name: str, us: float, weight_bytes: int, peer: float | None = None) -> None:
    limit = weight_bytes / BYTES_PER_US
    report.add(name, us, "us", limit=limit, peer=peer)
    print(f"{name}: {us:.2f} us, limit {limit:.2f}, {100 * limit / us:.0f} % of bandwidth", flush=True)


def _make_weights(n: int, k: int, *, gated: bool) -> list[FourBitWeight]:
    count = count_input_sets(n * k // 2)
    return [_pack(draw_matrix("int4", n, k, 128), gated=gated) for _ in range(count)]


def _pack(matrix: QuantisedMatrix, *, gated: bool = False) -> FourBitWeight:
    packed = pack(matrix, gated=gated)
    assert packed is not None, "random scales fit into float16"
    return packed


def _make_dense_calls(
    weights: list[FourBitWeight], m: int, *, plan: FourBitPlan | WideFourBitPlan | None = None
) -> list[Callable[[], object]]:
    x, n, gated = _draw_inputs(m, weights[0].k), weights[0].n, weights[0].gated
    out = torch.empty(m, n // 2 if gated else n, device="cuda", dtype=torch.bfloat16)
    is_wide = narrow_wide.supports(m, weights[0]) if plan is None else isinstance(plan, WideFourBitPlan)
    kernel: Any = narrow_wide.linear if is_wide else narrow.linear
    return [partial(kernel, x, weight, out=out, gated=gated, plan=plan) for weight in weights]


def _draw_inputs(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda").bfloat16()


class ExpertLayerBench:
    """A layer's experts with random weights. Rows select experts in turn, so that all are used equally often."""

    def __init__(self, shape: ExpertShape) -> None:
        self.shape = shape
        kind, group, hidden, width, count = shape.kind, shape.group, shape.hidden, shape.width, shape.experts
        self.gate_up = _pack(draw_matrix(kind, 2 * width, hidden, group, count), gated=True)
        self.down = _pack(draw_matrix(kind, hidden, width, group, count))
        self._biases = (
            [torch.randn(count, n, device="cuda") for n in (2 * width, hidden)] if shape.biased else [None] * 2
        )
        self._clamp = ClampedSwiGLU(1.702, 7.0) if shape.biased else None
        self._routing = Routing(shape.per_row, renormalize=True)

    def count_experts(self, batch: int) -> int:
        return min(self.shape.experts, batch * self.shape.per_row)

    def count_bytes(self, batch: int) -> int:
        """Return the bytes of all experts that a batch of this many rows selects."""
        return (self.gate_up.data[0].nbytes + self.down.data[0].nbytes) * self.count_experts(batch)

    def make_logits(self, batch: int) -> list[Tensor]:
        """Return router logits for several batches. Each batch selects other experts, until all have been selected."""
        shape = self.shape
        sets = -(-shape.experts // self.count_experts(batch))
        expert = torch.arange(sets * batch * shape.per_row, device="cuda") % shape.experts
        logits = torch.randn(sets * batch, shape.experts, device="cuda")
        return list(logits.scatter_add_(1, expert.view(-1, shape.per_row), torch.full_like(logits, 20.0)).split(batch))

    def make_calls(self, batch: int) -> list[Callable[[], object]]:
        x = _draw_inputs(batch, self.shape.hidden)
        return [partial(self._run, x, logits) for logits in self.make_logits(batch)]

    def choose_kernels(self, batch: int) -> Any:
        matrices = self.gate_up, self.down
        return narrow_experts.choose_kernels(batch * self.shape.per_row, self.shape.experts, matrices)

    def _run(self, x: Tensor, logits: Tensor) -> None:
        kernels = self.choose_kernels(len(x))
        tile_rows = kernels.choose_tile_rows(len(x) * self.shape.per_row, self.shape.experts)
        rows = route_rows(logits, self._routing, tile_rows)
        inner = self.multiply_gate_up(kernels, x, rows)
        add_expert_outputs(x, self.multiply_down(kernels, inner, rows), self.shape.per_row, pdl=True)

    def multiply_gate_up(self, kernels: Any, x: Tensor, rows: SortedRows, plan: Any = None) -> Tensor:
        product: Tensor = kernels.multiply_gate_up(
            x, self.gate_up, rows, bias=self._biases[0], clamp=self._clamp, plan=plan
        )
        return product

    def multiply_down(self, kernels: Any, inner: Tensor, rows: SortedRows, plan: Any = None) -> Tensor:
        product: Tensor = kernels.multiply_down(inner, self.down, rows, bias=self._biases[1], plan=plan)
        return product


def _list_plans(x_rows: int, row_tiles: int, w: FourBitWeight) -> list[FourBitPlan | WideFourBitPlan]:
    """Return the plan that the engine chooses, and others to measure. x has `row_tiles` tiles of `x_rows` rows."""
    rule = narrow.choose_plan(x_rows, row_tiles, w.n, w.units, w.unit_bytes)
    plans: list[FourBitPlan | WideFourBitPlan] = [rule]
    for (blocks, tiles, warps), parts, ctas in product(narrow.TILE_SIZES, (1, 2, 4, 8, 16), (1, 2, 3, 4)):
        too_many = ctas * warps > narrow.MAX_WARPS_PER_SM or parts > warps or ctas * warps < 8
        if tiles != rule.tiles or too_many or (warps == narrow.MANY_WARPS and parts < 8 and rule.parts > 2):
            continue
        plan = narrow.make_plan(blocks, tiles, warps, parts, x_rows, w.unit_bytes, ctas)
        if plan.ctas_per_sm == ctas and plan not in plans:
            plans.append(plan)
    return plans


def _list_wide_plans(m: int, experts: int, w: FourBitWeight) -> list[FourBitPlan | WideFourBitPlan]:
    rule = narrow_wide.choose_plan(m, experts, w.n, w.units, w.unit_bytes)
    parts = [parts for parts in narrow_wide.PARTS if parts <= w.units]
    others = product(narrow_wide.GROUPS[rule.columns], parts)
    return [rule, *(narrow_wide.make_plan(groups, rule.columns, parts, w.unit_bytes) for groups, parts in others)]


def sweep_plans() -> None:
    """Print the time of several plans for dense products and for both products of experts."""
    _compile_kernels()
    for name, (n, k) in DENSE_SHAPES.items():
        weights = _make_weights(n, k, gated=name == "gate_up")
        for m in (1, 8, 16, 32, 64):
            w = weights[0]
            plans = _list_plans(m, 1, w) if m <= narrow.MAX_TILE_ROWS else []
            plans += _list_wide_plans(m, 1, w) if m > narrow_wide.COLUMNS[0] // 4 else []
            times = [(time_graph_replay(_make_dense_calls(weights, m, plan=plan), replays=3), plan) for plan in plans]
            _print_best(f"{name} m={m}", times, w.nbytes)
    for name, shape in EXPERT_SHAPES.items():
        layer = ExpertLayerBench(shape)
        for batch in shape.batches:
            _sweep_experts(f"{name} b{batch}", layer, batch)


def _compile_kernels() -> None:
    """Compile the kernels of all plans in parallel. The results are cached on disk."""
    formats = ("Int4<1, false>", "Int4<4, false>", "Float4<4>")
    names = [
        (narrow.FILE, FourBitPlan(*size, 1, 1, 1, 1).kernel_name(name))
        for name, size in product(formats, narrow.TILE_SIZES)
    ]
    names += [
        (narrow_wide.FILE, WideFourBitPlan(groups, columns, 1, 1).kernel_name(name))
        for name in formats
        for columns, counts in narrow_wide.GROUPS.items()
        for groups in counts
    ]
    with ThreadPoolExecutor(core_count()) as pool:
        list(pool.map(lambda pair: CudaModule(pair[0], [pair[1]]).compile(), names))


def _sweep_experts(name: str, layer: ExpertLayerBench, batch: int) -> None:
    shape, inputs, kernels = layer.shape, layer.make_logits(batch), layer.choose_kernels(batch)
    tile_rows = kernels.choose_tile_rows(batch * shape.per_row, shape.experts)
    sorted_rows = [route_rows(logits, Routing(shape.per_row), tile_rows) for logits in inputs]
    is_wide = kernels is narrow_wide
    places = len(sorted_rows[0].order) if is_wide else batch * shape.per_row
    x, inner = _draw_inputs(batch, shape.hidden), _draw_inputs(places, shape.width)
    for half, w, multiply in (
        ("gate_up", layer.gate_up, partial(layer.multiply_gate_up, kernels, x)),
        ("down", layer.down, partial(layer.multiply_down, kernels, inner)),
    ):
        tiles = sorted_rows[0].max_tiles
        plans = _list_wide_plans(tile_rows, shape.experts, w) if is_wide else _list_plans(tile_rows, tiles, w)
        times = [
            (time_graph_replay([partial(multiply, rows, plan) for rows in sorted_rows], replays=3), plan)
            for plan in plans
        ]
        _print_best(f"{name} {half} rows={tile_rows}", times, w.data[0].nbytes * layer.count_experts(batch))


def _print_best(name: str, times: list[tuple[float, FourBitPlan | WideFourBitPlan]], weight_bytes: int) -> None:
    limit = weight_bytes / BYTES_PER_US

    def describe(us: float, plan: FourBitPlan | WideFourBitPlan) -> str:
        if isinstance(plan, FourBitPlan):
            first = f"blocks {plan.blocks} warps {plan.warps} x {plan.ctas_per_sm} buffers {plan.buffers}"
        else:
            first = f"wide, groups {plan.groups}"
        return f"{us:.2f} ({first} parts {plan.parts} stages {plan.stages}, {100 * limit / us:.0f} %)"

    best = sorted(times, key=lambda pair: pair[0])[:4]
    print(f"{name}: rule {describe(*times[0])}, best {', '.join(describe(*pair) for pair in best)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="measure many plans instead of the chosen ones")
    if parser.parse_args().sweep:
        sweep_plans()
        return
    report = BenchReport("gpu-narrow")
    measure(report)
    report.print_and_save()


if __name__ == "__main__":
    main()
