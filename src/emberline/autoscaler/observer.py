"""StatusObserver: turns the router's status documents into observations for the policy.

The status has counters since each worker's start. The observer subtracts the counters of the previous status from them,
and keeps the latency histograms of the last half minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from emberline.autoscaler.counter_growth import CounterGrowth
from emberline.autoscaler.observation import PoolObservation
from emberline.autoscaler.pool_workers import PoolWorkers, StatusRow

LATENCY_WINDOW_S = 30.0


class StatusObserver:
    def __init__(self) -> None:
        self._latencies: deque[tuple[float, Mapping[str, Sequence[int]]]] = deque()
        self._growth = CounterGrowth()
        self._in_flight: dict[str, tuple[float, float]] = {}  # prompt and output tokens in flight, by role
        self._refused = 0
        self._observed_at: float | None = None

    def observe(
        self, status: Mapping[str, Any], pools: Mapping[str, PoolWorkers], now: float, models: Collection[str] = ()
    ) -> dict[str, PoolObservation]:
        """Return an observation of each pool. `pools` was made from the same status, and for the same `models`."""
        ttft_s, itl_s = self._update_latencies(status["latency"], now)
        answered = {row["name"]: self._count_growth(row, "answered", now) for row in status["workers"]}
        refused_share = self._update_refused_share(sum(answered.values()), status["refused"])
        seconds = 0.0 if self._observed_at is None else now - self._observed_at
        observations = {}
        for role, pool in pools.items():
            rows = [*pool.ready, *pool.draining]
            prompt_rate, output_rate = self._update_rates(role, rows, seconds, now)
            is_answering = role != "prefill" or len(pools) == 1
            unassigned = _count_unassigned(status, models) if is_answering else 0
            observations[role] = PoolObservation(
                ready=len(pool.ready),
                starting=len(pool.starting),
                asleep=len(pool.asleep),
                open_requests=sum(map(count_open, rows)),
                waiting_requests=sum(map(_count_waiting, rows)) + unassigned,
                unassigned_requests=unassigned,
                answered_requests=sum(answered[row["name"]] for row in rows),
                refused_share=refused_share if is_answering else 0.0,
                slots=sum(row["max_running"] for row in pool.ready),
                prompt_backlog=self._in_flight[role][0],
                kv_usage=sum(row["kv_usage"] for row in pool.ready) / max(len(pool.ready), 1),
                has_rates=seconds > 0,
                prompt_rate=prompt_rate,
                output_rate=output_rate,
                ttft_s=ttft_s,
                itl_s=itl_s,
            )
        self._observed_at = now
        self._growth.forget_old(now)
        return observations

    def _count_growth(self, row: StatusRow, name: str, now: float) -> int:
        """Return by how much a worker's counter has grown since the last observation.

        If the worker is new, its whole counter is growth, except in the observer's first observation: then the worker
        may have done its work long before."""
        run = "" if name == "answered" else row["incarnation"]  # the router counts answers for all runs of a worker
        first_growth = 0 if self._observed_at is None else row[name]
        return self._growth.record((row["name"], run, name), row[name], now, first_growth=first_growth)

    def _update_rates(self, role: str, rows: Sequence[StatusRow], seconds: float, now: float) -> tuple[float, float]:
        """Return the prompt tokens and the output tokens per second of the requests that arrived.

        These are the tokens computed since the last observation, plus the growth of the tokens in flight."""
        prompt_tokens = sum(self._count_growth(row, "prompt_tokens", now) for row in rows)
        output_tokens = sum(self._count_growth(row, "generated_tokens", now) for row in rows)
        in_flight = (sum(row["prefill_tokens"] for row in rows), sum(row["decode_tokens"] for row in rows))
        before_in_flight = self._in_flight.get(role, in_flight)
        self._in_flight[role] = in_flight
        if not seconds:
            return 0.0, 0.0
        return (
            max(prompt_tokens + in_flight[0] - before_in_flight[0], 0.0) / seconds,
            max(output_tokens + in_flight[1] - before_in_flight[1], 0.0) / seconds,
        )

    def _update_refused_share(self, new_answered: int, refused: int) -> float:
        new_refused = max(refused - self._refused, 0)
        self._refused = refused
        return new_refused / (new_answered + new_refused) if new_refused and self._observed_at is not None else 0.0

    def _update_latencies(self, latency: Mapping[str, Any], now: float) -> tuple[float | None, float | None]:
        """Return the 90th percentiles of the time to first token and between tokens, over LATENCY_WINDOW_S."""
        if self._latencies:
            last = self._latencies[-1][1]
            if last["bounds_s"] != latency["bounds_s"] or sum(latency["inter_token"]) < sum(last["inter_token"]):
                self._latencies.clear()  # the router was restarted, perhaps with another release
        self._latencies.append((now, latency))
        while len(self._latencies) > 2 and self._latencies[1][0] <= now - LATENCY_WINDOW_S:
            self._latencies.popleft()
        oldest, bounds = self._latencies[0][1], latency["bounds_s"]
        ttft_s, itl_s = (estimate_p90(bounds, oldest[name], latency[name]) for name in ("first_token", "inter_token"))
        return ttft_s, itl_s


def _count_unassigned(status: Mapping[str, Any], models: Collection[str]) -> int:
    """Return how many requests at the router wait for a worker with one of the models, or with any model."""
    if not models or "waiting_by_model" not in status:  # the router is of an earlier release
        return int(status["waiting_requests"])
    return sum(count for name, count in status["waiting_by_model"].items() if not name or name in models)


def count_open(row: StatusRow) -> int:
    """Return how many requests are open at a worker, including those of other routers."""
    return int(row["open"]) + int(row["open_by_other_routers"])


def _count_waiting(row: StatusRow) -> int:
    return max(int(row["waiting"]), count_open(row) - int(row["max_running"]), 0)


def estimate_p90(bounds_s: Sequence[float], before: Sequence[int], after: Sequence[int]) -> float | None:
    """Return the 90th percentile of the values that a histogram has counted since `before`; None if it has none.

    `before` and `after`: the counts of its buckets. The values in a bucket are assumed to be spread evenly over it."""
    counts = [new - old for old, new in zip(before, after, strict=True)]
    rank = 0.9 * sum(counts)
    for i, count in enumerate(counts):
        if count and rank <= count:
            lower = bounds_s[i - 1] if i else 0.0
            return lower + (bounds_s[i] - lower) * rank / count if i < len(bounds_s) else lower
        rank -= count
    return None
