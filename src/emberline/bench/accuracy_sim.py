"""The simulated side of `emberline bench sim-accuracy`: the same requests on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from emberline.bench.accuracy_load import LoadResult, LoadShape, TimedRequest
from emberline.core.config import RouterConfig
from emberline.core.errors import EmberlineError
from emberline.core.plan import StepPlan
from emberline.core.step_costs import StepCostTable, sum_work
from emberline.sim.choosers import choose_worker_by_policy
from emberline.sim.cluster import SimCluster, SimClusterConfig
from emberline.sim.link import KVLink
from emberline.sim.prompt import PromptSegment, SimPromptBuilder
from emberline.sim.result import Distribution, RequestRecord
from emberline.sim.sessions import SingleRequest
from emberline.sim.worker_config import SimWorkerConfig

WARM_UP_INTERVAL_S = 100.0  # between two of the requests that run alone first
FIRST_RATE = 4.0  # requests per second, with which the search for the capacity begins
CAPACITY_RUN_S = 180.0  # virtual time, of which the first third is a warm-up
MAX_SERVED_SHARE = 0.75  # of the arrivals. If a larger share is served, the cluster may not be full
TRIED_CHUNK_S = (0.0, 1e-3, 2e-3, 4e-3, 6e-3, 9e-3, 12e-3)
INSTANT_BYTES_PER_S = 1e15  # the time of copies is part of the measured overhead of a handoff


class ExactDistribution(Distribution):
    """Keeps each value, so that its quantiles are computed in the same way as those of measured latencies."""

    def __init__(self) -> None:
        super().__init__()
        self._values: list[float] = []

    def add(self, value: float, count: int = 1) -> None:
        super().add(value, count)
        self._values += [value] * count

    def quantile(self, fraction: float) -> float:
        return float(np.quantile(self._values, fraction)) if self._values else math.nan


@dataclass(frozen=True, slots=True)
class HostOverheads:
    """The seconds that a cluster's CPU work adds to the compute times of the cost table, by cause."""

    step_s: float = 0.0  # to every step: planning, sampling, messages
    row_s: float = 0.0  # to a step for each request that decodes in it
    chunk_s: float = 0.0  # to a step for each prompt of which it computes a part: admission, copies of blocks
    prefill_chunk_s: float = 0.0  # `chunk_s` of prefill workers, which send blocks instead of copying them
    request_s: float = 0.0  # to the first token: HTTP, router, tokenizer, messages between processes
    handoff_s: float = 0.0  # to the first token, if another worker has computed the prompt


