"""Reports of the engine: Output for requests, Stats for engines, and SleepStats for models.

Timing defines time to first token and the other latencies for the whole project."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from emberline.core.handoff import BlockPull
from emberline.core.plan import TokenLogprob
from emberline.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one request in seconds on the engine's clock; the properties are durations in seconds."""

    arrival: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    pulled: BlockPull | None = None  # blocks copied from another engine; None: there were none to copy

    @property
    def queue(self) -> float | None:
        return None if self.admitted is None else self.admitted - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token, from arrival and thus including the wait in the queue."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def prefill(self) -> float | None:
        if self.first_token is None or self.admitted is None:
            return None
        return self.first_token - self.admitted

    @property
    def decode(self) -> float | None:
        if self.finished is None or self.first_token is None:
            return None
        return self.finished - self.first_token

    @property
    def e2e(self) -> float | None:
        return None if self.finished is None else self.finished - self.arrival


@dataclass(slots=True)  # not frozen, which would slow down creation: one is made for every token
class Output:
    """New tokens of one completion, its end, or both. Only the last Output of a completion has `finish`."""

    id: str  # of the submission
    index: int = 0  # which of its n completions
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token, if requested
    prompt_logprobs: list[TokenLogprob] | None = None  # of all prompt tokens but the first; with the first output only
    cached_tokens: int = 0
    finish: FinishReason | None = None
    stop_token: int | None = None  # the stop or EOS id that ended the completion, the last of `tokens`
    error: str | None = None
    timing: Timing | None = None  # with the first and the last output only
    ticket: dict[str, Any] | None = None  # where its published blocks can be read: once early, and with the last output
    drafted_tokens: int = 0  # verified by speculative decoding since the output before
    accepted_tokens: int = 0  # drafted tokens that became output since then


@dataclass(slots=True)
class SleepStats:
    """How often a model was woken and put to sleep, how long that took, and how many bytes were copied."""

    wakes: int = 0
    wake_seconds: float = 0.0
    wake_bytes: int = 0
    sleeps: int = 0
    sleep_seconds: float = 0.0
    sleep_bytes: int = 0


BlockSample = tuple[str, float]  # which of lifetime, idle_before_evict and reuse_gap of a KV block; seconds


@dataclass(slots=True)
class TierStats:
    """Statistics of one KV tier (main memory, disk or store) below the KV cache.

    `on`, `blocks` and `capacity` are current values. All other fields are counters since the engine started."""

    on: bool = True
    blocks: int = 0
    capacity: int = 0
    hit_tokens: int = 0  # tokens that requests did not have to compute
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    stored_blocks: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    evicted_blocks: int = 0
    dropped_blocks: int = 0  # blocks not stored, because a request would have had to wait for that
    damaged_blocks: int = 0  # blocks found truncated, corrupted or of another format, and removed
    errors: int = 0

    def copy(self) -> TierStats:
        return replace(self)


@dataclass(slots=True)
class TransferStats:
    """Statistics of KV transfers between engines.

    The fields from `leases` on are current values. All fields before it are counters since the engine started."""

    pulls: int = 0  # pulls that ended, successful or not
    pulled_bytes: int = 0
    pull_seconds: float = 0.0  # includes waiting for blocks that the peer had not computed yet
    copy_seconds: float = 0.0  # part of pull_seconds in which bytes moved
    hidden_seconds: float = 0.0  # part of copy_seconds in which the peer was still computing
    pull_failures: dict[str, int] = field(default_factory=dict)  # by code of kv.transfer.errors
    reached: dict[str, int] = field(default_factory=dict)  # connected peers, by transport
    passed_over: dict[str, int] = field(default_factory=dict)  # failed connection attempts, by preferred transport
    verified_blocks: int = 0  # pulled blocks whose checksum was compared
    hit_tokens: int = 0  # tokens that requests did not have to compute
    recomputed: int = 0  # requests that recomputed tokens after a failed pull
    published: int = 0  # published requests
    published_blocks: int = 0
    sent_bytes: int = 0
    ended: dict[str, int] = field(default_factory=dict)  # ended leases, by reason
    leases: int = 0  # open leases
    pinned_blocks: int = 0  # blocks pinned by leases
    pinned_by_age: dict[str, int] = field(default_factory=dict)  # pinned blocks, by seconds since the lease began
    oldest_lease: float = 0.0  # seconds
    quarantined_blocks: int = 0  # blocks that an abandoned pull may still write to, and that are not reused until then

    @staticmethod
    def total(stats_per_engine: Iterable[TransferStats]) -> TransferStats | None:
        """Return the sum of the statistics of several engines; None if there are none."""
        every = list(stats_per_engine)
        if not every:
            return None
        counters = ("pull_failures", "reached", "passed_over", "ended", "pinned_by_age")
        sums: dict[str, Any] = {
            name: sum(getattr(one, name) for one in every) for name in TransferStats.__slots__ if name not in counters
        }
        for name in counters:
            sums[name] = dict(sum((Counter(getattr(one, name)) for one in every), Counter()))
        sums["oldest_lease"] = max(one.oldest_lease for one in every)
        return TransferStats(**sums)

    def copy(self) -> TransferStats:
        return replace(self, pull_failures=dict(self.pull_failures), ended=dict(self.ended))


