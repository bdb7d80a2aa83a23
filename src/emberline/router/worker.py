"""Worker: the router's view of one worker process. RequestLoad: the work of one open request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from emberline.core.breaker import Breaker
from emberline.core.numerics import Numerics
from emberline.router.pace import Pace

DURATION_WEIGHT = 0.1
RECENT_S = 300.0  # time constant: work counts 1/e after it


@dataclass(slots=True)
class Load:
    prefill: float  # prompt tokens still to be computed here
    decode: float  # tokens still to be generated
    suspect: bool = False  # workers failed while serving this request, which may be the cause
    coming: float = 0.0  # prompt tokens, computed here or elsewhere, that are not in this worker's cache yet


@dataclass(slots=True)
class Worker:
    id: str  # name and incarnation: a restarted process has an empty cache
    name: str
    models: frozenset[str]
    max_running: int
    limit: int  # running and waiting requests together; at least max_running
    breaker: Breaker
    ready: bool = True  # accepts new requests
    doubted: bool = False  # a request failed here and no heartbeat has arrived since
    left: bool = False  # the worker announced its shutdown: connections that break now are no request's fault
    dialect: str = "native"
    role: str = "both"  # or prefill: computes prompts for others; or decode
    peers: Mapping[str, str] = field(default_factory=dict)  # incarnation of each model's engine
    paired: frozenset[str] = frozenset()  # incarnations of other engines from which it can fetch blocks
    numerics: Mapping[str, Numerics | None] = field(default_factory=dict)  # by model
    loads: dict[int, Load] = field(default_factory=dict)  # by attempt id
    prefill: float = 0.0  # sums over `loads`
    decode: float = 0.0
    coming: float = 0.0
    kv_tokens: int = 0  # 0: not reported
    kv_used: float = 0.0  # as of the last heartbeat
    seconds: float = 0.0  # moving average of request durations
    pace: Pace = field(default_factory=Pace)
    _recent_prefill: float = 0.0  # decayed sums of tokens assigned, as of `_recent_updated_at`
    _recent_decode: float = 0.0
    _recent_at: float = 0.0
    _unreported: float = 0.0  # prompt tokens of finished requests that no heartbeat has counted yet

    def __post_init__(self) -> None:
        assert 0 < self.max_running <= self.limit

    @property
    def open(self) -> int:
        return len(self.loads)

    def takes(self, model: str, now: float) -> bool:
        return self.ready and model in self.models and self.breaker.allows(now)

    @property
    def answers(self) -> bool:
        """Whether it can generate: Emberline's own workers can in every role."""
        return self.role != "prefill" or self.dialect == "native"

    @property
    def calm(self) -> bool:
        """Whether it is healthy and serves no suspect request."""
        return not self.doubted and not any(load.suspect for load in self.loads.values())

    def takes_from(self, other: Worker, model: str) -> bool:
        return other.peers.get(model) in self.paired and self.numerics.get(model) == other.numerics.get(model)

    @property
    def room(self) -> float:
        """Free tokens of its KV cache once open requests have reached their estimated lengths."""
        return self.kv_tokens - self.kv_used - self.coming - self.decode if self.kv_tokens else math.inf

    def began(self, key: int, load: Load, now: float) -> None:
        assert key not in self.loads
        self.breaker.began(now)
        self._forget_recent(now)
        self._recent_prefill += load.prefill
        self._recent_decode += load.decode
        self.loads[key] = load
        load.coming = load.prefill
        self.prefill += load.prefill
        self.decode += load.decode
        self.coming += load.coming

    def recent(self, now: float, decode_weight: float) -> float:
        """Return the work assigned in the last minutes, finished or not, in prompt tokens.

        Older work counts less."""
        self._forget_recent(now)
        return self._recent_prefill + decode_weight * self._recent_decode

    def _forget_recent(self, now: float) -> None:
        factor = math.exp(min(self._recent_at - now, 0.0) / RECENT_S)
        self._recent_prefill, self._recent_decode = factor * self._recent_prefill, factor * self._recent_decode
        self._recent_at = now

    def relieved(self, key: int) -> None:
        """Remove a request's prompt from the load, because another worker computes it."""
        load = self.loads[key]
        self.prefill -= load.prefill
        load.prefill = 0.0

    def prefilled(self, key: int) -> None:
        """Record that the request's whole prompt is in this worker's cache."""
        self.relieved(key)
        load = self.loads[key]
        self.coming -= load.coming
        load.coming = 0.0

    def owes(self, key: int, tokens: float) -> None:
        """Add prompt tokens to a request's load, because this worker has to compute them itself."""
        self.loads[key].prefill += tokens
        self.prefill += tokens

    def reported(self, tokens: int, seconds: float, kv_usage: float = 0.0) -> None:
        """Update the load from the counters of a heartbeat.

        `tokens` and `seconds`: prompt tokens computed and time spent since the engine's start. Workers compute prompts
        in order of arrival, so the oldest loads shrink first. `kv_usage`: share of the KV cache in use."""
        self.kv_used = kv_usage * self.kv_tokens
        if self.role != "prefill":  # the busy time of other roles includes decoding
            return
        unassigned = max(self.pace.reported(tokens, seconds) - self._unreported, 0.0)
        self._unreported = 0.0
        for load in self.loads.values():
            done = min(load.prefill, unassigned)
            load.prefill -= done
            self.prefill -= done
            unassigned -= done

    def generated(self, key: int, tokens: int) -> None:
        """Subtract generated tokens from the request's load, which never becomes negative."""
        load = self.loads[key]
        done = min(load.decode, float(tokens))
        load.decode -= done
        self.decode -= done

    def ended(self, key: int, seconds: float | None = None) -> None:
        load = self.loads.pop(key)
        self._unreported += load.prefill if seconds is not None else 0.0
        self.prefill -= load.prefill
        self.decode -= load.decode
        self.coming -= load.coming
        if not self.loads:
            self.prefill = self.decode = self.coming = 0.0  # removes accumulated rounding errors
        if seconds is not None:
            self.seconds += (DURATION_WEIGHT if self.seconds else 1.0) * (seconds - self.seconds)

    @property
    def seconds_to_a_place(self) -> float:
        """Estimated seconds until one of its open requests ends, if their ends are spread evenly."""
        return self.seconds / max(self.open, 1)
