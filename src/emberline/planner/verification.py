"""simulate_topology: the latencies of a topology on the virtual clock, with the production scheduler and router."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from emberline.planner.topology import PlannedPool, PlanningTask, Topology
from emberline.planner.traffic import Traffic
from emberline.sim.cluster import SimCluster, SimClusterConfig, SimDetail
from emberline.sim.link import KVLink
from emberline.sim.prompt import PromptSegment, SimPromptBuilder, SimRequest
from emberline.sim.result import Distribution
from emberline.sim.sessions import SingleRequest
from emberline.sim.worker_config import SimWorkerConfig
from emberline.sim.workloads.requests import make_single_request

MAX_SIMULATED_ENGINES = 16  # engines of all pools together; more only if the pools need them to keep their proportion
# Scaling a topology down changes the load of an engine by different factors in two pools. This is the highest allowed
# ratio of the factors, because queues near their limit are sensitive.
MAX_LOAD_MISMATCH = 1.02
# Tokens of outputs and of prompts for which the simulated part and its duration are chosen: about 2 s of computation.
SIMULATED_TOKENS, SIMULATED_PROMPT_TOKENS = 60_000, 400_000
MIN_SIMULATED_REQUESTS, MAX_SIMULATED_REQUESTS = 100, 400
SHARED_PREFIXES = 8  # number of different prefixes, if prompts share prefixes
SETTLING_LIFETIMES = 0.25  # mean durations of a request, before latencies are measured
RAMP_INTERVAL_S = 2e-3  # seconds between the requests with which an engine starts: more than a copy takes
BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """Latencies in seconds, over the requests that arrived after the warm-up."""

    ttft_p50: float
    ttft_p90: float
    itl_p50: float
    itl_p90: float
    requests: int  # requests that got a first token
    unanswered: int  # requests that got none: refused, failed, or still waiting at the end, for longer than the target
    engines: int  # number of simulated engines
    traffic_share: float  # share of the traffic that was simulated
    seconds: float  # simulated time
    cached_share: float

    def meets(self, task: PlanningTask) -> bool:
        return self.ttft_p90 <= task.slo.ttft_p90 and self.itl_p90 <= task.slo.itl_p90


OVERLOAD = SimulatedLoad(math.inf, math.inf, math.inf, math.inf, 0, 0, 0, 0.0, 0.0, 0.0)


def simulate_topology(topology: Topology, task: PlanningTask, seed: int) -> SimulatedLoad:
    """Simulate the topology, or a scaled-down copy of a large one with its share of the traffic.

    Workers that cannot keep up are not simulated: their latencies grow as long as the traffic lasts."""
    topology = topology.with_counts(topology.worker_counts, task)  # the same counts, an estimate for this traffic
    if not topology.estimate.is_stable:
        return OVERLOAD
    engines = [pool.engines for pool in topology.pools]
    counts = choose_simulated_counts(engines, _max_engines(topology, task.traffic))
    share = max(n / count for n, count in zip(counts, engines, strict=True))
    traffic = task.traffic.with_rate_factor(share)
    population = round(topology.estimate.decode_rows * counts[-1])
    ramp_s = RAMP_INTERVAL_S * population / counts[-1]
    warm_up_s = ramp_s + SETTLING_LIFETIMES * topology.mean_lifetime_s(task.traffic)
    requests = min(SIMULATED_TOKENS / traffic.mean_output, SIMULATED_PROMPT_TOKENS / traffic.mean_prompt) - population
    end_s = warm_up_s + min(max(requests, MIN_SIMULATED_REQUESTS), MAX_SIMULATED_REQUESTS) / traffic.rate
    cluster = _build_cluster(topology, counts, task)
    cluster.call_at(warm_up_s, lambda: _reset_latencies(cluster))
    sessions = _Sessions(traffic, seed, population, ramp_s, end_s)
    result = cluster.run(sessions, until=end_s)
    arrived = [at for at in sessions.arrivals if at >= warm_up_s]
    lost = result.refused + result.failed + result.too_long
    unanswered = lost + _count_late(arrived, result.ttft_seconds.count + lost, end_s - task.slo.ttft_p90)
    return SimulatedLoad(
        ttft_p50=_quantile(result.ttft_seconds, 0.5, unanswered),
        ttft_p90=_quantile(result.ttft_seconds, 0.9, unanswered),
        itl_p50=_inter_token_quantile(result.inter_token_seconds, 0.5),
        itl_p90=_inter_token_quantile(result.inter_token_seconds, 0.9),
        requests=result.ttft_seconds.count,
        unanswered=unanswered,
        engines=sum(counts),
        traffic_share=share,
        seconds=end_s - warm_up_s,
        cached_share=result.cached_share,
    )


def _max_engines(topology: Topology, traffic: Traffic) -> int:
    """Return how many engines to simulate, so that about SIMULATED_TOKENS output tokens suffice.

    These are the tokens of the requests that run from the start, and of MIN_SIMULATED_REQUESTS more. The result is at
    most MAX_SIMULATED_ENGINES, but at least one for each pool."""
    engines = sum(pool.engines for pool in topology.pools)
    running = topology.estimate.decode_rows * topology.pools[-1].engines
    left = max(1.0, SIMULATED_TOKENS / traffic.mean_output - MIN_SIMULATED_REQUESTS)
    return min(MAX_SIMULATED_ENGINES, max(len(topology.pools), round(engines * left / max(running, 1.0))))


def choose_simulated_counts(engines: Sequence[int], wanted: int) -> list[int]:
    """Return how many engines of each pool are simulated: about `wanted` in total, or more to keep the proportions.

    If the proportions of the pools are kept, each engine has the same load as in the whole topology. That is why 1
    prefill engine and 40 decode engines, for example, are all simulated."""
    if (total := sum(engines)) <= wanted:
        return list(engines)
    for size in sorted(range(len(engines), total), key=lambda size: (size > wanted, abs(size - wanted))):
        counts = [max(1, round(size * count / total)) for count in engines]
        shares = [n / count for n, count in zip(counts, engines, strict=True)]
        if max(shares) <= MAX_LOAD_MISMATCH * min(shares):
            return counts
    return list(engines)


class _Sessions:
    """The simulated requests until `end_s`: random ones, or those of a trace. `arrivals` collects their arrival times.

    So that the simulation starts near the steady state, `population` other requests arrive within `ramp_s`. Their
    prompts and a part of their replies count as computed."""

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
            request = self._build_request(rng, f"first-{number}", prompt, output)
            yield SingleRequest(at, replace(request, num_resumed=rng.randrange(output)))
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
        """Yield the requests of the trace again and again, replayed at the speed that gives the traffic's rate."""
        requests = self._traffic.replayed
        interval_s = 1.0 / self._traffic.rate  # mean
        slowness = interval_s * (len(requests) - 1) / (requests[-1].time - requests[0].time)
        for lap in itertools.count():
            start = self._ramp_s + lap * len(requests) * interval_s
            for number, request in enumerate(requests):
                at = start + (request.time - requests[0].time) * slowness
                parts = [PromptSegment(f"{lap}/{part.key}", part.num_tokens) for part in request.segments]
                yield make_single_request(f"request-{lap}-{number}", at, parts, request.output_tokens)

    def _build_request(self, rng: random.Random, name: str, prompt: int, output: int) -> SimRequest:
        builder = SimPromptBuilder()
        shared = round(prompt * self._traffic.prefix_share)
        if shared:
            builder.add(PromptSegment(f"prefix-{rng.randrange(SHARED_PREFIXES)}", shared))
        builder.add(PromptSegment(f"prompt-{name}", max(1, prompt - shared)))
        return builder.build_request(f"request-{name}", PromptSegment(f"reply-{name}", output))


