"""`python -m emberline.bench.gpu.rank CONFIG --ranks 8`: measures one of a model's ranks alone, on one GPU.

The rank has random weights for its part of the model, in the formats of config.json. Its memory is compared with the
memory plan. Its decode steps are timed without collectives. The calls of collectives are recorded, and
bench/projection.py adds the time that they would take.

With --memory-gib, torch may use no more memory than a GPU of this size has. Drawing random quantised experts fragments
the memory. If they nearly fill it, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emberline.bench import report as reports
from emberline.bench import workload
from emberline.bench.gpu.job_run import SteadyPhase, run_job
from emberline.bench.gpu.limits import H200
from emberline.bench.gpu.model import RandomWeights
from emberline.core.engine_config import EngineConfig
from emberline.core.jsonfile import read_object
from emberline.engine import memory
from emberline.engine.gpu.boot import BootedGPUEngine, boot_gpu
from emberline.kernels import ops
from emberline.kernels.comm.lone_rank import LoneRank
from emberline.kernels.packed_weight import WeightLayout
from emberline.kernels.quantised_matrix import QuantisedMatrix
from emberline.models.config import ModelConfig
from emberline.models.config_outline import outline_of, read_outline, select_planned_text
from emberline.models.outline import divide_vocabulary
from emberline.models.pending_weights import allocate_like
from emberline.models.quantisation_config import WeightFormat
from emberline.models.quantised_plan import describe_quantised, split_experts
from emberline.models.shard import Shard
from emberline.models.weight_formats import QuantisedSize, read_weight_formats
from emberline.models.weights import StackSource

GIB = 1 << 30
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64
SETTINGS: dict[str, Any] = {"max_running": 64, "max_batch_tokens": 2048, "prefix_cache": False}
SCALE = 0.01  # of quantised weights


class RecordingRank(LoneRank):
    """A LoneRank (a rank without others) that records each collective call, with the shape of the tensor."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append(("all_reduce", tuple(x.shape)))
        return super().all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self.calls.append(("all_gather", tuple(x.shape)))
        return super().all_gather(x)

    def calls_of_step(self, rows: int, logits: int) -> list[dict[str, Any]]:
        """Return the collective calls of one recorded decode step whose batch has this many rows.

        `logits`: the number of logits per row on this rank. Each step ends with an all-gather of the logits, which
        separates the steps. A step with prompts may also compute logits of `rows` rows, but has few other calls with
        this number of rows, so the step with the most such calls is a decode step."""
        steps: list[Counter[tuple[str, tuple[int, ...]]]] = [Counter()]
        for call, shape in self.calls:
            if shape[0] == rows:
                steps[-1][call, shape] += 1
            if call == "all_gather" and shape[-1] == logits:
                steps.append(Counter())
        found = max(steps, key=Counter.total)
        assert found["all_gather", (rows, logits)] == 1, f"no step with {rows} rows"
        return [
            {"name": call, "elements": prod(shape), "count": count} for (call, shape), count in sorted(found.items())
        ]


class RankWeights(RandomWeights):
    """Random weights of one rank. If the experts are quantised, their codes are random numbers."""

    def __init__(
        self, device: str, shard: Shard, experts: WeightFormat | None, *, packed: bool = False, online: str = ""
    ) -> None:
        super().__init__(device, torch.bfloat16, packed=packed, online=online)
        self.recorder = RecordingRank(shard.rank, shard.world_size)
        self.shard, self.comm = shard, self.recorder
        self._expert_format = experts
        self.expert_bytes = 0  # bytes of experts, which `loaded_bytes` includes

    def load_experts(
        self,
        shape: tuple[int, int, int],
        sources: Sequence[StackSource],
        *,
        gated: bool = False,
        packable: bool = False,
        full_precision: bool = False,
    ) -> Tensor | ops.PackedExperts:
        before = self.loaded_bytes
        experts = self._load_experts(shape, sources, gated, packable, full_precision)
        self.expert_bytes += self.loaded_bytes - before
        return experts

    def _load_experts(
        self,
        shape: tuple[int, int, int],
        sources: Sequence[StackSource],
        gated: bool,
        packable: bool,
        full_precision: bool,
    ) -> Tensor | ops.PackedExperts:
        if self._expert_format is None or full_precision:
            return super().load_experts(shape, sources, gated=gated, packable=packable, full_precision=full_precision)
        count, n, k = shape
        described = split_experts(describe_quantised(self._expert_format, count * n, k), count)
        experts = ops.PackedExperts(count, n, k, WeightLayout.QUANTISED, described, described.nbytes, gated)
        kept = ops.count_quantised_bytes(self.device, described)
        self.quantised_sizes.append(QuantisedSize.from_matrix(described, count, kept))
        self.loaded_bytes += ops.fill_quantised_experts(experts, self._draw_codes(described))
        return experts

    def _draw_codes(self, described: QuantisedMatrix) -> QuantisedMatrix:
        drawn = allocate_like(described, self.device)
        drawn.codes.random_(0, 256, generator=self._generator)
        drawn.scales.fill_(SCALE)
        return drawn