@dataclass(slots=True)
class SpeculationStats:
    """Counters of speculative decoding since the engine started."""

    drafts: int = 0  # drafts that were verified, each of one or more tokens
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)  # by position in the draft, from 0

    @staticmethod
    def total(stats_per_engine: Iterable[SpeculationStats]) -> SpeculationStats | None:
        """Return the sum of the statistics of several engines; None if there are none."""
        every = list(stats_per_engine)
        if not every:
            return None
        return SpeculationStats(
            sum(one.drafts for one in every),
            sum(one.drafted_tokens for one in every),
            sum(one.accepted_tokens for one in every),
            list(map(sum, zip_longest(*(one.accepted_per_position for one in every), fillvalue=0))),
        )


@dataclass(slots=True)
class ExpertStats:
    """How evenly the work of experts is spread over the ranks of an engine with expert parallelism.

    A row is one token of a step, which is sent to the ranks that have its experts."""

    rows: list[int] = field(default_factory=list)  # by rank, since the start: pairs of a row and one of its experts
    imbalance: float = 1.0  # recent rows of the busiest rank of each layer, divided by the mean of all ranks
    moved: int = 0  # experts that ranks loaded because the load had changed, since the start

    @staticmethod
    def total(stats_per_engine: Iterable[ExpertStats]) -> ExpertStats | None:
        """Return the sums of the counters and the largest imbalance; None if there are no engines."""
        every = list(stats_per_engine)
        if not every:
            return None
        rows = list(map(sum, zip_longest(*(one.rows for one in every), fillvalue=0)))
        return ExpertStats(rows, max(one.imbalance for one in every), sum(one.moved for one in every))


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the start and current gauges of one engine, for /metrics and the charts."""

    step: int = 0
    running: int = 0
    loading: int = 0  # part of running: requests that wait for blocks from a lower tier or another engine
    waiting: int = 0
    asleep: int = 0  # part of waiting: requests whose model sleeps
    deferred: int = 0  # part of waiting: requests whose sibling computes their common prompt
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found there
    prompt_tokens: int = 0  # prompt tokens computed
    generated_tokens: int = 0
    step_tokens: int = 0  # of the last step
    step_seconds: float = 0.0  # of the last step
    busy_seconds: float = 0.0  # time in the runner, all steps
    cpu_seconds: float = 0.0  # CPU time of the engine process, all threads
    host_seconds: float = 0.0  # time of the engine loop outside the runner
    residency: list[BlockSample] = field(default_factory=list)  # samples since the last report
    tiers: dict[str, TierStats] = field(default_factory=dict)  # tiers below the main cache, by name
    transfer: TransferStats | None = None  # None: the engine exchanges no blocks
    speculation: SpeculationStats | None = None  # None: the engine does not draft tokens
    experts: ExpertStats | None = None  # None: no rows are sent to experts of other ranks

    @staticmethod
    def total(stats_per_engine: Iterable[Stats]) -> Stats:
        """Return the sum of the statistics of all engines of one process.

        `residency` and `tiers` are left empty. `step_tokens` and `step_seconds` are sums over the latest step of each
        engine. `cpu_seconds` is not summed, because all engines report that of the whole process."""
        every = list(stats_per_engine)
        not_summed = ("residency", "tiers", "transfer", "speculation", "experts")
        sums = {name: sum(getattr(one, name) for one in every) for name in Stats.__slots__ if name not in not_summed}
        sums["cpu_seconds"] = max((one.cpu_seconds for one in every), default=0.0)  # all report the same process
        transfer = TransferStats.total(one.transfer for one in every if one.transfer is not None)
        speculation = SpeculationStats.total(one.speculation for one in every if one.speculation is not None)
        experts = ExpertStats.total(one.experts for one in every if one.experts is not None)
        return Stats(**sums, transfer=transfer, speculation=speculation, experts=experts)

    @property
    def kv_usage(self) -> float:
        used = self.blocks_total - self.blocks_free - self.blocks_cached
        return used / self.blocks_total if self.blocks_total else 0.0
