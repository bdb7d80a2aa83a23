"""make_kv_manager: the KV manager that a runner's cache needs. This module does not import torch."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from emberline.core.clock import Clock
from emberline.core.engine_config import SchedulerConfig
from emberline.kv.layer_groups import LayerGroups
from emberline.kv.manager import KVManager
from emberline.kv.pulls import PullManager
from emberline.kv.rank_managers import AnyKVManager, RankKVManagers
from emberline.kv.state_manager import StateKVManager
from emberline.kv.state_slots import StateSlots
from emberline.kv.tiers.stack import TierStack
from emberline.kv.transfer.endpoint import TransferEndpoint


class CacheOwner(Protocol):
    """The part of a runner that describes its cache."""

    num_blocks: int

    @property
    def layout(self) -> str: ...


@runtime_checkable
class StatefulRunner(CacheOwner, Protocol):
    """A runner whose model may have recurrent layers."""

    num_state_slots: int  # slots for the states of these layers; 0: there are none


@runtime_checkable
class DataParallelRunner(CacheOwner, Protocol):
    """A runner on several ranks, each of which may attend to requests of its own."""

    num_caches: int  # caches of `num_blocks` blocks each: one for each rank with requests of its own, otherwise 1


@runtime_checkable
class MovableStatesRunner(StatefulRunner, Protocol):
    """A runner that copies recurrent states to and from tiers, and to and from blocks that other engines use."""

    pages_per_slot: int  # blocks that hold the states of a slot


def make_kv_manager(
    runner: CacheOwner,
    config: SchedulerConfig,
    groups: LayerGroups,
    max_step_tokens: int,
    clock: Clock,
    tiers: TierStack | None = None,
    transfer_endpoint: TransferEndpoint | None = None,
) -> AnyKVManager:
    """Return a manager of the runner's cache. `max_step_tokens`: maximum new tokens of a request in one step."""
    if isinstance(runner, DataParallelRunner) and runner.num_caches > 1:
        assert transfer_endpoint is None, "refused when the engine starts"
        args = runner, config, groups, max_step_tokens, clock, tiers
        return RankKVManagers([_make_manager(*args) for _ in range(runner.num_caches)])
    return _make_manager(runner, config, groups, max_step_tokens, clock, tiers, transfer_endpoint)


def _make_manager(
    runner: CacheOwner,
    config: SchedulerConfig,
    groups: LayerGroups,
    max_step_tokens: int,
    clock: Clock,
    tiers: TierStack | None = None,
    transfer_endpoint: TransferEndpoint | None = None,
) -> KVManager:
    pulls = None
    if transfer_endpoint is not None:
        receiver, timeout_s = transfer_endpoint.receiver, transfer_endpoint.config.peer_timeout
        pulls = PullManager(receiver, stall_timeout_s=timeout_s, clock=clock)
    region = transfer_endpoint.receiver.region if transfer_endpoint else None
    on_allocate = region.bump_generation if region is not None else lambda block, group: None
    if isinstance(runner, StatefulRunner) and runner.num_state_slots:
        assert len(groups.windows) == 1, "no model has recurrent layers and layers with a window"
        return StateKVManager(
            StateSlots(runner.num_state_slots),
            runner.num_blocks,
            config.block_size,
            runner.layout,
            prefix_cache=config.prefix_cache,
            clock=clock,
            load_timeout_s=config.load_timeout,
            tiers=tiers,
            pulls=pulls,
            on_allocate=on_allocate,
            pages_per_slot=runner.pages_per_slot if isinstance(runner, MovableStatesRunner) else 0,
        )
    return KVManager(
        runner.num_blocks,
        config.block_size,
        runner.layout,
        prefix_cache=config.prefix_cache,
        clock=clock,
        load_timeout_s=config.load_timeout,
        tiers=tiers,
        pulls=pulls,
        on_allocate=on_allocate,
        windows=groups.windows[1:],
        max_step_tokens=max_step_tokens,
    )
