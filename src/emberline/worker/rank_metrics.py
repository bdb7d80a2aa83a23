"""Metrics of the ranks among which a model is divided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from emberline.core.events import ExpertStats
from emberline.engine.rank_summary import RankSummary
from emberline.server.metrics import MetricFamily


def build_rank_metrics(model_labels: str, ranks: Sequence[RankSummary]) -> Iterator[MetricFamily]:
    """Yield metrics of the size of each rank's part of the model. `model_labels`: the model's label in each sample."""
    labels = [
        f'{model_labels},rank="{each.rank}",stage="{each.stage}",tensor_rank="{each.tensor_rank}"' for each in ranks
    ]
    for name, help_text, values in (
        ("layers", "Layers of the model that a rank has a part of.", [each.layers for each in ranks]),
        ("weight_bytes", "Memory of a rank's part of the weights.", [each.weight_bytes for each in ranks]),
        ("cost_share", "Share of a step's measured time that a rank's stage takes.", [x.cost_share for x in ranks]),
        ("kv_bytes", "Memory of a rank's part of the KV cache.", [each.kv_bytes for each in ranks]),
    ):
        samples = list(zip(labels, values, strict=True))
        yield MetricFamily.from_samples(f"emberline:rank_{name}", help_text, "gauge", samples)


def build_expert_metrics(model_labels: str, stats: ExpertStats) -> Iterator[MetricFamily]:
    """Yield metrics that show how evenly the work of experts is spread over the ranks."""
    yield MetricFamily.from_samples(
        "emberline:rank_expert_rows_total",
        "Pairs of a token and one of its experts that a rank computed, in all layers.",
        "counter",
        [(f'{model_labels},rank="{rank}"', rows) for rank, rows in enumerate(stats.rows)],
    )
    yield MetricFamily.from_samples(
        "emberline:expert_imbalance",
        "Recent rows of the busiest rank of each layer, divided by the mean of all ranks. 1: ranks have equal load.",
        "gauge",
        [(model_labels, stats.imbalance)],
    )
    yield MetricFamily.from_samples(
        "emberline:experts_moved_total",
        "Experts that ranks loaded because the load had changed.",
        "counter",
        [(model_labels, stats.moved)],
    )