@dataclass(frozen=True, slots=True)
class HostedSteps:
    """Step costs for the simulator: those of a table plus the overheads of the host."""

    table: StepCostTable
    overheads: HostOverheads

    @property
    def plans_ahead(self) -> bool:
        return self.table.plans_ahead

    def estimate_step_seconds(self, plan: StepPlan) -> float:
        rows, context, prompt, pairs = sum_work(plan.work)
        num_chunks = sum(len(item.tokens) - item.num_draft > 1 for item in plan.work)
        return self.step_seconds(rows, context, prompt, pairs) + self.overheads.chunk_s * num_chunks

    def step_seconds(
        self, decode_rows: int, decode_context: float, prompt_tokens: int = 0, prompt_pairs: float = 0
    ) -> float:
        """Return the seconds of a step. The overhead of each prompt (`chunk_s`) is not included."""
        seconds = self.table.step_seconds(decode_rows, decode_context, prompt_tokens, prompt_pairs)
        return seconds + self.overheads.step_s + self.overheads.row_s * decode_rows


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """The properties of a cluster that the simulator needs."""

    table: StepCostTable
    workers: int
    prefill_workers: int
    split_tokens: float
    max_running: int
    batch_tokens: int
    kv_tokens: int

    def simulate(
        self, requests: Sequence[TimedRequest], overheads: HostOverheads, warm_up: Sequence[TimedRequest] = ()
    ) -> LoadResult:
        """Return the latencies of `requests`. `warm_up`: requests that run before them, one at a time."""
        cluster, ended, begin = self._build(overheads), list[RequestRecord](), WARM_UP_INTERVAL_S * len(warm_up)
        cluster.observers.append(ended.append)
        cluster.call_at(begin, lambda: _reset_latencies(cluster))
        alone = [replace(each, due=WARM_UP_INTERVAL_S * i) for i, each in enumerate(warm_up)]
        result = cluster.run(_make_sessions([*alone, *(replace(each, due=begin + each.due) for each in requests)]))
        if failed := [record for record in ended if record.outcome != "answered"]:
            raise EmberlineError(f"{len(failed)} simulated requests were {failed[0].outcome}", hint="lower the load")
        records = [record for record in ended if record.arrived_at >= begin]
        firsts = [(record.first_token_at or math.nan) - record.arrived_at + overheads.request_s for record in records]
        first, last = min(r.arrived_at for r in records), max(r.finished_at for r in records)
        rate = sum(record.output_tokens for record in records) / (last - first + overheads.request_s)
        itl = result.inter_token_seconds
        ttft_p50, ttft_p90 = np.percentile(firsts, (50, 90)).tolist()
        return LoadResult(ttft_p50, ttft_p90, itl.quantile(0.5), itl.quantile(0.9), rate, itl.mean, fmean(firsts))

    def fit(
        self,
        requests: Sequence[TimedRequest],
        overheads: HostOverheads,
        warm_up: Sequence[TimedRequest],
        itl_mean: float,
        ttft_mean: float,
    ) -> HostOverheads:
        """Return `overheads` with `chunk_s` and `prefill_chunk_s` fitted to measured mean latencies.

        With these times for each prompt, the simulated `requests` have the mean inter-token time `itl_mean` and, if the
        cluster has prefill workers, the mean time to first token `ttft_mean`. In that case, `overheads` must contain a
        first value of `prefill_chunk_s`, from another cluster; otherwise `prefill_chunk_s` stays as it is."""
        overheads = replace(overheads, chunk_s=self.fit_chunk_overhead(requests, overheads, warm_up, itl_mean))
        if not self.prefill_workers:
            return overheads
        return replace(overheads, prefill_chunk_s=self.fit_prefill_overhead(requests, overheads, warm_up, ttft_mean))

    def fit_chunk_overhead(
        self, requests: Sequence[TimedRequest], overheads: HostOverheads, warm_up: Sequence[TimedRequest], real: float
    ) -> float:
        """Return the `chunk_s` for which the simulated mean inter-token time of `requests` equals `real`."""
        means = [self.simulate(requests, replace(overheads, chunk_s=s), warm_up).itl_mean for s in TRIED_CHUNK_S]
        return _fit_to_curve(means, real)

    def fit_prefill_overhead(
        self, requests: Sequence[TimedRequest], overheads: HostOverheads, warm_up: Sequence[TimedRequest], real: float
    ) -> float:
        """Return the `prefill_chunk_s` for which the simulated mean time to the first token equals `real`."""
        tried = [replace(overheads, prefill_chunk_s=seconds) for seconds in TRIED_CHUNK_S]
        return _fit_to_curve([self.simulate(requests, each, warm_up).ttft_mean for each in tried], real)

    def capacity(self, shape: LoadShape, overheads: HostOverheads) -> float:
        """Return the requests per second that the cluster serves when it is overloaded."""
        rate = FIRST_RATE
        while (served := self._served_rate(shape, overheads, rate)) > MAX_SERVED_SHARE * rate:
            rate *= 2
        return served

    def _served_rate(self, shape: LoadShape, overheads: HostOverheads, rate: float) -> float:
        """Return how many requests per second end while `rate` requests per second arrive."""
        cluster, ends = self._build(overheads), list[float]()

        def record_end(record: RequestRecord) -> None:
            if record.outcome == "answered":
                ends.append(record.finished_at)

        cluster.observers.append(record_end)
        cluster.run(_make_sessions(shape.draw_poisson(rate, CAPACITY_RUN_S, seed=1)), until=CAPACITY_RUN_S)
        return sum(end > CAPACITY_RUN_S / 3 for end in ends) / (CAPACITY_RUN_S * 2 / 3)

    def _build(self, overheads: HostOverheads) -> SimCluster:
        prefill_overheads = replace(overheads, chunk_s=overheads.prefill_chunk_s)
        limits: dict[str, Any] = {
            "kv_tokens": self.kv_tokens,
            "max_running": self.max_running,
            "batch_tokens": self.batch_tokens,
        }
        config = SimClusterConfig(
            **limits,
            cost=HostedSteps(self.table, overheads),
            prefill=SimWorkerConfig(**limits, cost=HostedSteps(self.table, prefill_overheads)),
            workers=self.workers,
            prefill_workers=self.prefill_workers,
            link=KVLink(bytes_per_second=INSTANT_BYTES_PER_S, latency_s=overheads.handoff_s),
            kv_bytes_per_token=1.0,
        )
        return SimCluster(config, choose_worker_by_policy, router=RouterConfig(split_tokens=self.split_tokens))


def _fit_to_curve(means: Sequence[float], real: float) -> float:
    """Return the overhead of a prompt in seconds at which the latency, fitted as a parabola, equals `real`.

    The parabola is fitted to `means`, the mean latencies for all values in TRIED_CHUNK_S. Interpolation between two
    values would be too noisy, since each of them may happen to delay a prompt by a whole step. A straight line would
    not fit, since requests wait more than twice as long with twice the overhead. The result lies within the tried
    values, because the parabola is not valid outside of them."""
    curve = np.poly1d(np.polyfit(TRIED_CHUNK_S, means, 2))
    times = np.linspace(TRIED_CHUNK_S[0], TRIED_CHUNK_S[-1], 1201)
    if curve(times[-1]) <= curve(times[0]):
        hint = "use more requests"
        raise EmberlineError("the simulated times do not grow with the time for each prompt", hint=hint)
    return float(times[np.argmin(np.abs(curve(times) - real))])


def _make_sessions(requests: Sequence[TimedRequest]) -> list[SingleRequest]:
    sessions = []
    for i, request in enumerate(requests):
        builder = SimPromptBuilder()
        builder.add(PromptSegment(f"prompt-{i}", len(request.prompt)))
        sessions.append(
            SingleRequest(request.due, builder.build_request(f"r{i}", PromptSegment(f"reply-{i}", request.output)))
        )
    return sessions


def _reset_latencies(cluster: SimCluster) -> None:
    cluster.result.inter_token_seconds = ExactDistribution()
