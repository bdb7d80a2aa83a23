"""How a plan changes with the traffic, the reuse of prefixes, and the time that a worker needs to start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from emberline.planner.search import Candidate
from emberline.planner.topology import PlanningTask, Topology, estimate_pools, list_topologies
from emberline.planner.verification import SimulatedLoad, simulate_topology
from emberline.planner.worker_kind import WorkerKind

TRAFFIC_FACTORS = (0.75, 1.25)
CURVE_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
PREFIX_SHARES = (0.0, 0.25, 0.5, 0.75)
START_SECONDS = (10.0, 60.0, 300.0)  # besides the given one


@dataclass(frozen=True, slots=True)
class TrafficChange:
    factor: float
    rate: float
    load: SimulatedLoad  # latencies of the candidate, unchanged, at this rate
    meets_targets: bool
    gpus: int | None  # estimated for this rate, with workers of the same kinds; None: they cannot meet the targets


@dataclass(frozen=True, slots=True)
class PrefixChange:
    share: float
    gpus: int | None  # estimated, of the same workers; None: they cannot meet the targets


@dataclass(frozen=True, slots=True)
class StartChange:
    start_s: float
    ttft_s: float  # time to first token just before a lost worker is replaced, estimated; inf: nothing is served


@dataclass(frozen=True, slots=True)
class Sensitivity:
    traffic: tuple[TrafficChange, ...]
    prefix: tuple[PrefixChange, ...]
    start: tuple[StartChange, ...]
    curve: tuple[tuple[float, dict[str, int]], ...]  # pairs of a rate and the estimated GPUs by family of workers


def analyse_sensitivity(
    kinds: Sequence[WorkerKind], candidates: Sequence[Candidate], task: PlanningTask, start_s: float, seed: int
) -> Sensitivity:
    """Return how the plan changes if one input changes. Only the first candidate, which is the best, is analysed."""
    best = candidates[0]
    offset = _count_offset(kinds, best.topology, task)
    traffic = []
    for factor in TRAFFIC_FACTORS:
        changed = replace(task, traffic=task.traffic.with_rate_factor(factor))
        load = simulate_topology(best.topology, changed, seed)
        gpus = _estimated_gpus(kinds, best.topology, changed, offset)
        traffic.append(TrafficChange(factor, changed.traffic.rate, load, load.meets(task), gpus))
    shares = sorted({*PREFIX_SHARES, task.traffic.prefix_share})
    prefix = [
        PrefixChange(share, _estimated_gpus(kinds, best.topology, _with_prefix(task, share), offset))
        for share in shares
    ]
    start = [_estimate_worker_loss(best.topology, task, seconds) for seconds in sorted({*START_SECONDS, start_s})]
    families = list(dict.fromkeys(candidate.topology.family for candidate in candidates))
    curve = tuple(_curve_point(kinds, families, task, factor) for factor in CURVE_FACTORS)
    return Sensitivity(tuple(traffic), tuple(prefix), tuple(start), curve)


def _with_prefix(task: PlanningTask, share: float) -> PlanningTask:
    return replace(task, traffic=replace(task.traffic, prefix_share=share))


def _curve_point(
    kinds: Sequence[WorkerKind], families: Sequence[tuple[str, ...]], task: PlanningTask, factor: float
) -> tuple[float, dict[str, int]]:
    changed = replace(task, traffic=task.traffic.with_rate_factor(factor))
    gpus = {each.family: each.gpus for each in list_topologies(kinds, changed)}
    return changed.traffic.rate, {" + ".join(family): gpus[family] for family in families if family in gpus}


def _count_offset(kinds: Sequence[WorkerKind], topology: Topology, task: PlanningTask) -> int:
    """Return the GPUs that the formulas estimate for the family of `topology`, minus its own GPUs.

    A family has the same roles and kinds of pools. Return 0 if the formulas find no topology of the family."""
    found = _find_family(kinds, topology, task)
    return 0 if found is None else found.gpus - topology.gpus


def _estimated_gpus(kinds: Sequence[WorkerKind], topology: Topology, task: PlanningTask, offset: int) -> int | None:
    found = _find_family(kinds, topology, task)
    least = sum(pool.kind.gpus for pool in topology.pools)
    return None if found is None else max(least, found.gpus - offset)


def _find_family(kinds: Sequence[WorkerKind], topology: Topology, task: PlanningTask) -> Topology | None:
    names = {pool.kind.name for pool in topology.pools}
    same = list_topologies([kind for kind in kinds if kind.name in names], task)
    return next((each for each in same if each.family == topology.family), None)


def _estimate_worker_loss(topology: Topology, task: PlanningTask, start_s: float) -> StartChange:
    """Estimate the time to first token when one worker is missing for `start_s`, in the pool where this is worst."""
    return StartChange(
        start_s, max(_ttft_without(topology, task, pool, start_s) for pool in range(len(topology.pools)))
    )


def _ttft_without(topology: Topology, task: PlanningTask, missing: int, start_s: float) -> float:
    counts = [count - (number == missing) for number, count in enumerate(topology.worker_counts)]
    traffic, whole = task.traffic, topology.worker_counts[missing]
    if not counts[missing]:
        return start_s  # requests wait until the worker is replaced
    estimate = topology.with_counts(counts, task).estimate
    if math.isfinite(estimate.ttft_p90):
        return estimate.ttft_p90
    share = _stable_share(topology.with_counts(counts, task), task)
    backlog = traffic.rate * (1.0 - share) * start_s
    usual = topology.estimate.ttft_p90 if math.isfinite(topology.estimate.ttft_p90) else task.slo.ttft_p90
    return usual + backlog / (traffic.rate * max(share, 1.0 / whole))


def _stable_share(topology: Topology, task: PlanningTask) -> float:
    """Return the largest share of the traffic with which the workers keep up."""
    low, high = 0.0, 1.0
    while high - low > 0.01:
        middle = (low + high) / 2
        scaled = replace(task, traffic=task.traffic.with_rate_factor(middle))
        is_met = math.isfinite(estimate_pools(topology.pools, scaled).ttft_p90)
        low, high = (middle, high) if is_met else (low, middle)
    return low