def _build_cluster(topology: Topology, counts: Sequence[int], task: PlanningTask) -> SimCluster:
    kv_bytes = topology.pools[0].kind.kv_bytes_per_token
    link = KVLink(task.link.bytes_per_second)
    # Engines with a target for inter-token latencies are simulated step by step, others in runs of many steps.
    detail: SimDetail = "runs" if topology.is_split else "steps"
    cluster = SimCluster(SimClusterConfig(workers=0, link=link, kv_bytes_per_token=kv_bytes, detail=detail))
    for pool, count in zip(topology.pools, counts, strict=True):
        for _ in range(count):
            cluster.add_worker(pool.role, _worker_config(pool, task))
    return cluster


def _worker_config(pool: PlannedPool, task: PlanningTask) -> SimWorkerConfig:
    """Return the settings of one simulated engine. A worker with n pipeline stages is simulated as n engines.

    The stages compute n batches at the same time, and each of the n engines stands for one batch: its steps take as
    long as a step through all stages, and it has 1/n of the KV cache."""
    kind = pool.kind
    return SimWorkerConfig(
        kv_tokens=kind.kv_tokens // kind.pp // BLOCK_SIZE * BLOCK_SIZE,
        max_running=kind.max_running,
        batch_tokens=kind.max_batch_tokens,
        itl_target_ms=1e3 * task.engine_itl_target_s if pool.role == "both" else None,
        cost=kind.costs,
        block_size=BLOCK_SIZE,
    )


def _reset_latencies(cluster: SimCluster) -> None:
    cluster.result.ttft_seconds, cluster.result.inter_token_seconds = Distribution(), Distribution()


def _count_late(arrived: Sequence[float], ended: int, must_start_by: float) -> int:
    """Return how many requests still wait for their first token when the simulation ends, and have missed the target.

    `arrived`: arrival times of all requests. `ended`: the number of requests that no longer wait; requests get their
    first token about in the order of arrival, so these are the first ones. Requests that arrived after `must_start_by`
    do not count, because their first token may still be in time."""
    return sum(at < must_start_by for at in arrived[ended:])


def _quantile(values: Distribution, fraction: float, unanswered: int) -> float:
    """Return the quantile over all requests; those without a first token count as the slowest."""
    wanted = fraction * (values.count + unanswered)
    return values.quantile(wanted / values.count) if values.count > wanted else math.inf


def _inter_token_quantile(values: Distribution, fraction: float) -> float:
    """Return the quantile of the times between tokens; 0 if no request has a second token."""
    return values.quantile(fraction) if values.count else 0.0
