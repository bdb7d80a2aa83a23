"""Formulas that estimate how many workers of a kind serve the traffic within the latency targets.

Step times are computed from the mean load, and waiting times with queueing theory. Both are approximations, good enough
to choose the topologies that are simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from emberline.core.step_costs import count_prompt_pairs
from emberline.planner.traffic import Traffic
from emberline.planner.worker_kind import WorkerKind

MAX_WORKERS = 4096
MAX_UTILISATION = 0.97  # highest share of its time in which a worker computes prompts
MAX_KV_SHARE = 0.95  # highest share of the KV cache that running requests may hold
P90_DEVIATIONS = 1.28  # standard deviations from the mean to the 90th percentile
# Up to this share of steps with prompts, the 90th percentile of step times is that of a step without prompts.
MAX_MIXED_STEPS = 0.1
MAX_ROUNDS, CONVERGED_SHARE = 400, 1e-4  # limits of the iteration to the steady state


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """The estimated latencies of a topology in seconds; infinite: the workers cannot keep up."""

    ttft_p90: float
    itl_p90: float
    decode_rows: float  # mean requests that decode in one engine
    is_stable: bool  # whether the workers keep up with the traffic at all


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


def estimate_colocated(kind: WorkerKind, workers: int, traffic: Traffic, itl_target_s: float) -> LoadEstimate:
    """Estimate the latencies of workers that compute prompts and replies, in steps of at most `itl_target_s`."""
    engines = workers * kind.pp
    rate, context = traffic.rate / engines, traffic.mean_context
    computed = traffic.mean_prompt * (1.0 - traffic.prefix_share)
    if (rows := _steady_rows(kind, rate, traffic)) is None:
        return UNSTABLE
    decode_s = _decode_step_s(kind, _p90_rows(rows), context)
    budget = _prompt_budget(kind, rows, traffic, itl_target_s)
    service = math.inf if budget <= 0 else computed * itl_target_s / budget
    if (utilisation := rate * service) >= MAX_UTILISATION:
        return LoadEstimate(math.inf, decode_s, rows, is_stable=True)
    first = traffic.p90_prompt * (1.0 - traffic.prefix_share) * itl_target_s / budget
    wait = p90_wait(utilisation, engines, service, traffic.prompt_variation)
    # Steps with prompts last up to the target; if they are few, the 90th percentile is a step without prompts.
    itl = max(itl_target_s, decode_s) if utilisation > MAX_MIXED_STEPS else decode_s
    return LoadEstimate(first + wait, itl, rows, is_stable=True)


def estimate_prefill(kind: WorkerKind, workers: int, traffic: Traffic, handoff_s: float) -> LoadEstimate:
    """Estimate the latencies of workers that only compute prompts, and then send their KV blocks in `handoff_s`."""
    engines = workers * kind.pp
    service = prompt_seconds(kind, traffic.mean_prompt, traffic.prefix_share)
    utilisation = traffic.rate * service / engines
    if utilisation >= MAX_UTILISATION:
        return UNSTABLE
    wait = p90_wait(utilisation, engines, service, traffic.prompt_variation)
    first = prompt_seconds(kind, traffic.p90_prompt, traffic.prefix_share)
    return LoadEstimate(first + wait + handoff_s, 0.0, 0.0, is_stable=True)


def estimate_decode(kind: WorkerKind, workers: int, traffic: Traffic) -> LoadEstimate:
    """Estimate the latencies of workers that only compute replies."""
    rows = _steady_rows(kind, traffic.rate / (workers * kind.pp), traffic, computes_prompts=False)
    if rows is None:
        return UNSTABLE
    return LoadEstimate(0.0, _decode_step_s(kind, _p90_rows(rows), traffic.mean_context), rows, is_stable=True)


def _steady_rows(kind: WorkerKind, rate: float, traffic: Traffic, *, computes_prompts: bool = True) -> float | None:
    """Return how many requests decode in an engine at the same time, on average.

    In the steady state, a step computes as many tokens as arrive during the step. Return None if there is no steady
    state, or if it exceeds a limit of the engine."""
    computed = traffic.mean_prompt * (1.0 - traffic.prefix_share) * computes_prompts
    context, limit = traffic.mean_context, _max_rows(kind, traffic.mean_context)
    step_s, rows = 0.0, 0.0
    for _ in range(MAX_ROUNDS):
        before = step_s
        tokens = rate * computed * step_s
        pairs = tokens * traffic.mean_prompt_context
        step_s = kind.costs.step_seconds(max(1, round(rows)), max(1.0, rows) * context, round(tokens), pairs)
        rows = rate * traffic.mean_output * step_s
        if _p90_rows(rows) > limit or tokens > kind.max_batch_tokens:
            return None
        if step_s - before < CONVERGED_SHARE * step_s:
            return rows
    return None


def find_fewest_workers(meets: Callable[[int], bool], limit: int = MAX_WORKERS) -> int | None:
    """Return the smallest number from 1 to `limit` for which `meets` is true, or None if there is none.

    If `meets` is true for a number, it must be true for all larger numbers."""
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
    """Return the 90th percentile of the waiting time in a queue for several servers (Sakasegawa's approximation).

    `variation`: squared coefficient of variation of the service times."""
    power = utilisation ** (math.sqrt(2 * (servers + 1)) - 1)
    mean = (1 + variation) / 2 * power / (servers * (1 - utilisation)) * service_s
    probability = min(1.0, power)  # probability that a request has to wait at all, about
    return 0.0 if probability <= 0.1 else mean / probability * math.log(probability / 0.1)


def _decode_step_s(kind: WorkerKind, rows: float, context: float) -> float:
    whole = max(1, math.ceil(rows))
    return kind.costs.step_seconds(whole, whole * context)


def _prompt_budget(kind: WorkerKind, rows: float, traffic: Traffic, target_s: float) -> int:
    """Return how many prompt tokens fit into a step of `target_s`; 0: none."""
    whole, low, high = math.ceil(rows), 0, kind.max_batch_tokens
    while low < high:
        tokens = (low + high + 1) // 2
        pairs = tokens * traffic.mean_prompt_context
        fits = kind.costs.step_seconds(whole, whole * traffic.mean_context, tokens, pairs) <= target_s
        low, high = (tokens, high) if fits else (low, tokens - 1)
    return low


def _p90_rows(rows: float) -> float:
    """Return the 90th percentile of the number of decoding requests, which is about Poisson distributed."""
    return rows + P90_DEVIATIONS * math.sqrt(rows)


def _max_rows(kind: WorkerKind, context: float) -> float:
    return min(kind.max_running, MAX_KV_SHARE * kind.kv_tokens / kind.pp / context)
