"""simulate_topology: the latencies of a topology on the virtual clock, with the production scheduler and router."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from emberline.planner.topology import PlannedPool, PlanningTask, Topology
from emberline.planner.traffic import Traffic
from emberline.sim.cluster import SimCluster, SimClusterConfig
from emberline.sim.link import KVLink
from emberline.sim.prompt import PromptPart, SimPromptBuilder, SimRequest
from emberline.sim.result import Distribution
from emberline.sim.sessions import SingleRequest
from emberline.sim.worker import SimWorkerConfig

MAX_SIMULATED_ENGINES = 8  # of all pools; larger topologies are simulated in part
MAX_SIMULATED_TOKENS = 60_000  # output tokens, warm-up included; for these, fewer engines are simulated
MIN_SIMULATED_REQUESTS = 150
SHARED_PREFIXES = 8  # different ones, if prompts share prefixes
WARM_UP_LIFETIMES, MEASURED_LIFETIMES = 1.5, 3.0  # mean durations of a request
BLOCK_SIZE = 64
ITL_TARGET_SHARE = 1.0  # of the inter-token target, as the engine's setting


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """Latencies in seconds, over the requests that arrived after the warm-up."""

    ttft_p50: float
    ttft_p90: float
    itl_p50: float
    itl_p90: float
    requests: int  # that got a first token
    unanswered: int  # that arrived and got none: refused, failed, or still waiting at the end
    engines: int  # that were simulated
    traffic_share: float  # of the traffic that was simulated
    seconds: float  # of virtual time
    cached_share: float

    def meets(self, task: PlanningTask) -> bool:
        return self.ttft_p90 <= task.slo.ttft_p90 and self.itl_p90 <= task.slo.itl_p90


def simulate_topology(topology: Topology, task: PlanningTask, seed: int) -> SimulatedLoad:
    """Simulate a part of the topology that is large enough, with its part of the traffic."""
    engines = [pool.engines for pool in topology.pools]
    lifetime_s = topology.mean_lifetime_s(task.traffic)
    tokens = (WARM_UP_LIFETIMES + MEASURED_LIFETIMES) * lifetime_s * task.traffic.rate * task.traffic.mean_output
    limit = min(MAX_SIMULATED_ENGINES, max(len(engines), round(sum(engines) * MAX_SIMULATED_TOKENS / tokens)))
    counts = choose_simulated_counts(engines, limit)
    share = max(n / count for n, count in zip(counts, engines, strict=True))
    traffic = task.traffic.scaled(share)
    warm_up_s = WARM_UP_LIFETIMES * lifetime_s
    end_s = warm_up_s + max(MEASURED_LIFETIMES * lifetime_s, MIN_SIMULATED_REQUESTS / traffic.rate)
    cluster = _build_cluster(topology, counts, task)
    cluster.at(warm_up_s, lambda: _forget_latencies(cluster))
    sessions = _Sessions(traffic, seed, end_s)
    result = cluster.run(sessions, until=end_s)
    arrived = sum(warm_up_s <= at for at in sessions.arrivals)
    return SimulatedLoad(
        ttft_p50=_quantile(result.ttft_seconds, 0.5, arrived),
        ttft_p90=_quantile(result.ttft_seconds, 0.9, arrived),
        itl_p50=result.inter_token_seconds.quantile(0.5),
        itl_p90=result.inter_token_seconds.quantile(0.9),
        requests=result.ttft_seconds.count,
        unanswered=max(0, arrived - result.ttft_seconds.count),
        engines=sum(counts),
        traffic_share=share,
        seconds=end_s - warm_up_s,
        cached_share=result.cached_share,
    )


def choose_simulated_counts(engines: Sequence[int], limit: int) -> list[int]:
    """Return how many engines of each pool are simulated, `limit` at most, in about the proportions of the pools."""
    total = sum(engines)
    if total <= limit:
        return list(engines)
    best: tuple[float, list[int]] | None = None
    for size in range(limit, len(engines) - 1, -1):
        counts = [max(1, round(size * count / total)) for count in engines]
        shares = [n / count for n, count in zip(counts, engines, strict=True)]
        mismatch = max(shares) / min(shares)
        if sum(counts) <= limit and (best is None or mismatch < best[0]):
            best = (mismatch, counts)
    assert best is not None
    return best[1]


class _Sessions:
    """Requests that arrive at random until `end_s`. `arrivals` collects their times."""

    def __init__(self, traffic: Traffic, seed: int, end_s: float) -> None:
        self._traffic, self._seed, self._end_s = traffic, seed, end_s
        self.arrivals: list[float] = []

    def __iter__(self) -> Iterator[SingleRequest]:
        rng, at = random.Random(self._seed), 0.0
        for number in itertools.count():
            at += rng.expovariate(self._traffic.rate)
            if at >= self._end_s:
                return
            self.arrivals.append(at)
            prompt, output = rng.choice(self._traffic.lengths)
            yield SingleRequest(at, self._build_request(rng, number, prompt, output))

    def _build_request(self, rng: random.Random, number: int, prompt: int, output: int) -> SimRequest:
        builder = SimPromptBuilder()
        shared = round(prompt * self._traffic.prefix_share)
        if shared:
            builder.add(PromptPart(f"prefix-{rng.randrange(SHARED_PREFIXES)}", shared))
        builder.add(PromptPart(f"prompt-{number}", max(1, prompt - shared)))
        return builder.build_request(f"request-{number}", PromptPart(f"reply-{number}", output))


def _build_cluster(topology: Topology, counts: Sequence[int], task: PlanningTask) -> SimCluster:
    kv_bytes = topology.pools[0].kind.kv_bytes_per_token
    link = KVLink(task.link.bytes_per_second)
    cluster = SimCluster(SimClusterConfig(workers=0, link=link, kv_bytes_per_token=kv_bytes))
    for pool, count in zip(topology.pools, counts, strict=True):
        for _ in range(count):
            cluster.add_worker(pool.role, _worker_config(pool, task))
    return cluster


def _worker_config(pool: PlannedPool, task: PlanningTask) -> SimWorkerConfig:
    """Return the settings of one engine; a worker with several stages is simulated as one engine for each stage.

    The stages compute different batches at the same time. So each batch takes as long as a step of all stages, and has
    its part of the KV cache."""
    kind = pool.kind
    return SimWorkerConfig(
        kv_tokens=kind.kv_tokens // kind.pp // BLOCK_SIZE * BLOCK_SIZE,
        max_running=kind.max_running,
        batch_tokens=kind.max_batch_tokens,
        itl_target_ms=None if pool.role == "prefill" else 1e3 * task.slo.itl_p90 * ITL_TARGET_SHARE,
        cost=kind.costs,
        block_size=BLOCK_SIZE,
    )


def _forget_latencies(cluster: SimCluster) -> None:
    cluster.result.ttft_seconds, cluster.result.inter_token_seconds = Distribution(), Distribution()


def _quantile(values: Distribution, fraction: float, arrived: int) -> float:
    """Return the quantile over all requests that arrived; those without a first token count as the slowest."""
    wanted = fraction * max(arrived, values.count)
    return values.quantile(wanted / values.count) if values.count > wanted else math.inf
