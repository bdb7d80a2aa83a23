"""simulate_topology: the latencies of a topology on the virtual clock, with the production scheduler and router."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from emberline.planner.capacity import prompt_seconds
from emberline.planner.topology import PlannedPool, PlanningTask, Topology
from emberline.planner.traffic import Traffic
from emberline.sim.cluster import SimCluster, SimClusterConfig, SimDetail
from emberline.sim.link import KVLink
from emberline.sim.prompt import PromptPart, SimPromptBuilder, SimRequest
from emberline.sim.result import Distribution
from emberline.sim.sessions import SingleRequest
from emberline.sim.worker_config import SimWorkerConfig
from emberline.sim.workloads.requests import make_single_request

MAX_SIMULATED_ENGINES = 16  # of all pools; larger topologies are simulated in part
MAX_SHARE_MISMATCH = 1.1  # between the parts of two pools that are simulated
# Tokens of outputs and of prompts for which the simulated part and its duration are chosen: about 2 s of computation.
SIMULATED_TOKENS, SIMULATED_PROMPT_TOKENS = 60_000, 400_000
MIN_SIMULATED_REQUESTS, MAX_SIMULATED_REQUESTS = 100, 400
SHARED_PREFIXES = 8  # different ones, if prompts share prefixes
SETTLING_LIFETIMES = 0.25  # mean durations of a request, before latencies are measured
RAMP_UTILISATION = 0.9  # of prompt computation, while the requests arrive with which a simulation starts
BLOCK_SIZE = 64


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


OVERLOAD = SimulatedLoad(math.inf, math.inf, math.inf, math.inf, 0, 0, 0, 0.0, 0.0, 0.0)


def simulate_topology(topology: Topology, task: PlanningTask, seed: int) -> SimulatedLoad:
    """Simulate a part of the topology that is large enough, with its part of the traffic.

    Workers that cannot keep up are not simulated: their latencies grow as long as the traffic lasts."""
    topology = topology.with_counts(topology.counts, task)  # with the estimate for this traffic
    if not topology.estimate.is_stable:
        return OVERLOAD
    engines = [pool.engines for pool in topology.pools]
    counts = choose_simulated_counts(engines, _max_engines(topology, task.traffic))
    share = max(n / count for n, count in zip(counts, engines, strict=True))
    traffic = task.traffic.with_rate_factor(share)
    population = round(topology.estimate.decode_rows * counts[-1])
    computing_s = prompt_seconds(topology.pools[0].kind, traffic.mean_context, 0.0) / counts[0]
    ramp_s = population * computing_s / RAMP_UTILISATION
    warm_up_s = ramp_s + SETTLING_LIFETIMES * topology.mean_lifetime_s(task.traffic)
    requests = min(SIMULATED_TOKENS / traffic.mean_output, SIMULATED_PROMPT_TOKENS / traffic.mean_prompt) - population
    end_s = warm_up_s + min(max(requests, MIN_SIMULATED_REQUESTS), MAX_SIMULATED_REQUESTS) / traffic.rate
    cluster = _build_cluster(topology, counts, task)
    cluster.at(warm_up_s, lambda: _forget_latencies(cluster))
    sessions = _Sessions(traffic, seed, population, ramp_s, end_s)
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


def _max_engines(topology: Topology, traffic: Traffic) -> int:
    """Return how many engines can be simulated so that SIMULATED_TOKENS are enough for the fewest requests."""
    engines = sum(pool.engines for pool in topology.pools)
    running = topology.estimate.decode_rows * topology.pools[-1].engines
    left = max(1.0, SIMULATED_TOKENS / traffic.mean_output - MIN_SIMULATED_REQUESTS)
    return min(MAX_SIMULATED_ENGINES, max(len(topology.pools), round(engines * left / max(running, 1.0))))


def choose_simulated_counts(engines: Sequence[int], wanted: int) -> list[int]:
    """Return how many engines of each pool are simulated: about `wanted`, in the proportions of the pools."""
    total = sum(engines)
    if total <= wanted:
        return list(engines)
    sizes = range(len(engines), min(total, MAX_SIMULATED_ENGINES) + 1)
    best: tuple[float, list[int]] | None = None
    for size in sorted(sizes, key=lambda size: (size > wanted, abs(size - wanted))):
        counts = [max(1, round(size * count / total)) for count in engines]
        shares = [n / count for n, count in zip(counts, engines, strict=True)]
        mismatch = max(shares) / min(shares)
        if mismatch <= MAX_SHARE_MISMATCH:
            return counts
        if best is None or mismatch < best[0]:
            best = (mismatch, counts)
    assert best is not None
    return best[1]


class _Sessions:
    """Random arrivals, or those of a trace, until `end_s`. `arrivals` collects their times.

    To start near the steady state, the first requests arrive within `ramp_s`, with a part of their replies in their
    prompts already."""

    def __init__(self, traffic: Traffic, seed: int, population: int, ramp_s: float, end_s: float) -> None:
        self._traffic, self._seed, self._population = traffic, seed, population
        self._ramp_s, self._end_s = ramp_s, end_s
        self.arrivals: list[float] = []

    def __iter__(self) -> Iterator[SingleRequest]:
        rng, at = random.Random(self._seed), 0.0
        outputs = [output for _, output in self._traffic.lengths]
        for number in range(self._population):
            at = self._ramp_s * number / self._population
            prompt, output = rng.choices(self._traffic.lengths, outputs)[0]  # long replies run for longer
            done = rng.randrange(output)
            yield SingleRequest(at, self._build_request(rng, f"first-{number}", prompt + done, output - done))
        for session in self._replay_trace() if self._traffic.replayed else self._draw_requests(rng):
            if session.starts_at >= self._end_s:
                return
            self.arrivals.append(session.starts_at)
            yield session

    def _draw_requests(self, rng: random.Random) -> Iterator[SingleRequest]:
        at = self._ramp_s
        for number in itertools.count():
            at += rng.expovariate(self._traffic.rate)
            prompt, output = rng.choice(self._traffic.lengths)
            yield SingleRequest(at, self._build_request(rng, str(number), prompt, output))

    def _replay_trace(self) -> Iterator[SingleRequest]:
        """Yield the requests of the trace, at the speed that gives the traffic's rate; again if it ends too early."""
        requests = self._traffic.replayed
        interval_s = 1.0 / self._traffic.rate  # mean
        slowness = interval_s * (len(requests) - 1) / (requests[-1].time - requests[0].time)
        for lap in itertools.count():
            start = self._ramp_s + lap * len(requests) * interval_s
            for number, request in enumerate(requests):
                at = start + (request.time - requests[0].time) * slowness
                parts = [PromptPart(f"{lap}/{part.key}", part.num_tokens) for part in request.parts]
                yield make_single_request(f"request-{lap}-{number}", at, parts, request.output_tokens)

    def _build_request(self, rng: random.Random, name: str, prompt: int, output: int) -> SimRequest:
        builder = SimPromptBuilder()
        shared = round(prompt * self._traffic.prefix_share)
        if shared:
            builder.add(PromptPart(f"prefix-{rng.randrange(SHARED_PREFIXES)}", shared))
        builder.add(PromptPart(f"prompt-{name}", max(1, prompt - shared)))
        return builder.build_request(f"request-{name}", PromptPart(f"reply-{name}", output))


def _build_cluster(topology: Topology, counts: Sequence[int], task: PlanningTask) -> SimCluster:
    kv_bytes = topology.pools[0].kind.kv_bytes_per_token
    link = KVLink(task.link.bytes_per_second)
    # Engines with a target for inter-token latencies plan every step; without one, runs of steps are computed at once.
    detail: SimDetail = "runs" if topology.is_split else "steps"
    cluster = SimCluster(SimClusterConfig(workers=0, link=link, kv_bytes_per_token=kv_bytes, detail=detail))
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
        itl_target_ms=1e3 * task.engine_itl_target_s if pool.role == "both" else None,
        cost=kind.costs,
        block_size=BLOCK_SIZE,
    )


def _forget_latencies(cluster: SimCluster) -> None:
    cluster.result.ttft_seconds, cluster.result.inter_token_seconds = Distribution(), Distribution()


def _quantile(values: Distribution, fraction: float, arrived: int) -> float:
    """Return the quantile over all requests that arrived; those without a first token count as the slowest."""
    wanted = fraction * max(arrived, values.count)
    return values.quantile(wanted / values.count) if values.count > wanted else math.inf
