"""GatewayMetrics: what the gateway counts, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from emberline.core.clock import Clock
from emberline.gateway.call import Call, Handler, Reply
from emberline.gateway.layers.cached import Cached
from emberline.gateway.limits.base import Limiter
from emberline.gateway.logs.logwriter import LogWriter
from emberline.server.metrics import SECONDS, Family, Histogram
from emberline.server.tracing import Tracing

MOST = 1000  # different models that are told apart; the rest is "other"


class GatewayMetrics:
    """A layer, too: the outermost."""

    def __init__(
        self,
        clock: Clock,
        breakers: Iterable[tuple[str, int]],
        journal: LogWriter,
        cached: Cached,
        limiter: Limiter,
        spans: Tracing | None,
    ) -> None:
        self._clock = clock
        self._breakers = breakers
        self._journal = journal
        self._cached = cached
        self._limiter = limiter
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
        for name, help_, count in self._counts():
            full = f"emberline:gateway_{name}_total"
            yield Family(full, help_, "counter", [f"{full} {count}"])
        if self._spans is not None:
            yield from self._spans.families()
        for name, help_, count in self._gauges():
            yield Family(name, help_, "gauge", [f"{name} {count}"])
        states = [(_labels(("place",), (place,)), n) for place, n in self._breakers]
        about = "Models and keys of a provider that are not asked for a while because they failed too often."
        yield Family.of("emberline:gateway_breaker_open", about, "gauge", states)
        yield self._first.family('at="gateway"')
        yield self._whole.family('at="gateway"')

    def _counts(self) -> Iterator[tuple[str, str, int]]:
        """Names, what they mean, and how often it was so."""
        cache, journal = self._cached.stats, self._journal
        yield "cache_hits", "Replies from the cache.", cache.hits
        yield "cache_misses", "Calls that the cache did not know.", cache.misses
        yield "cache_shared", "Of the hits, those that waited for the same call.", cache.shared
        yield "cache_stored", "Replies that were put into the cache.", cache.stored
        yield "cache_too_large", "Replies that were too large for it.", cache.too_large
        yield "log_written", "Records of the log that were written.", journal.written
        yield "log_dropped", "Records of the log that there was no room for.", journal.dropped
        yield "log_failures", "Times that the store did not take records.", journal.failures
        if self._cached.semantic is not None:
            meant = self._cached.semantic.stats
            yield "semantic_asked", "Questions whose meaning was looked for.", meant.asked
            yield "semantic_near", "Of these, those that a known one is near enough to.", meant.near
            yield "semantic_served", "Replies that were given for a question that means the same.", meant.served
            yield (
                "semantic_compared",
                "In the shadow: replies that were compared with the one to be given.",
                meant.compared,
            )
            yield "semantic_disagreed", "Of these, those that said something else.", meant.disagreed
        if (shared := self._limiter.stats) is not None:
            yield "limits_reserved", "Reservations that Redis made.", shared.reserved
            yield "limits_degraded", "Calls for which Redis could not be asked, or refused.", shared.degraded
            yield "limits_lost", "Settlements that were given up.", shared.lost

    def _gauges(self) -> Iterator[tuple[str, str, int]]:
        yield "emberline:gateway_open_requests", "Requests open now.", self.open
        yield "emberline:gateway_log_queued", "Records of the log that wait to be written.", self._journal.queued
        if (shared := self._limiter.stats) is not None:
            yield "emberline:gateway_limits_owed", "Settlements that wait for Redis.", shared.owed


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    escaped = (value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for value in values)
    return ",".join(f'{name}="{value}"' for name, value in zip(names, escaped, strict=True))
