"""What the engine tells its clients: Outputs of requests, Stats of itself, Turns of its models. The one
definition of TTFT and its kin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from emberline.core.handoff import Pulled
from emberline.core.plan import TokenLogprob
from emberline.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one request's life, on the engine's clock."""

    arrival: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    pulled: Pulled | None = None  # None: nothing was to be had elsewhere

    @property
    def queue(self) -> float | None:
        return None if self.admitted is None else self.admitted - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token: from arrival, queueing included."""
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


@dataclass(slots=True)  # not frozen: one is made for every token
class Output:
    """New tokens of one completion, or its end, or both. Exactly one Output of a completion has `finish`."""

    id: str  # the submission's
    index: int = 0  # which of its n completions
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token when asked for
    prompt_logprobs: list[TokenLogprob] | None = None  # of prompt tokens 1.., once, with the first output
    cached_tokens: int = 0
    finish: FinishReason | None = None
    stop_token: int | None = None  # the stop or eos id that ended it, which is the last of `tokens`
    error: str | None = None
    timing: Timing | None = None  # with the first and the last
    ticket: dict[str, Any] | None = None  # where its blocks can be had, if it is published: once early, and at its end


@dataclass(slots=True)
class Turns:
    """What a model's turns on a device have cost so far."""

    wakes: int = 0
    wake_seconds: float = 0.0
    wake_bytes: int = 0
    sleeps: int = 0
    sleep_seconds: float = 0.0
    sleep_bytes: int = 0


BlockSample = tuple[str, float]  # lifetime, idle_before_evict or reuse_gap of a KV block; seconds


@dataclass(slots=True)
class TierStats:
    """Of one tier below the main cache. Counters since start, but for the first three."""

    on: bool = True
    blocks: int = 0
    capacity: int = 0
    hit_tokens: int = 0  # that requests did not have to compute
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    stored_blocks: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    evicted_blocks: int = 0
    dropped_blocks: int = 0  # not stored, since that would have made someone wait
    damaged_blocks: int = 0  # found torn, corrupted or foreign, and removed
    errors: int = 0

    def copy(self) -> TierStats:
        return replace(self)


@dataclass(slots=True)
class TransferStats:
    """Of blocks that move between engines. Counters since start, but for the last five."""

    pulls: int = 0  # that ended, however
    pulled_bytes: int = 0
    pull_seconds: float = 0.0  # waiting for what is not computed yet included
    copy_seconds: float = 0.0  # of these, in which bytes moved
    hidden_seconds: float = 0.0  # of these, while the peer had more to compute
    pull_failures: dict[str, int] = field(default_factory=dict)  # by the code of kv.transfer.errors
    reached: dict[str, int] = field(default_factory=dict)  # peers, by the transport that led there
    passed_over: dict[str, int] = field(default_factory=dict)  # and by those that should have and did not
    verified_blocks: int = 0  # pulled, whose checksum was compared
    hit_tokens: int = 0  # that requests did not have to compute
    recomputed: int = 0  # requests that computed what they should have been able to pull
    published: int = 0  # requests
    published_blocks: int = 0
    sent_bytes: int = 0
    ended: dict[str, int] = field(default_factory=dict)  # leases, by how
    leases: int = 0
    pinned_blocks: int = 0  # by leases
    pinned_by_age: dict[str, int] = field(default_factory=dict)  # the same, by seconds since the lease began
    oldest_lease: float = 0.0  # seconds
    quarantined_blocks: int = 0  # nobody's, until a pull that was given up has let go of them

    @staticmethod
    def total(all_: Iterable[TransferStats]) -> TransferStats | None:
        """Of several engines together; None if there is none."""
        every = list(all_)
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


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since start and gauges of now; what /metrics and the charts are made of."""

    step: int = 0
    running: int = 0
    loading: int = 0  # of those: their blocks come from elsewhere, and they need no step
    waiting: int = 0
    asleep: int = 0  # of these, waiting for their model to wake
    deferred: int = 0  # of these, waiting for a sibling to compute the prompt they share
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # of these, found
    prompt_tokens: int = 0  # computed
    generated_tokens: int = 0
    step_tokens: int = 0  # of the last step
    step_seconds: float = 0.0  # of the last step
    busy_seconds: float = 0.0  # in the runner, all steps
    cpu_seconds: float = 0.0  # of the engine process, all threads
    host_seconds: float = 0.0  # of the engine loop outside the runner
    residency: list[BlockSample] = field(default_factory=list)  # seen since the last report
    tiers: dict[str, TierStats] = field(default_factory=dict)  # below the main cache, by name
    transfer: TransferStats | None = None  # None: it has no peers

    @staticmethod
    def total(all_: Iterable[Stats]) -> Stats:
        """Of the engines of one process together: the last step's tokens are each one's own last step's."""
        every = list(all_)
        apart = ("residency", "tiers", "transfer")
        sums = {name: sum(getattr(one, name) for one in every) for name in Stats.__slots__ if name not in apart}
        sums["cpu_seconds"] = max((one.cpu_seconds for one in every), default=0.0)  # the process's: each tells the same
        transfer = TransferStats.total(one.transfer for one in every if one.transfer is not None)
        return Stats(**sums, transfer=transfer)

    @property
    def kv_usage(self) -> float:
        used = self.blocks_total - self.blocks_free - self.blocks_cached
        return used / self.blocks_total if self.blocks_total else 0.0
