"""How many workers of a kind serve the traffic within the latency targets, by formulas. The simulator verifies it.

Steps follow from the mean load; waiting follows from the theory of queues. Both are approximations, good enough to
choose which topologies are simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from emberline.core.slo import LatencyTargets
from emberline.core.step_costs import count_prompt_pairs
from emberline.planner.traffic import Traffic
from emberline.planner.worker_kind import WorkerKind

MAX_WORKERS = 4096
MAX_UTILISATION = 0.97  # of prompt computation
MAX_KV_SHARE = 0.95  # of the KV cache that running requests may hold
P90_DEVIATIONS = 1.28  # standard deviations from the mean to the 90th percentile
FIXED_POINT_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """The estimated latencies of a pool of equal workers, and what limits it."""

    ttft_p90: float
    itl_p90: float
    decode_rows: float  # mean requests that decode in one engine
    is_stable: bool  # whether prompts and KV cache keep up with the traffic


UNSTABLE = LoadEstimate(math.inf, math.inf, math.inf, is_stable=False)


def prompt_seconds(kind: WorkerKind, tokens: float, cached_share: float) -> float:
    """Return the seconds in which an idle worker computes a prompt, in steps of at most `max_batch_tokens`."""
    start, end, seconds = int(tokens * cached_share), max(1, round(tokens)), 0.0
    start = min(start, end - 1)
    while start < end:
        count = min(kind.max_batch_tokens, end - start)
        seconds += kind.costs.step_seconds(0, 0.0, count, count_prompt_pairs(start, count))
        start += count
    return seconds


def estimate_colocated(kind: WorkerKind, workers: int, traffic: Traffic, slo: LatencyTargets) -> LoadEstimate:
    """Estimate workers that compute prompts and replies. Chunks of prompts are sized by the inter-token target."""
    engines = workers * kind.pp
    rate = traffic.rate / engines
    computed = traffic.mean_prompt * (1.0 - traffic.prefix_share)
    rows, context, step_s = 0.0, traffic.mean_context, 0.0
    for _ in range(FIXED_POINT_ROUNDS):
        budget = _prompt_budget(kind, rows, context, traffic, slo.itl_p90)
        if budget <= 0 or rows > _max_rows(kind, context):
            return UNSTABLE
        alone = _decode_step_s(kind, rows, context)
        token_s = (_mixed_step_s(kind, rows, context, budget, traffic) - alone) / budget
        if (busy := rate * computed * token_s) >= MAX_UTILISATION:
            return UNSTABLE
        step_s = max(alone, kind.costs.step_seconds(1, context)) / (1.0 - busy)
        rows += 0.5 * (rate * traffic.mean_output * step_s - rows)
    if _peak(rows) > _max_rows(kind, context):
        return UNSTABLE
    chunk_rate = budget / max(slo.itl_p90, step_s)  # prompt tokens per second of one engine
    service = computed / chunk_rate
    utilisation = rate * service
    if utilisation >= MAX_UTILISATION:
        return UNSTABLE
    first = traffic.p90_prompt * (1.0 - traffic.prefix_share) / chunk_rate
    wait = p90_wait(utilisation, engines, service, traffic.prompt_variation)
    mixed_share = rate * computed / budget * step_s  # of steps with prompts
    itl = slo.itl_p90 if mixed_share > 0.1 else _decode_step_s(kind, _peak(rows), context)
    return LoadEstimate(first + wait, max(itl, _decode_step_s(kind, _peak(rows), context)), rows, is_stable=True)


def estimate_prefill(kind: WorkerKind, workers: int, traffic: Traffic, handoff_s: float) -> LoadEstimate:
    """Estimate workers that compute prompts only, and hand their keys and values over in `handoff_s`."""
    engines = workers * kind.pp
    service = prompt_seconds(kind, traffic.mean_prompt, traffic.prefix_share)
    utilisation = traffic.rate * service / engines
    if utilisation >= MAX_UTILISATION:
        return UNSTABLE
    wait = p90_wait(utilisation, engines, service, traffic.prompt_variation)
    first = prompt_seconds(kind, traffic.p90_prompt, traffic.prefix_share)
    return LoadEstimate(first + wait + handoff_s, 0.0, 0.0, is_stable=True)


def estimate_decode(kind: WorkerKind, workers: int, traffic: Traffic) -> LoadEstimate:
    """Estimate workers that compute replies only."""
    rate, context, rows = traffic.rate / (workers * kind.pp), traffic.mean_context, 1.0
    for _ in range(FIXED_POINT_ROUNDS):
        rows += 0.5 * (rate * traffic.mean_output * _decode_step_s(kind, rows, context) - rows)
        if rows > 2 * _max_rows(kind, context):
            return UNSTABLE
    if _peak(rows) > _max_rows(kind, context):
        return UNSTABLE
    return LoadEstimate(0.0, _decode_step_s(kind, _peak(rows), context), rows, is_stable=True)


def fewest_workers(meets: Callable[[int], bool], limit: int = MAX_WORKERS) -> int | None:
    """Return the smallest number up to `limit` for which `meets` is true, if it is true for all larger ones."""
    high = 1
    while not meets(high):
        if high >= limit:
            return None
        high = min(2 * high, limit)
    low = high // 2 + 1 if high > 1 else 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle + 1, high)
    return high


def p90_wait(utilisation: float, servers: int, service_s: float, variation: float) -> float:
    """Return the 90th percentile of waiting in a queue before several servers, for random arrivals (Sakasegawa).

    `variation`: squared coefficient of variation of the service times."""
    power = utilisation ** (math.sqrt(2 * (servers + 1)) - 1)
    mean = (1 + variation) / 2 * power / (servers * (1 - utilisation)) * service_s
    probability = min(1.0, power)  # of waiting at all, about
    return 0.0 if probability <= 0.1 else mean / probability * math.log(probability / 0.1)


def _decode_step_s(kind: WorkerKind, rows: float, context: float) -> float:
    whole = max(1, math.ceil(rows))
    return kind.costs.step_seconds(whole, whole * context)


def _mixed_step_s(kind: WorkerKind, rows: float, context: float, tokens: int, traffic: Traffic) -> float:
    whole = math.ceil(rows)
    middle = traffic.mean_prompt * (1 + traffic.prefix_share) / 2  # mean context of the prompt tokens computed
    return kind.costs.step_seconds(whole, whole * context, tokens, tokens * middle)


def _prompt_budget(kind: WorkerKind, rows: float, context: float, traffic: Traffic, target_s: float) -> int:
    """Return how many prompt tokens fit into a step of `target_s`; 0: none."""
    low, high = 0, kind.max_batch_tokens
    while low < high:
        middle = (low + high + 1) // 2
        fits = _mixed_step_s(kind, rows, context, middle, traffic) <= target_s
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _peak(rows: float) -> float:
    """Return the 90th percentile of decoding requests, whose number varies as that of random arrivals does."""
    return rows + P90_DEVIATIONS * math.sqrt(rows)


def _max_rows(kind: WorkerKind, context: float) -> float:
    return min(kind.max_running, MAX_KV_SHARE * kind.kv_tokens / kind.pp / context)
