"""plan_rank_sharing: how models whose ranks share GPUs divide the memory, before anything is loaded.

Each GPU has a rank of every model. All ranks are planned with the memory of the GPU that has the least, and the size of
a model is that of its largest rank. So what fits by this plan fits on every GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.engine import memory
from emberline.engine.gpu.swap import equal_kv_share, usable_model_bytes
from emberline.engine.host_memory import check_sleeping_models
from emberline.engine.memory_plan import MemoryPlan
from emberline.engine.quantised_estimate import estimate_rank_quantised_sizes
from emberline.engine.ranks.control import GPUMemoryBudget, MeasuredGPU
from emberline.engine.ranks.device_boot import DeviceDivision
from emberline.engine.ranks.device_rank_model import max_message_bytes
from emberline.engine.stage_memory import plan_stage_memory
from emberline.hub.checkpoint import Checkpoint
from emberline.kernels.comm.ipc import count_buffer_bytes
from emberline.models.weight_dtype import DTYPE_BYTES, choose_weight_dtype
from emberline.models.weight_formats import QuantisedSize


@dataclass(frozen=True, slots=True)
class RankSharingPlan:
    model_bytes: Mapping[str, int]  # by model: what it takes on the GPU where it takes the most, while it is awake
    memory: Mapping[str, GPUMemoryBudget]  # by model: the memory of a GPU that its ranks plan with
    usable_bytes: int  # bytes of each GPU that all models that are awake may use together


def check_shareable(configs: Mapping[str, EngineConfig]) -> None:
    """Raise InvalidRequest if these models cannot share GPUs, or one of them cannot sleep."""
    first, of_first = next(iter(configs.items()))
    for name, config in configs.items():
        parallel = config.parallel
        if config.speculation.uses_draft_model:
            message = f"speculate of {name!r} is {config.speculation.speculate}, but models that sleep or share GPUs"
            hint = "serve it alone, and without --can-sleep"
            raise InvalidRequest(f"{message} cannot have draft models", param="speculate", hint=hint)
        for setting, value, default in (("nodes", parallel.nodes, 1), ("launcher", parallel.launcher, "processes")):
            if value != default:
                message = (
                    f"{setting} is {value}, but models that share GPUs or sleep must have all ranks on one machine"
                )
                raise InvalidRequest(
                    message, param=setting, hint=f"drop --{setting}, or serve one model that stays awake"
                )
        for setting, noun in (("num_ranks", "ranks (tp x pp)"), ("ranks_per_gpu", "ranks on each GPU")):
            ours, theirs = getattr(of_first.parallel, setting), getattr(parallel, setting)
            if ours != theirs:
                message = f"model {first!r} has {ours} {noun} and model {name!r} has {theirs}"
                hint = "set --tp and --pp so that their product is the same for all models"
                raise InvalidRequest(f"{message}; models that share GPUs need equal numbers", param="tp", hint=hint)


def plan_rank_sharing(
    divisions: Mapping[str, DeviceDivision],
    gpus: Sequence[MeasuredGPU],
    free_host_bytes: int,
    *,
    can_sleep: bool = False,
) -> RankSharingPlan:
    """Plan the memory of models that share these GPUs, on a host with `free_host_bytes`.

    `can_sleep`: whether a message can put models to sleep even if all fit. Raises ModelError if they do not fit."""
    models = {name: PlannedDivision(division, gpus[0].kernels) for name, division in divisions.items()}
    utilization = min(division.config.gpu.gpu_memory_utilization for division in divisions.values())
    buffers = sum(each.buffer_bytes for each in models.values())
    gpu = find_smallest_gpu(gpus, utilization, buffers + (len(models) - 1) * memory.RESERVE_BYTES)
    shared = dict.fromkeys(models, gpu)
    plans = {name: each.plan_stages(gpu) for name, each in models.items()}
    usable = usable_model_bytes(gpu.total_bytes, utilization, gpu.other_bytes)
    if all(division.config.kv_cache.kv_memory is None for division in divisions.values()):
        part = equal_kv_share(plans.values(), usable)
        if part is not None:
            shared = {
                name: GPUMemoryBudget(gpu.total_bytes, gpu.other_bytes, round_kv_share(part, plans[name]))
                for name in models
            }
            plans = {name: each.plan_stages(shared[name]) for name, each in models.items()}
    sizes = {name: count_model_bytes(stages) for name, stages in plans.items()}
    weights = {name: divisions[name].layout.tp * sum(plan.weights for plan in stages) for name, stages in plans.items()}
    kv_host_bytes = sum(division.config.tiers.kv_host_memory for division in divisions.values())
    sleeps = can_sleep or sum(sizes.values()) > usable
    check_sleeping_models(weights, kv_host_bytes, free_host_bytes, sleeps=sleeps)
    return RankSharingPlan(sizes, shared, usable)


def find_smallest_gpu(gpus: Sequence[MeasuredGPU], utilization: float, kept_bytes: int) -> GPUMemoryBudget:
    """Return the memory of the GPU with the least room. `kept_bytes`: bytes that models keep there while asleep."""
    usable, total = min(
        (memory.usable_bytes(gpu.total_bytes, utilization, gpu.other_bytes), gpu.total_bytes) for gpu in gpus
    )
    return GPUMemoryBudget(total, total - usable + kept_bytes)


def round_kv_share(share: int, plans: Sequence[MemoryPlan]) -> int:
    """Return a value of the setting kv_memory with which no rank's KV cache exceeds `share` bytes."""
    blocks = {plan.kv_bytes // plan.kv_blocks for plan in plans}
    is_exact = len(blocks) == 1 and not any(plan.state_slots for plan in plans)
    return share // max(blocks) * max(blocks) if is_exact else share - max(blocks)


def count_model_bytes(plans: Sequence[MemoryPlan]) -> int:
    """Return the bytes of a model's largest rank. All ranks have the same number of KV blocks, which fits on each."""
    num_blocks = min(plan.kv_blocks for plan in plans)
    return max(plan.fixed_bytes - plan.reserve + num_blocks * (plan.kv_bytes // plan.kv_blocks) for plan in plans)


class PlannedDivision:
    """Plans the memory of a model's ranks before it is loaded.

    Only the first rank of each stage is planned. It has the largest part of the vocabulary, so no other rank of the
    stage needs more memory."""

    def __init__(self, division: DeviceDivision, kernels: str = "") -> None:
        """`kernels`: those that the GPUs use, hopper or portable; empty: not known."""
        self._division, self._kernels, settings = division, kernels, division.config
        self._checkpoint = Checkpoint.open(Path(settings.model))
        self._dtype = choose_weight_dtype(self._checkpoint, settings.dtype, on_gpu=True)
        self._packed = memory.uses_packed_weights(self._checkpoint, settings, self._dtype, division.model)
        self._context = memory.choose_max_context(division.model, settings)
        layout, model = division.layout, division.model
        self._shard = layout.shard(0)
        self._rank_config = self._shard.shard_config(model)
        self._stages = [layout.stage(rank, model) for rank in range(0, layout.num_ranks, layout.tp)]

    @cached_property
    def _quantised_sizes(self) -> list[list[QuantisedSize]]:
        args = self._checkpoint, self._division.model, self._division.config, self._dtype, self._shard
        return [estimate_rank_quantised_sizes(*args, stage) for stage in self._stages]

    @property
    def buffer_bytes(self) -> int:
        """The bytes of a GPU's buffers for collectives, which stay allocated while the model sleeps."""
        layout, settings = self._division.layout, self._division.config
        shards = count_buffer_bytes() if layout.tp > 1 else 0
        if layout.pp == 1:
            return shards
        message = max_message_bytes(self._rank_config, settings, DTYPE_BYTES[self._dtype])
        return shards + count_buffer_bytes(message, num_senders=1)

    def plan_stages(self, shared: GPUMemoryBudget) -> list[MemoryPlan]:
        """Return a plan for each stage: that of its first rank. Raises ModelError if a rank does not fit."""
        settings = self._division.config.with_settings(kv_memory=shared.kv_memory)
        device_memory = shared.total_bytes, shared.other_bytes
        return [
            plan_stage_memory(
                *(self._rank_config, stage, settings, self._context, device_memory, self._dtype),
                packed=self._packed,
                quantised=quantised,
                kernels=self._kernels,
            )[0]
            for stage, quantised in zip(self._stages, self._quantised_sizes, strict=True)
        ]
