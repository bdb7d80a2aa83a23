"""Topology: how many workers of which kinds serve a model. list_topologies finds those that meet the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from emberline.core.engine_config import ONLINE_FORMATS
from emberline.core.errors import InvalidRequest
from emberline.core.slo import LatencyTargets
from emberline.planner.capacity import (
    MAX_WORKERS,
    UNSTABLE,
    LoadEstimate,
    estimate_colocated,
    estimate_decode,
    estimate_prefill,
    find_fewest_workers,
    p90_wait,
    prompt_seconds,
)
from emberline.planner.kv_handoff import HandoffLink
from emberline.planner.traffic import Traffic
from emberline.planner.worker_kind import Basis, WorkerKind

ITL_TARGET_SHARE = 0.97
MAX_LINK_UTILISATION = 0.8  # highest share of its time in which the link of a decode worker copies
# Highest ratio of the numbers of engines in two pools. Beyond it, one of the two kinds of work is so small that
# colocated workers serve it as well, and a simulation, which must have all of these engines, takes minutes.
MAX_POOL_RATIO = 100
PoolRole = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class PlannedPool:
    role: PoolRole
    kind: WorkerKind
    count: int

    @property
    def gpus(self) -> int:
        return self.count * self.kind.gpus

    @property
    def engines(self) -> int:
        """The number of batches that the pool computes at the same time: one for each pipeline stage of each worker."""
        return self.count * self.kind.pp

    def __str__(self) -> str:
        role = "" if self.role == "both" else f" {self.role}"
        return f"{self.count} x {self.kind.name}{role}"


@dataclass(frozen=True, slots=True)
class PlanningTask:
    """The input of a plan: the traffic, its latency targets, the link for KV transfers, and the budget of GPUs."""

    traffic: Traffic
    slo: LatencyTargets
    link: HandoffLink
    max_gpus: int | None = None

    @property
    def engine_itl_target_s(self) -> float:
        """The target for inter-token latency that engines get, a little below the task's target.

        Engines choose the sizes of prompt chunks by estimated step times, so they may exceed their target a little."""
        return ITL_TARGET_SHARE * self.slo.itl_p90


@dataclass(frozen=True, slots=True)
class Topology:
    pools: tuple[PlannedPool, ...]  # one of role both, or prefill and decode
    estimate: LoadEstimate

    @property
    def is_split(self) -> bool:
        return len(self.pools) > 1

    @property
    def gpus(self) -> int:
        return sum(pool.gpus for pool in self.pools)

    @property
    def basis(self) -> Basis:
        return "measured" if all(pool.kind.basis == "measured" for pool in self.pools) else "projected"

    @property
    def is_lossless(self) -> bool:
        """Whether the weights equal those of the checkpoint bit for bit."""
        return all(pool.kind.weights not in ONLINE_FORMATS for pool in self.pools)

    def mean_lifetime_s(self, traffic: Traffic) -> float:
        """Return the estimated seconds from the first to the last token of a request."""
        return self.estimate.decode_rows * self.pools[-1].engines / traffic.rate

    def with_counts(self, counts: Sequence[int], task: PlanningTask) -> Topology:
        """Return the topology with other numbers of workers."""
        pools = tuple(replace(pool, count=count) for pool, count in zip(self.pools, counts, strict=True))
        return Topology(pools, estimate_pools(pools, task))

    @property
    def worker_counts(self) -> tuple[int, ...]:
        return tuple(pool.count for pool in self.pools)

    @property
    def family(self) -> tuple[str, ...]:
        """Roles and kinds of the pools. Topologies of one family differ only in the numbers of workers."""
        return tuple(pool.kind.name if pool.role == "both" else f"{pool.kind.name} {pool.role}" for pool in self.pools)

    def __str__(self) -> str:
        return " + ".join(map(str, self.pools))


def list_topologies(kinds: Sequence[WorkerKind], task: PlanningTask) -> list[Topology]:
    """Return the topologies that meet the targets by estimate, the best first. Some may exceed the budget of GPUs."""
    found = [topology for kind in kinds if (topology := _plan_colocated(kind, task)) is not None]
    prefill = [pool for kind in kinds if (pool := _plan_prefill(kind, task)) is not None]
    decode = [pool for kind in kinds if (pool := _plan_decode(kind, task)) is not None]
    for first in prefill:
        for second in decode:
            # Whether workers of the two pools can exchange KV blocks.
            is_compatible = first.kind.weights == second.kind.weights and not first.kind.drafts
            if is_compatible and _pool_ratio(first, second) <= MAX_POOL_RATIO:
                found.append(Topology((first, second), estimate_pools((first, second), task)))
    return sorted(found, key=_sort_key)


def _pool_ratio(first: PlannedPool, second: PlannedPool) -> float:
    return max(first.engines, second.engines) / min(first.engines, second.engines)


def reject_impossible_targets(kinds: Sequence[WorkerKind], task: PlanningTask) -> None:
    """Raise InvalidRequest, which names the best value that is possible, if no number of workers reaches a target."""
    traffic, slo = task.traffic, task.slo
    context = min(prompt for prompt, _ in traffic.lengths) + 1
    firsts = {kind.name: prompt_seconds(kind, traffic.p90_prompt, traffic.prefix_share) for kind in kinds}
    steps = {kind.name: kind.costs.step_seconds(1, context) for kind in kinds}
    for name, target, reached, what in (
        ("ttft_p90", slo.ttft_p90, firsts, f"computing a prompt of {traffic.p90_prompt} tokens on an idle worker"),
        ("itl_p90", slo.itl_p90, steps, "a step with one request"),
    ):
        best = min(reached, key=reached.__getitem__)
        if target < reached[best]:
            raise InvalidRequest(
                f"{name}={target * 1e3:g}ms cannot be reached with any number of GPUs: {what} takes"
                f" {reached[best] * 1e3:.3g} ms with the fastest workers ({best})",
                param="slo",
                hint=f"raise {name} above {reached[best] * 1e3:.3g}ms",
            )


def _sort_key(topology: Topology) -> tuple[int, bool, float, str]:
    estimate = topology.estimate
    return topology.gpus, topology.basis != "measured", estimate.ttft_p90 + estimate.itl_p90, str(topology)


def estimate_pools(pools: Sequence[PlannedPool], task: PlanningTask) -> LoadEstimate:
    """Estimate the latencies of one pool of role both, or of a prefill and a decode pool."""
    if len(pools) == 1:
        return estimate_colocated(pools[0].kind, pools[0].count, task.traffic, task.engine_itl_target_s)
    prefill, decode = pools
    handoff_s = task.link.handoff_seconds(prefill.kind, task.traffic.p90_prompt)
    first = estimate_prefill(prefill.kind, prefill.count, task.traffic, handoff_s)
    second = estimate_decode(decode.kind, decode.count, task.traffic)
    busy = _link_utilisation(decode, task)
    if not (first.is_stable and second.is_stable and busy < MAX_LINK_UTILISATION):
        return UNSTABLE
    transfer_s = task.link.transfer_seconds(decode.kind, task.traffic.mean_prompt)
    wait = p90_wait(busy, decode.engines, transfer_s, task.traffic.prompt_variation)
    return LoadEstimate(first.ttft_p90 + wait, second.itl_p90, second.decode_rows, is_stable=True)


def _link_utilisation(pool: PlannedPool, task: PlanningTask) -> float:
    """Return the share of time in which a decode worker copies keys and values of prompts."""
    return task.traffic.rate / pool.engines * task.link.transfer_seconds(pool.kind, task.traffic.mean_prompt)


def _plan_colocated(kind: WorkerKind, task: PlanningTask) -> Topology | None:
    def meets(count: int) -> bool:
        estimate = estimate_pools([PlannedPool("both", kind, count)], task)
        return estimate.ttft_p90 <= task.slo.ttft_p90 and estimate.itl_p90 <= task.slo.itl_p90

    if (count := find_fewest_workers(meets, MAX_WORKERS)) is None:
        return None
    pool = PlannedPool("both", kind, count)
    return Topology((pool,), estimate_pools([pool], task))


def _plan_prefill(kind: WorkerKind, task: PlanningTask) -> PlannedPool | None:
    handoff_s = task.link.handoff_seconds(kind, task.traffic.p90_prompt)
    count = find_fewest_workers(
        lambda count: estimate_prefill(kind, count, task.traffic, handoff_s).ttft_p90 <= task.slo.ttft_p90
    )
    return None if count is None else PlannedPool("prefill", kind, count)


def _plan_decode(kind: WorkerKind, task: PlanningTask) -> PlannedPool | None:
    def meets(count: int) -> bool:
        is_fast = estimate_decode(kind, count, task.traffic).itl_p90 <= task.slo.itl_p90
        return is_fast and _link_utilisation(PlannedPool("decode", kind, count), task) < MAX_LINK_UTILISATION

    count = find_fewest_workers(meets)
    return None if count is None else PlannedPool("decode", kind, count)
