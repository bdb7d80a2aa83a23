"""find_candidates: simulates topologies, to find those that meet the targets with as few workers as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from emberline.core.errors import InvalidRequest
from emberline.planner.capacity import MAX_WORKERS
from emberline.planner.topology import PlanningTask, Topology, list_topologies, reject_impossible_targets
from emberline.planner.verification import SimulatedLoad, simulate_topology
from emberline.planner.worker_kind import WorkerKind

MAX_SIMULATED_TOPOLOGIES = 4
MAX_SIMULATIONS = 4  # simulations of one topology, with different numbers of workers
RATE_ROUNDS = 20  # steps of the search for a rate that the budget allows


@dataclass(frozen=True, slots=True)
class Candidate:
    topology: Topology
    load: SimulatedLoad
    meets_targets: bool


def find_candidates(kinds: Sequence[WorkerKind], task: PlanningTask, seed: int) -> list[Candidate]:
    """Return the simulated candidates within the budget: those that meet the targets first, then by number of GPUs.

    Raises InvalidRequest, which says what could be reached, if no topology meets the targets within the budget."""
    reject_impossible_targets(kinds, task)
    topologies = list_topologies(kinds, task)
    if not topologies:
        raise InvalidRequest(
            f"no topology meets {task.slo} at {task.traffic.rate:g} requests/s with up to {MAX_WORKERS} workers",
            param="slo",
            hint="raise the targets, or divide the traffic among several clusters",
        )
    affordable = [each for each in topologies if _may_fit(each, task.max_gpus)]
    candidates = [_verify(each, task, seed) for each in shortlist(affordable)]
    fitting = [each for each in candidates if each.meets_targets and _fits(each.topology, task.max_gpus)]
    if not fitting:
        raise _budget_error(kinds, topologies, candidates, task)
    return sorted((each for each in candidates if _fits(each.topology, task.max_gpus)), key=_sort_key)


def shortlist(topologies: Sequence[Topology]) -> list[Topology]:
    """Return the topologies to simulate, at most MAX_SIMULATED_TOPOLOGIES, in the given order, which is best first.

    The best topology is taken for each of up to four cases: with or without separate prefill workers, and with or
    without lossless weights. The remaining places go to the best topologies that differ from those taken before in
    weight formats, tensor ranks or drafts."""
    chosen: list[Topology] = []
    sorts: set[tuple[bool, bool]] = set()
    for topology in topologies:
        sort = (topology.is_split, topology.is_lossless)
        if sort not in sorts:
            sorts.add(sort)
            chosen.append(topology)
    described = {_describe_sort(topology) for topology in chosen}
    for topology in topologies:
        if _describe_sort(topology) not in described:
            described.add(_describe_sort(topology))
            chosen.append(topology)
    return sorted(chosen[:MAX_SIMULATED_TOPOLOGIES], key=topologies.index)


def _describe_sort(topology: Topology) -> tuple[tuple[str, int, bool], ...]:
    """Return each pool's weight format, number of tensor ranks, and whether it drafts tokens.

    `shortlist` takes only one topology of each such combination."""
    return tuple((pool.kind.weights, pool.kind.tp, pool.kind.drafts) for pool in topology.pools)


def _verify(topology: Topology, task: PlanningTask, seed: int) -> Candidate:
    """Simulate a topology, then with more or fewer workers, to find how few meet the targets. Return the best one."""
    load = simulate_topology(topology, task, seed)
    best = Candidate(topology, load, load.meets(task))
    for _ in range(MAX_SIMULATIONS - 1):
        if best.meets_targets:
            if (smaller := _with_fewer(best.topology, load, task)) is None:
                break
            load = simulate_topology(smaller, task, seed)
            if not load.meets(task):
                break
            best = Candidate(smaller, load, meets_targets=True)
        else:
            larger = _with_more(best.topology, best.load, task)
            load = simulate_topology(larger, task, seed)
            best = Candidate(larger, load, load.meets(task))
    return best


def _with_fewer(topology: Topology, load: SimulatedLoad, task: PlanningTask) -> Topology | None:
    """Return the topology with one worker less, in the pool whose latency is furthest below its target.

    Return None if no pool can keep up with one worker less."""
    slack = {0: load.ttft_p90 / task.slo.ttft_p90, len(topology.pools) - 1: load.itl_p90 / task.slo.itl_p90}
    for pool in sorted(slack, key=slack.__getitem__):
        counts = list(topology.worker_counts)
        if counts[pool] > 1:
            counts[pool] -= 1
            if (smaller := topology.with_counts(counts, task)).estimate.is_stable:
                return smaller
    return None


def _with_more(topology: Topology, load: SimulatedLoad, task: PlanningTask) -> Topology:
    """Return the topology with one more worker in each pool that misses its target."""
    counts = list(topology.worker_counts)
    is_late = load.ttft_p90 > task.slo.ttft_p90, load.itl_p90 > task.slo.itl_p90
    if not topology.is_split:
        return topology.with_counts([counts[0] + 1], task)
    return topology.with_counts([count + late for count, late in zip(counts, is_late, strict=True)], task)


def _may_fit(topology: Topology, max_gpus: int | None) -> bool:
    """Return whether the topology fits the budget, or would fit with one worker less, which simulation may allow."""
    spare = max(pool.kind.gpus for pool in topology.pools if pool.count > 1) if max(topology.worker_counts) > 1 else 0
    return max_gpus is None or topology.gpus - spare <= max_gpus


def _fits(topology: Topology, max_gpus: int | None) -> bool:
    return max_gpus is None or topology.gpus <= max_gpus


def _sort_key(candidate: Candidate) -> tuple[bool, int, bool, bool, float]:
    topology, load = candidate.topology, candidate.load
    is_projected = topology.basis != "measured"
    return not candidate.meets_targets, topology.gpus, is_projected, not topology.is_lossless, load.ttft_p90


def _budget_error(
    kinds: Sequence[WorkerKind],
    topologies: Sequence[Topology],
    candidates: Sequence[Candidate],
    task: PlanningTask,
) -> InvalidRequest:
    met = [each.topology for each in candidates if each.meets_targets]
    larger = [each for each in topologies if not _fits(each, task.max_gpus)]
    if not met and not larger:  # more GPUs would not help
        closest = min(candidates, key=lambda each: each.load.ttft_p90 / task.slo.ttft_p90)
        return InvalidRequest(
            f"no simulated topology meets {task.slo}; the closest, {closest.topology}, reaches"
            f" ttft_p90={closest.load.ttft_p90 * 1e3:.0f}ms and itl_p90={closest.load.itl_p90 * 1e3:.1f}ms",
            param="slo",
            hint="raise the target that is missed",
        )
    needed = min([*met, *larger], key=lambda each: each.gpus)
    rate = _affordable_rate(kinds, task)
    instead = f"lower the rate to about {rate:.3g} requests/s" if rate else "choose other targets"
    return InvalidRequest(
        f"max_gpus is {task.max_gpus}, and {task.slo} at {task.traffic.rate:g} requests/s needs about {needed.gpus}"
        f" GPUs ({needed})",
        param="max_gpus",
        hint=f"raise --max-gpus to {needed.gpus}, or {instead}",
    )


def _affordable_rate(kinds: Sequence[WorkerKind], task: PlanningTask) -> float:
    """Return the highest request rate for which the formulas find a topology within the budget; 0 if there is none."""
    low, high = 0.0, 1.0
    for _ in range(RATE_ROUNDS):
        middle = (low + high) / 2
        scaled = replace(task, traffic=task.traffic.with_rate_factor(middle))
        found = list_topologies(kinds, scaled)
        low, high = (middle, high) if found and _fits(found[0], task.max_gpus) else (low, middle)
        if high - low < 0.02:
            break
    return low * task.traffic.rate
