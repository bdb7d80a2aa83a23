"""`emberline bench routing`: which share of prompt tokens is found in a KV cache, for each way to route requests.

Conversations of many turns, with shared system prompts, are routed to a few workers whose caches are too small for all
conversations. The real scheduler, KV manager and router run on a simulated clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from emberline.bench.report import BenchReport
from emberline.sim.choosers import (
    WorkerChooser,
    choose_worker_by_policy,
    choose_worker_with_fewest_requests,
    make_random_chooser,
    make_round_robin_chooser,
)
from emberline.sim.cluster import SimCluster, SimClusterConfig
from emberline.sim.result import SimResult
from emberline.sim.sharedstore import SharedStore
from emberline.sim.worker import SimStore
from emberline.sim.workloads.agents import AgentWorkload

BLOCK_SECONDS = 2e-4  # 16 tokens of 128 KiB each from a store at 10 GB/s


@dataclass(frozen=True, slots=True)
class RoutingVariant:
    """A routing policy, and the conditions under which it is measured.

    The conditions are whether clients send a session header, whether workers share a KV store, and whether workers
    report their cached blocks (KV events).
    """

    chooser: Callable[[int], WorkerChooser]
    header: bool = False
    store: bool = False
    kv_events: bool = False


VARIANTS = {
    "random": RoutingVariant(make_random_chooser),
    "in turn": RoutingVariant(lambda seed: make_round_robin_chooser()),
    "fewest requests": RoutingVariant(lambda seed: choose_worker_with_fewest_requests),
    "header": RoutingVariant(lambda seed: choose_worker_by_policy, header=True),
    "inferred": RoutingVariant(lambda seed: choose_worker_by_policy),
    "kv-aware": RoutingVariant(lambda seed: choose_worker_by_policy, kv_events=True),
    "random, store": RoutingVariant(make_random_chooser, store=True),
    "inferred, store": RoutingVariant(lambda seed: choose_worker_by_policy, store=True),
}


BALANCED = ("random", "in turn", "fewest requests", "inferred")
SKEWED = AgentWorkload(
    num_sessions=1500,
    systems=1500,
    system_tokens=(8, 16),
    turns=(1, 1),
    user_tokens=500.0,
    reply_tokens=200.0,
    spread=1.2,
    over_seconds=30.0,
)


def bench(
    workload: AgentWorkload, cluster_config: SimClusterConfig, store_capacity_blocks: int, seeds: int
) -> BenchReport:
    config = {
        **asdict(workload),
        **asdict(cluster_config),
        "store_blocks": store_capacity_blocks,
        "seeds": seeds,
        "skewed": asdict(SKEWED),
    }
    report = BenchReport("routing", config)
    _add_cache_savings(report, workload, cluster_config, store_capacity_blocks, seeds)
    _add_load_balance(report, cluster_config, seeds)
    return report


def _add_cache_savings(
    report: BenchReport,
    workload: AgentWorkload,
    cluster_config: SimClusterConfig,
    store_capacity_blocks: int,
    seeds: int,
) -> None:
    for name, way in VARIANTS.items():
        seen = [_run_simulation(way, workload, cluster_config, store_capacity_blocks, seed) for seed in range(seeds)]
        report.add(f"{name}: cached share", [100 * one.cached_share for one in seen], "%")
        report.add(f"{name}: of the oracle's", [100 * one.cached_share / one.oracle_cached_share for one in seen], "%")
        report.add(f"{name}: first token p50", [1e3 * one.ttft_seconds.quantile(0.5) for one in seen], "ms")
        report.add(f"{name}: first token p90", [1e3 * one.ttft_seconds.quantile(0.9) for one in seen], "ms")
        report.add(f"{name}: inter-token p99", [1e3 * one.inter_token_seconds.quantile(0.99) for one in seen], "ms")
    report.add("oracle: cached share", [100 * one.oracle_cached_share for one in seen], "%")
    size = cluster_config.workers * cluster_config.kv_tokens
    report.add("caches over working set", [size / one.working_set for one in seen], "x")


def _add_load_balance(report: BenchReport, cluster_config: SimClusterConfig, seeds: int) -> None:
    """Measure how evenly requests are spread over busy workers and add the results to the report.

    The requests have very different lengths and no common prefixes.
    """
    for name in BALANCED:
        seen = [_run_simulation(VARIANTS[name], SKEWED, cluster_config, 0, seed) for seed in range(seeds)]
        report.add(f"skewed, {name}: most over mean tokens in flight", [one.load_imbalance.mean for one in seen], "x")
        report.add(f"skewed, {name}: first token p90", [1e3 * one.ttft_seconds.quantile(0.9) for one in seen], "ms")
        report.add(
            f"skewed, {name}: inter-token p99", [1e3 * one.inter_token_seconds.quantile(0.99) for one in seen], "ms"
        )


def _run_simulation(
    variant: RoutingVariant,
    workload: AgentWorkload,
    cluster_config: SimClusterConfig,
    store_capacity_blocks: int,
    seed: int,
) -> SimResult:
    store = SimStore(SharedStore(store_capacity_blocks), BLOCK_SECONDS) if variant.store else None
    cluster = SimCluster(
        cluster_config,
        variant.chooser(seed),
        sends_session_ids=variant.header,
        store=store,
        kv_events=variant.kv_events,
    )
    return cluster.run(workload.sessions(seed))