def measure(
    report: reports.BenchReport, config: Mapping[str, Any], shard: Shard, settings: dict[str, Any], batches: list[int]
) -> None:
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    whole = ModelConfig.from_hf({**select_planned_text(plain), "quantization_config": None})
    formats = read_weight_formats(select_planned_text(config), read_outline(config))
    engine_config = EngineConfig.build("", **SETTINGS | settings).with_gpu_defaults()
    form = str(settings.get("weights"))
    online = form if form in ("fp8", "int4") else ""
    weights = RankWeights("cuda", shard, formats.get("routed experts"), packed=form == "packed", online=online)
    own = shard.shard_config(whole)
    booted = boot_gpu(own, weights, context=memory.choose_max_context(own, engine_config), settings=engine_config)
    torch.cuda.empty_cache()  # frees memory that drawing random weights used; loading from files does not use it
    planned = memory.weight_bytes(own, 2, packed=weights.packed, quantised=weights.quantised_sizes)
    report.add("weights_planned_gib", planned / GIB, "GiB")
    report.add("weights_gib", weights.loaded_bytes / GIB, "GiB")
    report.add("weights_error", 100 * abs(weights.loaded_bytes - planned) / planned, "%")
    report.add("kv_planned_gib", booted.plan.kv_bytes / GIB, "GiB")
    cache = booted.runner.cache
    report.add("kv_gib", (cache.keys.nbytes + cache.values.nbytes) / GIB, "GiB")
    vocab = outline_of(own).vocab
    for batch in batches:
        job = workload.make_job([(PROMPT_TOKENS, OUTPUT_TOKENS)] * batch, vocab)
        run_job(booted.engine, job)
        phases = [SteadyPhase.from_timeline(job, run_job(booted.engine, job).timeline) for _ in range(2)]
        limit = min_weights_ms(own, weights, batch)
        report.add(f"decode_b{batch}_ms", [1e3 * phase.step_seconds for phase in phases], "ms", limit=limit)
        gathered = divide_vocabulary(whole.vocab, shard.world_size)
        report.config.setdefault("collectives", {})[str(batch)] = weights.recorder.calls_of_step(batch, gathered)
    _add_memory(report, booted)


def min_weights_ms(config: ModelConfig, weights: RankWeights, batch: int) -> float:
    """Return the time to read the weights that a decode step of this rank needs, at the bandwidth of an H200.

    Only the experts count that are selected on average if every row selects its experts at random."""
    embedding = config.vocab_rows * config.hidden * torch.bfloat16.itemsize
    unused = 0.0
    if (experts := config.experts) is not None:
        unused = weights.expert_bytes * (1 - experts.chosen / experts.count) ** batch
    return 1e3 * (weights.loaded_bytes - embedding - unused) / H200.bandwidth


def _add_memory(report: reports.BenchReport, booted: BootedGPUEngine) -> None:
    free, total = torch.cuda.mem_get_info()
    planned, used = booted.plan.total - booted.plan.spare_bytes, total - free
    report.add("memory_planned_gib", planned / GIB, "GiB")
    report.add("memory_used_gib", used / GIB, "GiB")
    report.add("plan_error", 100 * abs(used - planned) / planned, "%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="config.json of the model")
    parser.add_argument("--ranks", type=int, required=True, help="ranks that divide the model")
    parser.add_argument("--ep", type=int, default=1, help="parts of the ranks that divide whole experts")
    parser.add_argument("--memory-gib", type=float, default=0.0, help="memory of the GPU to stand for (default: all)")
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument("--weights", default="auto", choices=("auto", "packed", "fp8", "int4"))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64])
    reports.add_report_arguments(parser)
    args = parser.parse_args()
    settings: dict[str, Any] = {"max_context": args.max_context, "weights": args.weights}
    if args.memory_gib:
        total = torch.cuda.mem_get_info()[1] / GIB
        settings["gpu_memory_utilization"] = memory.DEFAULT_UTILIZATION * args.memory_gib / total
        torch.cuda.set_per_process_memory_fraction(args.memory_gib / total)  # as on a GPU of this size
    described = {"config": args.config.name, "ranks": args.ranks, "expert_parts": args.ep, "settings": settings}
    report = reports.BenchReport("rank", described)
    measure(report, read_object(args.config), Shard(0, args.ranks, args.ep), settings, args.batches)
    report.print_and_save(args.json, args.commit)


if __name__ == "__main__":
    main()
