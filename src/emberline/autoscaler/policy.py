"""decide: how many workers each pool should have. A pure function of observations, state and time.

Two loops each compute a number of workers, and the larger number counts:
- The fast loop divides the present load by the load that one worker serves within the SLO, and raises the result for
  queues, KV cache use and latencies above the SLO.
- The predictive loop divides, in the same way, the load expected at the time when a worker started now becomes ready.

Missing workers are started at once. Workers are removed only down to the highest number that was needed during the
cool-down, so that the number does not go up and down with every fluctuation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from emberline.autoscaler.capacity import CapacityEstimate
from emberline.autoscaler.forecast import DemandForecast
from emberline.autoscaler.observation import PoolObservation
from emberline.autoscaler.settings import AutoscalerSettings, PoolSettings

MAX_KV_USAGE = 0.85  # above it, requests are preempted soon
MAX_SLOT_USAGE = 0.9
HIGH_PRESSURE = 0.85  # latency as a share of its SLO above which a fully loaded pool gets more workers
LATENCY_GROWTH = 0.1  # share of workers added because of latencies
LATENCY_DELAY_S = 15.0  # seconds until more workers show in the latencies
START_MARGIN = 0.1  # share of a worker by which the need may exceed the workers: a need of 3.1 is met by 3
# Added to the need before a worker is removed: with a need of 2.8, all of 4 workers are kept, as 3 may soon be too few.
REMOVAL_MARGIN = 0.3


@dataclass(frozen=True, slots=True)
class PoolState:
    """What the policy remembers of one pool between two decisions."""

    forecast: DemandForecast
    capacity: CapacityEstimate
    needs: tuple[tuple[float, int], ...] = ()  # time and number of workers to keep, during the cool-down
    idle_since: float | None = None
    correct_again_at: float = float("-inf")  # when latencies may cause the next correction
    is_slo_unreachable: bool = False


@dataclass(frozen=True, slots=True)
class PolicyState:
    pools: Mapping[str, PoolState] = field(default_factory=dict)
    started_at: float | None = None  # time of the first decision: nothing is removed before a cool-down has passed


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """How many workers a pool needs, before limits, and for which reason."""

    amount: float  # number of workers, with a fraction
    reason: str  # load, forecast, backlog, kv, slots, latency, waiting, idle

    @property
    def workers(self) -> int:
        return math.ceil(self.amount - START_MARGIN)

    @property
    def workers_to_keep(self) -> int:
        """The number of workers that may not be removed."""
        return math.ceil(self.amount + REMOVAL_MARGIN) if self.amount % 1 else round(self.amount)


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    desired: Mapping[str, int]  # workers by pool
    reasons: Mapping[str, str]  # why a pool needs its number of workers, by pool
    state: PolicyState


def decide_scaling(
    observations: Mapping[str, PoolObservation], state: PolicyState, now: float, settings: AutoscalerSettings
) -> ScalingDecision:
    """Return the number of workers that each pool should have now, and the state for the next call."""
    started_at = now if state.started_at is None else state.started_at
    pools: dict[str, PoolState] = {}
    desired: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for pool in settings.pools:
        seen = observations[pool.role]
        before = state.pools.get(pool.role) or _initial_state(pool, settings)
        pools[pool.role], need = _assess_pool(pool, seen, before, now, settings)
        current = seen.ready + seen.starting
        window_start = max(started_at, now - settings.cool_down)
        highest = max(number for time, number in pools[pool.role].needs if time >= window_start)
        is_filled = now - started_at >= settings.cool_down
        number = max(need.workers, min(current, highest if is_filled else current))
        desired[pool.role] = min(max(number, pool.min_workers), pool.max_workers)
        reasons[pool.role] = need.reason
    return ScalingDecision(_limit_gpus(desired, settings), reasons, PolicyState(pools, started_at))


def _initial_state(pool: PoolSettings, settings: AutoscalerSettings) -> PoolState:
    return PoolState(DemandForecast(settings.period), CapacityEstimate.from_stated(pool.capacity))


def _assess_pool(
    pool: PoolSettings, seen: PoolObservation, before: PoolState, now: float, settings: AutoscalerSettings
) -> tuple[PoolState, PoolNeed]:
    work = seen.prompt_rate + settings.decode_weight * seen.output_rate
    demand = work / (1 - min(seen.refused_share, 0.75))  # refused requests would have been work too
    forecast = before.forecast.with_demand(demand, now) if seen.has_rates else before.forecast
    pressure = _latency_pressure(pool, seen, settings)
    # One request for each worker and none waits: more workers would not be faster.
    unreachable = pressure > 1 and seen.open_requests <= seen.ready and not seen.waiting_requests
    capacity = before.capacity
    if seen.ready and not seen.starting and not unreachable:
        load = forecast.current_demand / seen.ready
        capacity = capacity.with_load(load, pressure or None, settings.utilisation, now)
    idle_since = (before.idle_since if before.idle_since is not None else now) if seen.is_idle else None
    after = replace(before, forecast=forecast, capacity=capacity, idle_since=idle_since, is_slo_unreachable=unreachable)
    need = _find_need(pool, seen, after, now, settings)
    is_high = pressure > 1 or (pressure > HIGH_PRESSURE and _is_loaded(seen, after, settings))
    if is_high and need.amount < seen.ready:  # not the moment to remove workers
        need = PoolNeed(seen.ready, "latency")
    can_correct = seen.ready and not seen.starting and not unreachable and now >= before.correct_again_at
    if is_high and can_correct:
        more = seen.ready + max(1, math.floor(LATENCY_GROWTH * seen.ready))
        need = max(need, PoolNeed(more, "latency"), key=lambda each: each.amount)
        after = replace(after, correct_again_at=now + settings.start_seconds + LATENCY_DELAY_S)
    kept = tuple(each for each in before.needs if each[0] >= now - settings.cool_down)
    return replace(after, needs=(*kept, (now, need.workers_to_keep))), need


def _is_loaded(observation: PoolObservation, state: PoolState, settings: AutoscalerSettings) -> bool:
    """Return whether the workers have about as much work as planned. If not, more workers would not lower latencies."""
    per_worker = state.capacity.work_per_s
    return per_worker is not None and state.forecast.fast >= 0.9 * settings.utilisation * per_worker * observation.ready


def _latency_pressure(pool: PoolSettings, observation: PoolObservation, settings: AutoscalerSettings) -> float:
    """Return the worst latency for which this pool is responsible, as a share of its SLO; 0 without requests.

    If there is a prefill pool, it is responsible for the time to first token, and the decode pool for the times between
    tokens."""
    has_prefill_pool = any(each.role == "prefill" for each in settings.pools)
    ttft = (observation.ttft_s or 0.0) / settings.slo.ttft_p90
    itl = (observation.itl_s or 0.0) / settings.slo.itl_p90
    if pool.role == "prefill":
        return ttft
    return itl if has_prefill_pool else max(ttft, itl)


def _find_need(
    pool: PoolSettings, seen: PoolObservation, state: PoolState, now: float, settings: AutoscalerSettings
) -> PoolNeed:
    is_empty = not (seen.ready or seen.starting)
    if state.idle_since is not None and (is_empty or now - state.idle_since >= settings.idle_time):
        return PoolNeed(0, "idle")
    needs = [PoolNeed(1, "load")]
    answers = pool.role != "prefill" or len(settings.pools) == 1
    if answers and seen.waiting_requests and not seen.ready:
        needs.append(PoolNeed(1, "waiting"))
    per_worker = state.capacity.work_per_s
    if per_worker is not None:
        planned = settings.utilisation * per_worker
        expected = state.forecast.predict(now, settings.start_seconds + settings.interval)
        needs += [PoolNeed(state.forecast.current_demand / planned, "load"), PoolNeed(expected / planned, "forecast")]
        if seen.ready:
            # Prompt tokens that would wait longer than the SLO must be computed soon, besides those that arrive.
            late_tokens = max(seen.prompt_backlog - seen.ready * per_worker * settings.slo.ttft_p90, 0.0)
            recovery_rate = late_tokens / max(settings.start_seconds, settings.slo.ttft_p90)
            needs.append(PoolNeed((state.forecast.current_demand + recovery_rate) / per_worker, "backlog"))
    needs.append(PoolNeed(seen.ready * seen.kv_usage / MAX_KV_USAGE, "kv"))
    if seen.slots and answers:
        taken = (seen.open_requests + seen.unassigned_requests) / seen.slots
        needs.append(PoolNeed(seen.ready * taken / MAX_SLOT_USAGE, "slots"))
    return max(needs, key=lambda each: each.amount)


def _limit_gpus(desired: Mapping[str, int], settings: AutoscalerSettings) -> dict[str, int]:
    """Return how many of the desired workers each pool may have within `max_gpus`.

    Each pool gets its minimum. Further workers are given one at a time, each to the pool that lacks the largest share
    of its desired workers."""
    pools = [pool for pool in settings.pools if pool.gpus]
    if settings.max_gpus is None or sum(desired[pool.role] * pool.gpus for pool in pools) <= settings.max_gpus:
        return dict(desired)
    given = dict(desired) | {pool.role: pool.min_workers for pool in pools}
    left = settings.max_gpus - sum(given[pool.role] * pool.gpus for pool in pools)
    while unmet := [pool for pool in pools if given[pool.role] < desired[pool.role] and pool.gpus <= left]:
        neediest = max(unmet, key=lambda pool: 1 - given[pool.role] / desired[pool.role])
        given[neediest.role] += 1
        left -= neediest.gpus
    return given
