"""Worker: the router's data about one worker process. RequestLoad: the tokens that an open request still needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from emberline.core.breaker import CircuitBreaker
from emberline.core.numerics import Numerics, can_exchange_blocks
from emberline.router.prefill_rate import PrefillRate

DURATION_WEIGHT = 0.1
RECENT_WORK_DECAY_S = 300.0  # time constant: work counts 1/e after it


@dataclass(slots=True)
class RequestLoad:
    prefill_tokens: float  # prompt tokens still to be computed here
    decode_tokens: float  # tokens still to be generated
    is_suspect: bool = False  # workers failed while serving this request, which may be the cause
    uncached_tokens: float = 0.0  # prompt tokens, computed here or elsewhere, that are not in this worker's cache yet


class OtherRoutersLoad(NamedTuple):
    """The load that other routers cause at a worker, as of its last heartbeat."""

    open_requests: int = 0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    uncached_tokens: float = 0.0


NO_OTHER_ROUTERS = OtherRoutersLoad()


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
    endpoint: str = ""  # HOST:PORT of its URL
    role: str = "both"  # or prefill: computes prompts for others; or decode
    engine_ids: Mapping[str, str] = field(default_factory=dict)  # incarnation of each model's engine
    paired_engine_ids: frozenset[str] = frozenset()  # incarnations of other engines from which it can fetch blocks
    numerics: Mapping[str, Numerics | None] = field(default_factory=dict)  # by model
    loads: dict[int, RequestLoad] = field(default_factory=dict)  # by attempt id
    prefill_tokens: float = 0.0  # sums over `loads`
    decode_tokens: float = 0.0
    uncached_tokens: float = 0.0
    other_routers: OtherRoutersLoad = NO_OTHER_ROUTERS
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
        """The number of this router's own requests at the worker."""
        return len(self.loads)

    @property
    def total_open_requests(self) -> int:
        return len(self.loads) + self.other_routers.open_requests

    @property
    def total_prefill_tokens(self) -> float:
        return self.prefill_tokens + self.other_routers.prefill_tokens

    @property
    def total_decode_tokens(self) -> float:
        return self.decode_tokens + self.other_routers.decode_tokens

    def accepts_requests_for(self, model: str, now: float) -> bool:
        return self.is_ready and model in self.models and self.breaker.allows_request(now)

    @property
    def can_generate(self) -> bool:
        """Whether the worker can generate replies. All can, except prefill servers of vLLM and SGLang."""
        return self.role != "prefill" or self.dialect == "native"

    @property
    def is_safe_for_suspect(self) -> bool:
        """Whether the worker has not failed since its last heartbeat and serves no suspect request."""
        return not self.failed_since_heartbeat and not any(load.is_suspect for load in self.loads.values())

    def can_fetch_blocks_from(self, other: Worker, model: str) -> bool:
        return other.engine_ids.get(model) in self.paired_engine_ids and can_exchange_blocks(
            self.numerics.get(model), other.numerics.get(model)
        )

    @property
    def kv_free_tokens(self) -> float:
        """The estimated free tokens in the KV cache once all open requests have reached their full length."""
        return (
            self.kv_capacity_tokens
            - self.kv_used_tokens
            - self.uncached_tokens
            - self.other_routers.uncached_tokens
            - self.total_decode_tokens
            if self.kv_capacity_tokens
            else math.inf
        )

    def add_request(self, attempt_id: int, load: RequestLoad, now: float) -> None:
        assert attempt_id not in self.loads
        self.breaker.record_start(now)
        self._decay_recent_work(now)
        self._recent_prefill += load.prefill_tokens
        self._recent_decode += load.decode_tokens
        self.loads[attempt_id] = load
        load.uncached_tokens = load.prefill_tokens
        self.prefill_tokens += load.prefill_tokens
        self.decode_tokens += load.decode_tokens
        self.uncached_tokens += load.uncached_tokens

    def recent_work(self, now: float, decode_weight: float) -> float:
        """Return the work of all requests assigned to this worker recently, finished or not, in prompt tokens.

        A request counts less the longer ago it was assigned."""
        self._decay_recent_work(now)
        return self._recent_prefill + decode_weight * self._recent_decode

    def _decay_recent_work(self, now: float) -> None:
        factor = math.exp(min(self._recent_updated_at - now, 0.0) / RECENT_WORK_DECAY_S)
        self._recent_prefill, self._recent_decode = factor * self._recent_prefill, factor * self._recent_decode
        self._recent_updated_at = now

    def remove_prefill_load(self, attempt_id: int) -> None:
        """Remove a request's prompt tokens from this worker's load, because a prefill worker computes them."""
        load = self.loads[attempt_id]
        self.prefill_tokens -= load.prefill_tokens
        load.prefill_tokens = 0.0

    def mark_prefilled(self, attempt_id: int) -> None:
        """Record that the request's prompt has been computed and is in this worker's KV cache."""
        self.remove_prefill_load(attempt_id)
        load = self.loads[attempt_id]
        self.uncached_tokens -= load.uncached_tokens
        load.uncached_tokens = 0.0

    def add_prefill_load(self, attempt_id: int, tokens: float) -> None:
        """Add prompt tokens to a request's load, because no prefill worker computes them."""
        self.loads[attempt_id].prefill_tokens += tokens
        self.prefill_tokens += tokens

    def record_heartbeat_counters(
        self, total_prompt_tokens: int, total_prefill_s: float, kv_usage: float = 0.0
    ) -> None:
        """Update the load from the counters of a heartbeat.

        `total_prompt_tokens` and `total_prefill_s` count the prompt tokens computed, and the time that took, since the
        engine's start. Workers compute prompts in the order of arrival, so the new tokens are subtracted from the
        oldest requests first. `kv_usage`: share of the KV cache in use, from 0 to 1."""
        self.kv_used_tokens = kv_usage * self.kv_capacity_tokens
        if self.role != "prefill":  # the busy time of other roles includes decoding
            return
        unassigned = max(
            self.prefill_rate.record_heartbeat_counters(total_prompt_tokens, total_prefill_s) - self._unreported_tokens,
            0.0,
        )
        self._unreported_tokens = 0.0
        for load in self.loads.values():
            done = min(load.prefill_tokens, unassigned)
            load.prefill_tokens -= done
            self.prefill_tokens -= done
            unassigned -= done

    def record_generated_tokens(self, attempt_id: int, token_count: int) -> None:
        """Subtract generated tokens from the number that the request is expected to generate, down to 0."""
        load = self.loads[attempt_id]
        done = min(load.decode_tokens, float(token_count))
        load.decode_tokens -= done
        self.decode_tokens -= done

    def remove_request(self, attempt_id: int, duration_s: float | None = None) -> None:
        load = self.loads.pop(attempt_id)
        self._unreported_tokens += load.prefill_tokens if duration_s is not None else 0.0
        self.prefill_tokens -= load.prefill_tokens
        self.decode_tokens -= load.decode_tokens
        self.uncached_tokens -= load.uncached_tokens
        if not self.loads:
            self.prefill_tokens = self.decode_tokens = self.uncached_tokens = 0.0  # removes accumulated rounding errors
        if duration_s is not None:
            self.mean_request_s += (DURATION_WEIGHT if self.mean_request_s else 1.0) * (
                duration_s - self.mean_request_s
            )

    @property
    def seconds_to_free_slot(self) -> float:
        """The estimated seconds until the next open request of this worker ends."""
        return self.mean_request_s / max(self.total_open_requests, 1)
