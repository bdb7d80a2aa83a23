"""count_distinct_experts: counts how many experts of each layer a decode step reads.

tie_router_scores: makes all rows of a batch select the same experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean

from torch import Tensor

from emberline.engine.gpu.runner import GPURunner
from emberline.kernels.cuda import few_experts, routing
from emberline.kernels.cuda.expert_matrices import ExpertMatrices
from emberline.kernels.cuda.few_experts import GateUpPlan, multiply_gate_up
from emberline.kernels.cuda.routing import route_rows
from emberline.kernels.mixture import Mixture, Routing, select_experts
from emberline.kernels.packed_weight import WeightLayout
from emberline.kernels.triton import routing as triton_routing
from emberline.kernels.triton.routing import SortedRows
from emberline.kernels.triton.routing import route_rows as route_small
from emberline.models.decoder import DecoderModel
from emberline.models.sleep import iter_instances


def count_distinct_experts(runner: GPURunner, run: Callable[[], object], batch: int) -> float:
    """Call `run`, and return how many distinct experts a layer's rows select on average in steps of `batch` rows.

    The steps run without CUDA graphs, so that each layer can be observed.
    """
    graphs, runner.graphs = runner.graphs, False
    try:
        with _recorded_counts(batch) as counts:
            run()
    finally:
        runner.graphs = graphs
    return mean(counts) if counts else 0.0


def tie_router_scores(model: DecoderModel) -> None:
    """Fill the router of each layer with zeros, so that all rows select the same experts."""
    for mixture in iter_instances(Mixture, model.layers):
        assert mixture.router.layout is WeightLayout.ROWS, "packed weights of zeros are not all zeros"
        mixture.router.data.zero_()


@contextmanager
def _recorded_counts(batch: int) -> Iterator[list[int]]:
    """Record how many experts each call of an expert-selecting kernel selects, in steps of `batch` rows."""
    counts: list[int] = []

    def record(logits: Tensor, rules: Routing) -> None:
        if len(logits) == batch:
            on_host = replace(rules, correction=None if rules.correction is None else rules.correction.cpu())
            counts.append(len(select_experts(logits.cpu(), on_host)[1].unique()))

    def route_and_count(logits: Tensor, rules: Routing, tile_rows: int, *, pdl: bool = True) -> SortedRows:
        record(logits, rules)
        return route_rows(logits, rules, tile_rows, pdl=pdl)

    def multiply_and_count(
        x: Tensor, logits: Tensor, rules: Routing, weight: ExpertMatrices, plan: GateUpPlan, *, pdl: bool = True
    ) -> Tensor:
        record(logits, rules)
        return multiply_gate_up(x, logits, rules, weight, plan, pdl=pdl)

    def route_small_and_count(logits: Tensor, rules: Routing, tile_rows: int, *, pdl: bool = True) -> SortedRows:
        record(logits, rules)
        return route_small(logits, rules, tile_rows, pdl=pdl)

    routing.route_rows, few_experts.multiply_gate_up = route_and_count, multiply_and_count
    triton_routing.route_rows = route_small_and_count
    try:
        yield counts
    finally:
        routing.route_rows, few_experts.multiply_gate_up = route_rows, multiply_gate_up
        triton_routing.route_rows = route_small
