"""count_distinct_experts: how many different experts of a layer a decode step reads; tie_router_scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean

import torch

from emberline.engine.gpu.runner import GPURunner
from emberline.kernels.mixture import Mixture, Routing
from emberline.kernels.packed_weight import WeightLayout
from emberline.kernels.triton import routing as routing_kernels
from emberline.kernels.triton.routing import SortedRows, route_rows
from emberline.models.decoder import DecoderModel
from emberline.models.sleep import iter_instances


def count_distinct_experts(runner: GPURunner, run: Callable[[], object], batch: int) -> float:
    """Return the mean number of distinct experts of a layer in steps of `batch` rows, while `run` runs.

    Steps run without captured graphs meanwhile, so that each layer can be observed.
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
    counts: list[int] = []

    def route_and_count(logits: torch.Tensor, routing: Routing, tile_rows: int, *, pdl: bool = False) -> SortedRows:
        rows = route_rows(logits, routing, tile_rows, pdl=pdl)
        if len(logits) == batch:
            counts.append(len(rows.chosen.unique()))
        return rows

    routing_kernels.route_rows = route_and_count
    try:
        yield counts
    finally:
        routing_kernels.route_rows = route_rows
