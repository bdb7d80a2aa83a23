"""Worker: the router's account of one process it may send requests to. Load: what one open request adds to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from emberline.core.breaker import Breaker
from emberline.core.numerics import Numerics
from emberline.router.pace import Pace

DURATION_WEIGHT = 0.1
RECENT_S = 300.0  # seconds after which work that a worker was given counts a third in `recent`


@dataclass(slots=True)
class Load:
    prefill: float  # tokens still to be computed before the first byte
    decode: float  # tokens still to be generated
    suspect: bool = False  # workers broke under the request: it may be what breaks them
    coming: float = 0.0  # tokens of the prompt, whoever computes them, that are not in the worker's cache yet


@dataclass(slots=True)
class Worker:
    id: str  # name and incarnation: a process that was started again has an empty cache
    name: str
    models: frozenset[str]
    max_running: int
    limit: int  # requests it may have, running and waiting; running first: max_running <= limit
    breaker: Breaker
    ready: bool = True  # takes new requests
    doubted: bool = False  # something broke under it, and nothing was heard of it since
    left: bool = False  # it stops, by its own word: what breaks off then is no request's doing
    dialect: str = "native"
    role: str = "both"  # or prefill: computes prompts for others; or decode
    peers: Mapping[str, str] = field(default_factory=dict)  # its engines, by model, as others know them
    paired: frozenset[str] = frozenset()  # others' engines that it can take blocks from
    numerics: Mapping[str, Numerics | None] = field(default_factory=dict)  # by model
    loads: dict[int, Load] = field(default_factory=dict)
    prefill: float = 0.0  # sums of these
    decode: float = 0.0
    coming: float = 0.0
    kv_tokens: int = 0  # that its cache holds; 0: it does not say
    kv_used: float = 0.0  # of these, by its last report
    seconds: float = 0.0  # a request takes, about
    pace: Pace = field(default_factory=Pace)
    _recent_prefill: float = 0.0  # tokens that it was given lately, as of `_recent_at`
    _recent_decode: float = 0.0
    _recent_at: float = 0.0
    _unreported: float = 0.0  # tokens of prompts that are done and not in a report yet

    def __post_init__(self) -> None:
        assert 0 < self.max_running <= self.limit

    @property
    def open(self) -> int:
        return len(self.loads)

    def takes(self, model: str, now: float) -> bool:
        return self.ready and model in self.models and self.breaker.allows(now)

    @property
    def answers(self) -> bool:
        """Our own can, whatever their role."""
        return self.role != "prefill" or self.dialect == "native"

    @property
    def calm(self) -> bool:
        """It is well, and has no suspect that could change that."""
        return not self.doubted and not any(load.suspect for load in self.loads.values())

    def takes_from(self, other: Worker, model: str) -> bool:
        return other.peers.get(model) in self.paired and self.numerics.get(model) == other.numerics.get(model)

    @property
    def room(self) -> float:
        """Tokens that its cache could still take, if its requests become as long as is thought."""
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
        """Work that it was given in the last minutes, done or not, in tokens of a prompt; older work counts less."""
        self._forget_recent(now)
        return self._recent_prefill + decode_weight * self._recent_decode

    def _forget_recent(self, now: float) -> None:
        kept = math.exp(min(self._recent_at - now, 0.0) / RECENT_S)
        self._recent_prefill, self._recent_decode = kept * self._recent_prefill, kept * self._recent_decode
        self._recent_at = now

    def relieved(self, key: int) -> None:
        """Another computes its prompt."""
        load = self.loads[key]
        self.prefill -= load.prefill
        load.prefill = 0.0

    def prefilled(self, key: int) -> None:
        """All of its prompt is here."""
        self.relieved(key)
        load = self.loads[key]
        self.coming -= load.coming
        load.coming = 0.0

    def owes(self, key: int, tokens: float) -> None:
        """A prompt that was to be computed elsewhere has to be computed here after all."""
        self.loads[key].prefill += tokens
        self.prefill += tokens

    def reported(self, tokens: int, seconds: float, kv_usage: float = 0.0) -> None:
        """What it computed of prompts, and in what time, since it began: the oldest first, as workers take them; and
        the share of its cache that is in use."""
        self.kv_used = kv_usage * self.kv_tokens
        if self.role != "prefill":  # others' time is their streams' too
            return
        more = max(self.pace.reported(tokens, seconds) - self._unreported, 0.0)
        self._unreported = 0.0
        for load in self.loads.values():
            done = min(load.prefill, more)
            load.prefill -= done
            self.prefill -= done
            more -= done

    def generated(self, key: int, tokens: int) -> None:
        """More may come than was expected: then nothing more is."""
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
            self.prefill = self.decode = self.coming = 0.0  # sums of floats drift
        if seconds is not None:
            self.seconds += (DURATION_WEIGHT if self.seconds else 1.0) * (seconds - self.seconds)

    @property
    def seconds_to_a_place(self) -> float:
        """Until one of its open requests ends, if they are spread evenly."""
        return self.seconds / max(self.open, 1)
