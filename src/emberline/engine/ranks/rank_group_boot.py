"""boot_rank_engine_group: loads models whose ranks share GPUs as one EngineGroup.

The rank processes of all models start together and run as long as the server. Before anything is loaded, the ranks of
the first model measure the memory of the GPUs, which no other process of this server uses at that time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.freememory import free_memory
from emberline.engine.engine_group import EngineGroup
from emberline.engine.loaded_engine import LoadedEngine
from emberline.engine.ranks.boot import wait_for_start
from emberline.engine.ranks.control import MeasureDevice, MeasuredGPU
from emberline.engine.ranks.device_boot import DeviceDivision, LoadedDeviceRanks
from emberline.engine.ranks.device_rank_model import measure_device
from emberline.engine.ranks.group import RankGroup
from emberline.engine.ranks.rank_sharing import check_shareable, plan_rank_sharing
from emberline.engine.ranks.swapped_ranks import SwappedRankEngine


def boot_rank_engine_group(
    configs: Mapping[str, EngineConfig], time_sharing: TimeSharingConfig
) -> tuple[EngineGroup, dict[str, LoadedEngine]]:
    """Load all models; return their group, and the loaded engine of each model by name.

    `configs`: see `boot_device_ranks`. Raises EmberlineError if settings, a model or a rank are not usable, or the
    models do not fit."""
    check_shareable(configs)
    divisions = {name: DeviceDivision.from_config(config) for name, config in configs.items()}
    groups: dict[str, RankGroup] = {}
    try:
        for name, division in divisions.items():
            groups[name] = RankGroup(division.config, division.layout)
        for name, division in divisions.items():
            wait_for_start(groups[name], division.config)
        return _load_models(divisions, groups, time_sharing)
    except BaseException:
        for group in groups.values():
            group.close()
        raise


def _load_models(
    divisions: Mapping[str, DeviceDivision], groups: Mapping[str, RankGroup], time_sharing: TimeSharingConfig
) -> tuple[EngineGroup, dict[str, LoadedEngine]]:
    first = next(iter(divisions))
    measured = measure_gpus(divisions[first], groups[first])
    plan = plan_rank_sharing(divisions, measured, free_memory(), can_sleep=time_sharing.models_can_sleep)
    loaded: dict[str, LoadedDeviceRanks] = {}

    def load(name: str) -> LoadedDeviceRanks:
        loaded[name] = divisions[name].load(groups[name], plan.memory[name])
        for other in loaded.keys() - {name}:
            loaded[other].leader.share_kernel_choices()
        return loaded[name]

    members = {name: SwappedRankEngine(plan.model_bytes[name], partial(load, name)) for name in divisions}
    max_waiting = max(division.config.scheduler.max_waiting for division in divisions.values())
    group = EngineGroup(members, plan.usable_bytes, time_sharing, max_waiting=max_waiting)
    return group, {name: each.engine for name, each in loaded.items()}


def measure_gpus(division: DeviceDivision, group: RankGroup) -> list[MeasuredGPU]:
    """Return the memory of each rank's GPU. Call it after all ranks have started, and before anything is loaded."""
    group.send(MeasureDevice())
    return [measure_device(division.config), *group.wait_for(MeasuredGPU).values()]
