"""SimResult: the measurements of a simulated run. Distribution: a histogram with bins of 0.5 %."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal

BIN_WIDTH = math.log(1.005)
SMALLEST_VALUE = 1e-9  # seconds; everything below is counted there

SimOutcome = Literal["answered", "refused", "failed", "too_long"]


@dataclass(slots=True)
class Distribution:
    """Counts values by bins, each 0.5 % wider than the one before, so quantiles are exact to 0.25 %."""

    count: int = 0
    total: float = 0.0
    _bins: Counter[int] = field(default_factory=Counter)

    def add(self, value: float, count: int = 1) -> None:
        self.count += count
        self.total += value * count
        self._bins[round(math.log(max(value, SMALLEST_VALUE)) / BIN_WIDTH)] += count

    def merge(self, other: Distribution) -> None:
        self.count += other.count
        self.total += other.total
        self._bins.update(other._bins)

    def counts_by_value(self) -> Iterator[tuple[float, int]]:
        """Yield each value, rounded to its bin, with the number of times that it was added."""
        for number, count in self._bins.items():
            yield math.exp(number * BIN_WIDTH), count

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def quantile(self, fraction: float) -> float:
        """Return the value that `fraction` of all values do not exceed; NaN if there are none."""
        wanted = min(int(self.count * fraction), self.count - 1)
        for number in sorted(self._bins):
            wanted -= self._bins[number]
            if wanted < 0:
                return math.exp(number * BIN_WIDTH)
        return math.nan


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The outcome and the times of one request, in virtual seconds."""

    arrived_at: float
    first_token_at: float | None
    finished_at: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int  # tokens that the client received
    worker: str  # worker that answered last; "": none
    prefill_worker: str  # worker that computed the prompt for it; "": none
    # refused: all workers were full; failed: no worker could serve or continue it; too_long: for the KV cache
    outcome: SimOutcome
    moves: int  # times that another worker continued it

    @property
    def mean_inter_token_s(self) -> float | None:
        """The mean time between its tokens; None if it has fewer than two."""
        if self.first_token_at is None or self.output_tokens < 2:
            return None
        return (self.finished_at - self.first_token_at) / (self.output_tokens - 1)


@dataclass(slots=True)
class SimResult:
    """The measurements of one simulated run.

    Latencies cover the tokens that clients received, even if the request failed later."""

    requests: int = 0  # answered
    refused: int = 0  # all workers were full
    failed: int = 0  # no worker was available
    too_long: int = 0  # prompt and reply do not fit into a worker's KV cache
    moved: int = 0  # times that a request was continued or started again at another worker
    handoffs: int = 0  # prompts that prefill workers computed
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    oracle_tokens: int = 0  # prompt tokens that an unlimited cache, shared by all workers, would have contained
    working_set: int = 0  # largest number of tokens of conversations that were active at the same time
    ttft_seconds: Distribution = field(default_factory=Distribution)
    inter_token_seconds: Distribution = field(default_factory=Distribution)
    load_imbalance: Distribution = field(default_factory=Distribution)  # maximum over mean of the workers' open tokens
    conversations_by_worker: Counter[str] = field(default_factory=Counter)  # conversations that started at each worker
    worker_seconds: float = 0.0  # time of all workers together, each from its start to its end, start-up included
    busy_seconds: float = 0.0  # time of all steps of all workers
    seconds: float = 0.0

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def oracle_cached_share(self) -> float:
        return self.oracle_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def conversation_imbalance(self, worker_count: int) -> float:
        """Return the largest number of conversations at one worker, divided by the mean over all workers."""
        return max(self.conversations_by_worker.values()) * worker_count / sum(self.conversations_by_worker.values())

    def record_request(self, record: RequestRecord) -> None:
        """Count a request that has ended. Its latencies are recorded token by token."""
        match record.outcome:
            case "refused":
                self.refused += 1
            case "failed":
                self.failed += 1
            case "too_long":
                self.too_long += 1
            case "answered":
                self.requests += 1
                self.prompt_tokens += record.prompt_tokens
                self.cached_tokens += record.cached_tokens
                self.output_tokens += record.output_tokens

    def merge(self, other: SimResult) -> None:
        """Add the measurements of another cluster, whose run lasted as long as this one."""
        for each in fields(self):
            ours, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(ours, Distribution):
                ours.merge(theirs)
            elif isinstance(ours, Counter):
                ours.update(theirs)
            else:
                setattr(self, each.name, max(ours, theirs) if each.name == "seconds" else ours + theirs)
