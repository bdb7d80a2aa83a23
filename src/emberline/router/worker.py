"""Worker: the router's view of one worker process. RequestLoad: the work of one open request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from emberline.core.breaker import CircuitBreaker
from emberline.core.numerics import Numerics
from emberline.router.prefill_rate import PrefillRate

DURATION_WEIGHT = 0.1
RECENT_WORK_DECAY_S = 300.0  # time constant: work counts 1/e after it


@dataclass(slots=True)
class RequestLoad:
    prefill_tokens: float  # prompt tokens still to be computed here
    decode_tokens: float  # tokens still to be generated
    is_suspect: bool = False  # workers failed while serving this request, which may be the cause
    uncached_tokens: float = 0.0  # prompt tokens, computed here or elsewhere, that are not in this worker's cache yet


@dataclass(slots=True)
class Worker:
    id: str  # name and incarnation: a restarted process has an empty cache
    name: str
    models: frozenset[str]
    max_running: int
    max_requests: int  # running and waiting requests together; at least max_running
    breaker: CircuitBreaker
    is_ready: bool = True  # accepts new requests
    failed_since_heartbeat: bool = False  # a request failed here and no heartbeat has arrived since
    is_leaving: bool = False  # the worker announced its shutdown: connections that break now are no request's fault
    dialect: str = "native"
    role: str = "both"  # or prefill: computes prompts for others; or decode
    engine_ids: Mapping[str, str] = field(default_factory=dict)  # incarnation of each model's engine
    paired_engine_ids: frozenset[str] = frozenset()  # incarnations of other engines from which it can fetch blocks
    numerics: Mapping[str, Numerics | None] = field(default_factory=dict)  # by model
    loads: dict[int, RequestLoad] = field(default_factory=dict)  # by attempt id
    prefill_tokens: float = 0.0  # sums over `loads`
    decode_tokens: float = 0.0
    uncached_tokens: float = 0.0
    kv_capacity_tokens: int = 0  # 0: not reported
    kv_used_tokens: float = 0.0  # as of the last heartbeat
    mean_request_s: float = 0.0  # moving average of request durations
    prefill_rate: PrefillRate = field(default_factory=PrefillRate)
    _recent_prefill: float = 0.0  # decayed sums of tokens assigned, as of `_recent_updated_at`
    _recent_decode: float = 0.0
    _recent_updated_at: float = 0.0
    _unreported_tokens: float = 0.0  # prompt tokens of finished requests that no heartbeat has counted yet

    def __post_init__(self) -> None:
        assert 0 < self.max_running <= self.max_requests

    @property
    def open_requests(self) -> int:
        return len(self.loads)

    def accepts(self, model: str, now: float) -> bool:
        return self.is_ready and model in self.models and self.breaker.allows(now)

    @property
    def can_answer(self) -> bool:
        """Whether it can generate: Emberline's own workers can in every role."""
        return self.role != "prefill" or self.dialect == "native"

    @property
    def is_safe_for_suspect(self) -> bool:
        """Whether it is healthy and serves no suspect request."""
        return not self.failed_since_heartbeat and not any(load.is_suspect for load in self.loads.values())

    def can_fetch_from(self, other: Worker, model: str) -> bool:
        return other.engine_ids.get(model) in self.paired_engine_ids and self.numerics.get(model) == other.numerics.get(
            model
        )

    @property
    def kv_free_tokens(self) -> float:
        """Free tokens of its KV cache once open requests have reached their estimated lengths."""
        return (
            self.kv_capacity_tokens - self.kv_used_tokens - self.uncached_tokens - self.decode_tokens
            if self.kv_capacity_tokens
            else math.inf
        )

    def add_request(self, key: int, load: RequestLoad, now: float) -> None:
        assert key not in self.loads
        self.breaker.record_start(now)
        self._decay_recent_work(now)
        self._recent_prefill += load.prefill_tokens
        self._recent_decode += load.decode_tokens
        self.loads[key] = load
        load.uncached_tokens = load.prefill_tokens
        self.prefill_tokens += load.prefill_tokens
        self.decode_tokens += load.decode_tokens
        self.uncached_tokens += load.uncached_tokens

    def recent_work(self, now: float, decode_weight: float) -> float:
        """Return the work assigned in the last minutes, finished or not, in prompt tokens.

        Older work counts less."""
        self._decay_recent_work(now)
        return self._recent_prefill + decode_weight * self._recent_decode

    def _decay_recent_work(self, now: float) -> None:
        factor = math.exp(min(self._recent_updated_at - now, 0.0) / RECENT_WORK_DECAY_S)
        self._recent_prefill, self._recent_decode = factor * self._recent_prefill, factor * self._recent_decode
        self._recent_updated_at = now

    def remove_prefill_load(self, key: int) -> None:
        """Remove a request's prompt from the load, because another worker computes it."""
        load = self.loads[key]
        self.prefill_tokens -= load.prefill_tokens
        load.prefill_tokens = 0.0

    def mark_prefilled(self, key: int) -> None:
        """Record that the request's whole prompt is in this worker's cache."""
        self.remove_prefill_load(key)
        load = self.loads[key]
        self.uncached_tokens -= load.uncached_tokens
        load.uncached_tokens = 0.0

    def add_prefill_load(self, key: int, tokens: float) -> None:
        """Add prompt tokens to a request's load, because this worker has to compute them itself."""
        self.loads[key].prefill_tokens += tokens
        self.prefill_tokens += tokens

    def record_report(self, tokens: int, seconds: float, kv_usage: float = 0.0) -> None:
        """Update the load from the counters of a heartbeat.

        `tokens` and `seconds`: prompt tokens computed and time spent since the engine's start. Workers compute prompts
        in order of arrival, so the oldest loads shrink first. `kv_usage`: share of the KV cache in use."""
        self.kv_used_tokens = kv_usage * self.kv_capacity_tokens
        if self.role != "prefill":  # the busy time of other roles includes decoding
            return
        unassigned = max(self.prefill_rate.record_report(tokens, seconds) - self._unreported_tokens, 0.0)
        self._unreported_tokens = 0.0
        for load in self.loads.values():
            done = min(load.prefill_tokens, unassigned)
            load.prefill_tokens -= done
            self.prefill_tokens -= done
            unassigned -= done

    def record_generated(self, key: int, tokens: int) -> None:
        """Subtract generated tokens from the request's load, which never becomes negative."""
        load = self.loads[key]
        done = min(load.decode_tokens, float(tokens))
        load.decode_tokens -= done
        self.decode_tokens -= done

    def remove_request(self, key: int, seconds: float | None = None) -> None:
        load = self.loads.pop(key)
        self._unreported_tokens += load.prefill_tokens if seconds is not None else 0.0
        self.prefill_tokens -= load.prefill_tokens
        self.decode_tokens -= load.decode_tokens
        self.uncached_tokens -= load.uncached_tokens
        if not self.loads:
            self.prefill_tokens = self.decode_tokens = self.uncached_tokens = 0.0  # removes accumulated rounding errors
        if seconds is not None:
            self.mean_request_s += (DURATION_WEIGHT if self.mean_request_s else 1.0) * (seconds - self.mean_request_s)

    @property
    def seconds_to_free_slot(self) -> float:
        """Estimated seconds until one of its open requests ends, if their ends are spread evenly."""
        return self.mean_request_s / max(self.open_requests, 1)
