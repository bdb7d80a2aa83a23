"""measure_reads: how many bytes of a checkpoint the ranks of an engine read, and how fast."""

from __future__ import annotations

import time
from collections.abc import Sequence

from emberline.bench.report import BenchReport
from emberline.core.errors import UnsupportedModel
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.source import resolve_model
from emberline.kernels.comm.lone_rank import LoneRank
from emberline.models.config import ModelConfig
from emberline.models.shard import Shard
from emberline.models.tensor_names import ignorable_tensors, load_model
from emberline.models.weight_form import choose_weight_form
from emberline.models.weights import Weights

CONTEXT = 64  # tokens; the tables of rotary angles are not read


def measure_reads(report: BenchReport, model_name: str, rank_counts: Sequence[int]) -> None:
    """Load each rank's part of a model, one part after the other, in the same way as ranks on CPUs.

    For each number of ranks, add to the report the bytes that all ranks together read, divided by the size of the
    files. `read_bytes_ratio` is the largest of these ratios. Numbers of ranks that cannot divide the model are left
    out."""
    checkpoint = Checkpoint.open(resolve_model(model_name))
    stored, ratios = sum(info.nbytes for info in checkpoint.tensors.values()), dict[int, float]()
    for ranks in rank_counts:
        try:
            reads = [_load_rank(checkpoint, Shard(rank, ranks)) for rank in range(ranks)]
        except UnsupportedModel as e:
            report.config.setdefault("not_divided", {})[str(ranks)] = e.message
            continue
        ratios[ranks] = sum(read for read, _ in reads) / stored
        report.add(f"read_bytes_ratio_tp{ranks}", ratios[ranks], "x")
        report.add(f"read_mb_tp{ranks}", [read / 1e6 for read, _ in reads], "MB")
        report.add(f"load_rate_tp{ranks}", [read / seconds / 1e9 for read, seconds in reads], "GB/s")
    report.config["read_model"] = model_name
    if ratios:
        report.add("read_bytes_ratio", max(ratios.values()), "x")


def _load_rank(checkpoint: Checkpoint, shard: Shard) -> tuple[int, float]:
    """Return the bytes that a rank reads, and the seconds that it takes to load them."""
    began = time.perf_counter()
    form = choose_weight_form(checkpoint)
    weights = Weights(checkpoint, shard=shard, comm=LoneRank(shard.rank, shard.world_size), form=form)
    config = ModelConfig.from_checkpoint(checkpoint)
    load_model(shard.shard_config(config), weights, CONTEXT)
    weights.finish(ignorable_tensors(config))
    return weights.read_bytes, time.perf_counter() - began
