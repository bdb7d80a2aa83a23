"""GatewayMetrics: what the gateway counts, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from emberline.core.breaker import Breaker
from emberline.core.clock import Clock
from emberline.gateway.call import Call, Handler, Reply
from emberline.gateway.layers.cached import CacheStats
from emberline.gateway.logs.logwriter import LogWriter
from emberline.server.metrics import SECONDS, Family, Histogram
from emberline.server.tracing import Tracing

MOST = 1000  # different models that are told apart; the rest is "other"


class GatewayMetrics:
    """A layer, too: the outermost."""

    def __init__(
        self,
        clock: Clock,
        breakers: Iterable[tuple[str, Breaker]],
        journal: LogWriter,
        cache: CacheStats,
        spans: Tracing | None,
    ) -> None:
        self._clock = clock
        self._breakers = breakers
        self._journal = journal
        self._cache = cache
        self._spans = spans
        self.open = 0
        self._requests: Counter[tuple[str, str, str, str]] = Counter()  # provider, model, status, how it ended
        self._tokens: Counter[tuple[str, str, str]] = Counter()
        self._micros: Counter[tuple[str, str]] = Counter()
        self._attempts: Counter[tuple[str, str]] = Counter()  # provider, outcome
        self._rescued: Counter[tuple[str]] = Counter()  # provider that answered in another's place
        self._first = Histogram("emberline:gateway_first_byte_seconds", "From arrival to the first content.", SECONDS)
        self._whole = Histogram("emberline:gateway_request_seconds", "From arrival to the end.", SECONDS)
        self._findings: Counter[tuple[str, str, str]] = Counter()  # of guardrails
        self._models: set[str] = set()

    def layer(self, inner: Handler) -> Handler:
        async def handle(call: Call) -> Reply:
            self.open += 1
            try:
                reply = await inner(call)
            except BaseException:
                self.open -= 1
                self._requests[call.provider, self._known(call.model), "499", "left"] += 1
                raise
            reply.endings.append(lambda reply: self._ended(call, reply))
            return reply

        return handle

    async def _ended(self, call: Call, reply: Reply) -> None:
        self.open -= 1
        provider, model = reply.provider or call.provider, self._known(reply.model or call.model)
        self._requests[provider, model, str(reply.status), reply.ended] += 1
        if reply.usage is not None:
            self._tokens[provider, model, "input"] += reply.usage.input
            self._tokens[provider, model, "output"] += reply.usage.output
        self._micros[provider, model] += reply.micros or 0
        for tried in call.trail:
            self._attempts[tried.provider, tried.outcome] += 1
        for finding in call.findings:
            self._findings[finding.entry, finding.check, finding.action] += 1
        if reply.step and reply.status < 400:
            self._rescued[provider,] += 1
        self._first.observe(reply.first_byte)
        self._whole.observe(self._clock.now() - call.began)

    def _known(self, model: str) -> str:
        """Clients choose names: their number is bounded."""
        if model not in self._models:
            if len(self._models) >= MOST:
                return "other"
            self._models.add(model)
        return model

    def families(self) -> Iterator[Family]:
        for name, help_, labels, counts in (
            ("requests", "Requests by how they ended.", ("provider", "model", "status", "ended"), self._requests),
            ("tokens", "Tokens used.", ("provider", "model", "kind"), self._tokens),
            ("cost_micro_dollars", "Cost, as far as prices are known.", ("provider", "model"), self._micros),
            ("attempts", "Tries at providers by outcome.", ("provider", "outcome"), self._attempts),
            ("rescued", "Requests answered by a fallback.", ("provider",), self._rescued),
            ("findings", "What guardrails found.", ("entry", "check", "action"), self._findings),
        ):
            samples = [(_labels(labels, values), n) for values, n in sorted(counts.items())]
            yield Family.of(f"emberline:gateway_{name}_total", help_, "counter", samples)
        for name, help_, count in (
            ("cache_hits", "Replies from the cache.", self._cache.hits),
            ("cache_misses", "Calls that the cache did not know.", self._cache.misses),
            ("cache_shared", "Of the hits, those that waited for the same call.", self._cache.shared),
            ("log_written", "Records of the log that were written.", self._journal.written),
            ("log_dropped", "Records of the log that there was no room for.", self._journal.dropped),
        ):
            full = f"emberline:gateway_{name}_total"
            yield Family(full, help_, "counter", [f"{full} {count}"])
        if self._spans is not None:
            yield from self._spans.families()
        open_ = f"emberline:gateway_open_requests {self.open}"
        yield Family("emberline:gateway_open_requests", "Requests open now.", "gauge", [open_])
        states = [(_labels(("place",), (place,)), int(b.state != "closed")) for place, b in self._breakers]
        yield Family.of("emberline:gateway_breaker_open", "1 while a provider is left alone.", "gauge", states)
        yield self._first.family('at="gateway"')
        yield self._whole.family('at="gateway"')


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    escaped = (value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for value in values)
    return ",".join(f'{name}="{value}"' for name, value in zip(names, escaped, strict=True))
