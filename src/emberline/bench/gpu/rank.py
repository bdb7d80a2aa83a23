"""`python -m emberline.bench.gpu.rank CONFIG --ranks 8`: one rank of a model on several GPUs, measured on one GPU.

The rank has random weights of its part of the model, in the formats of config.json. Its memory is compared with the
plan, and its decode steps are timed without collectives.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emberline.bench import report as reports
from emberline.bench import workload
from emberline.bench.gpu.engine import SteadyPhase, run_job
from emberline.bench.gpu.model import GPURandomWeights
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
from emberline.models.narrow_plan import describe_quantised, split_experts
from emberline.models.narrow_weights import allocate_like
from emberline.models.quantisation_config import WeightFormat
from emberline.models.shard import Shard
from emberline.models.weight_formats import NarrowSize, read_weight_formats
from emberline.models.weights import StackPart

GIB = 1 << 30
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64
SETTINGS: dict[str, Any] = {"max_running": 64, "max_batch_tokens": 2048, "prefix_cache": False}
SCALE = 0.01  # of quantised weights


class RankWeights(GPURandomWeights):
    """Random weights of one rank. Experts may be quantised; their codes are drawn, and not computed from floats."""

    def __init__(self, device: str, shard: Shard, experts: WeightFormat | None, *, packed: bool = False) -> None:
        super().__init__(device, torch.bfloat16, packed=packed)
        self.shard, self.comm = shard, LoneRank(shard.rank, shard.world_size)
        self._expert_format = experts

    def load_experts(
        self,
        shape: tuple[int, int, int],
        parts: Sequence[StackPart],
        *,
        gated: bool = False,
        packable: bool = False,
        full_precision: bool = False,
    ) -> Tensor | ops.PackedExperts:
        if self._expert_format is None or full_precision:
            return super().load_experts(shape, parts, gated=gated, packable=packable, full_precision=full_precision)
        count, n, k = shape
        described = split_experts(describe_quantised(self._expert_format, count * n, k), count)
        experts = ops.PackedExperts(count, n, k, WeightLayout.QUANTISED, described, described.nbytes, gated)
        self.narrow_sizes.append(NarrowSize(n, k, count, ops.count_quantised_bytes(self.device, described)))
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
    weights = RankWeights("cuda", shard, formats.get("routed experts"), packed=settings.get("weights") == "packed")
    own = shard.shard_config(whole)
    booted = boot_gpu(own, weights, context=memory.choose_max_context(own, engine_config), settings=engine_config)
    planned = memory.weight_bytes(own, 2, packed=weights.packed, narrow=weights.narrow_sizes)
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
        report.add(f"decode_b{batch}_ms", [1e3 * phase.step_seconds for phase in phases], "ms")
    _add_memory(report, booted)


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
    parser.add_argument("--memory-gib", type=float, default=0.0, help="memory to plan for (default: all of this GPU)")
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument("--weights", default="auto", choices=("auto", "packed"))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64])
    reports.add_report_arguments(parser)
    args = parser.parse_args()
    settings: dict[str, Any] = {"max_context": args.max_context, "weights": args.weights}
    if args.memory_gib:
        total = torch.cuda.mem_get_info()[1] / GIB
        settings["gpu_memory_utilization"] = memory.DEFAULT_UTILIZATION * args.memory_gib / total
    described = {"config": args.config.name, "ranks": args.ranks, "expert_parts": args.ep, "settings": settings}
    report = reports.BenchReport("rank", described)
    measure(report, read_object(args.config), Shard(0, args.ranks, args.ep), settings, args.batches)
    report.print_and_save(args.json, args.commit)


if __name__ == "__main__":
    main()
