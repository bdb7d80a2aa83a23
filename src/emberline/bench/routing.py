"""`emberline bench routing`: what a way of routing saves. Conversations of many turns over shared system prompts go to
a few workers whose caches are too small for them all: production scheduler, KV manager and router, virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import mean

from emberline.bench.report import Report
from emberline.sim.agents import Habits, sessions
from emberline.sim.cluster import Chooser, Seen, Shape, SimCluster, at_random, by_policy, fewest_requests, in_turn
from emberline.sim.sharedstore import SharedStore
from emberline.sim.worker import Store

BLOCK_SECONDS = 2e-4  # 16 tokens of 128 KiB each from a store at 10 GB/s


@dataclass(frozen=True, slots=True)
class Way:
    """Of routing: who chooses, whether clients name their session, whether workers share a store, and whether the
    router follows what their caches hold."""

    chooser: Callable[[int], Chooser]
    header: bool = False
    store: bool = False
    kv_events: bool = False


WAYS = {
    "random": Way(at_random),
    "in turn": Way(lambda seed: in_turn()),
    "fewest requests": Way(lambda seed: fewest_requests),
    "header": Way(lambda seed: by_policy, header=True),
    "inferred": Way(lambda seed: by_policy),
    "kv-aware": Way(lambda seed: by_policy, kv_events=True),
    "random, store": Way(at_random, store=True),
    "inferred, store": Way(lambda seed: by_policy, store=True),
}


BALANCED = ("random", "in turn", "fewest requests", "inferred")
SKEWED = Habits(
    sessions=1500,
    systems=1500,
    system_tokens=(8, 16),
    turns=(1, 1),
    user_tokens=500.0,
    reply_tokens=200.0,
    spread=1.2,
    over_seconds=30.0,
)


def bench(habits: Habits, shape: Shape, store_blocks: int, seeds: int) -> Report:
    config = {**asdict(habits), **asdict(shape), "store_blocks": store_blocks, "seeds": seeds, "skewed": asdict(SKEWED)}
    report = Report("routing", config)
    _savings(report, habits, shape, store_blocks, seeds)
    _balance(report, shape, seeds)
    return report


def _savings(report: Report, habits: Habits, shape: Shape, store_blocks: int, seeds: int) -> None:
    for name, way in WAYS.items():
        seen = [_run(way, habits, shape, store_blocks, seed) for seed in range(seeds)]
        report.add(f"{name}: cached share", [100 * one.cached_share for one in seen], "%")
        report.add(f"{name}: of the oracle's", [100 * one.cached_share / one.oracle_share for one in seen], "%")
        report.add(f"{name}: first token p50", [1e3 * _at(one.first, 0.5) for one in seen], "ms")
        report.add(f"{name}: first token p90", [1e3 * _at(one.first, 0.9) for one in seen], "ms")
        report.add(f"{name}: inter-token p99", [1e3 * _at(one.between, 0.99) for one in seen], "ms")
    report.add("oracle: cached share", [100 * one.oracle_share for one in seen], "%")
    size = shape.workers * shape.kv_tokens
    report.add("caches over working set", [size / one.working_set for one in seen], "x")


def _balance(report: Report, shape: Shape, seeds: int) -> None:
    """Requests of very different lengths that have nothing in common, at a load that keeps every worker busy."""
    for name in BALANCED:
        seen = [_run(WAYS[name], SKEWED, shape, 0, seed) for seed in range(seeds)]
        report.add(f"skewed, {name}: most over mean tokens in flight", [mean(one.balance) for one in seen], "x")
        report.add(f"skewed, {name}: first token p90", [1e3 * _at(one.first, 0.9) for one in seen], "ms")
        report.add(f"skewed, {name}: inter-token p99", [1e3 * _at(one.between, 0.99) for one in seen], "ms")


def _run(way: Way, habits: Habits, shape: Shape, store_blocks: int, seed: int) -> Seen:
    store = Store(SharedStore(store_blocks), BLOCK_SECONDS) if way.store else None
    cluster = SimCluster(shape, way.chooser(seed), header=way.header, store=store, kv_events=way.kv_events)
    return cluster.run(sessions(habits, seed))


def _at(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]
