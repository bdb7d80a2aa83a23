"""GatewayMetrics: the gateway's metrics for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from emberline.core.clock import Clock
from emberline.core.tls import TLSIdentity
from emberline.gateway.core.request import GatewayReply, GatewayRequest, Handler
from emberline.gateway.layers.caching import CacheLayer
from emberline.gateway.limits.base import Limiter
from emberline.gateway.logs.log_writer import LogWriter
from emberline.server.metrics import LATENCY_BUCKETS_S, Histogram, MetricFamily, tls_families
from emberline.server.tracing import RequestTracing

MAX_MODEL_LABELS = 1000  # different values of the label `model`; all further models are "other"


class GatewayMetrics:
    """Counts requests. The method `layer` must be the outermost layer (middleware) of the gateway."""

    def __init__(
        self,
        clock: Clock,
        breakers: Iterable[tuple[str, int]],
        log_writer: LogWriter,
        cached: CacheLayer,
        limiter: Limiter,
        spans: RequestTracing | None,
        tls: TLSIdentity | None = None,
    ) -> None:
        self._clock = clock
        self._breakers = breakers
        self._log_writer = log_writer
        self._cached = cached
        self._limiter = limiter
        self._spans = spans
        self._tls = tls
        self.open_requests = 0
        self._requests: Counter[tuple[str, str, str, str]] = Counter()  # provider, model, status, `ended`
        self._tokens: Counter[tuple[str, str, str]] = Counter()  # provider, model, kind
        self._micros: Counter[tuple[str, str]] = Counter()  # provider, model
        self._attempts: Counter[tuple[str, str]] = Counter()  # provider, outcome
        self._rescued: Counter[tuple[str]] = Counter()  # provider of the fallback
        self._first_byte = Histogram(
            "emberline:gateway_first_byte_seconds",
            "Time from a request's arrival to the first content.",
            LATENCY_BUCKETS_S,
        )
        self._duration = Histogram(
            "emberline:gateway_request_seconds",
            "Time from a request's arrival to the end of its reply.",
            LATENCY_BUCKETS_S,
        )
        self._findings: Counter[tuple[str, str, str]] = Counter()  # entry, check, action of guardrails
        self._models: set[str] = set()  # values of the label `model`

    def layer(self, inner: Handler) -> Handler:
        async def handle(request: GatewayRequest) -> GatewayReply:
            self.open_requests += 1
            try:
                reply = await inner(request)
            except BaseException:
                self.open_requests -= 1
                self._requests[request.provider, self._model_label(request.model), "499", "left"] += 1
                raise
            reply.close_callbacks.append(lambda reply: self._count_reply(request, reply))
            return reply

        return handle

    async def _count_reply(self, request: GatewayRequest, reply: GatewayReply) -> None:
        self.open_requests -= 1
        provider, model = reply.provider or request.provider, self._model_label(reply.model or request.model)
        self._requests[provider, model, str(reply.status), reply.ended] += 1
        if reply.usage is not None:
            self._tokens[provider, model, "input"] += reply.usage.input
            self._tokens[provider, model, "output"] += reply.usage.output
        self._micros[provider, model] += reply.micros or 0
        for attempt in request.attempts:
            self._attempts[attempt.provider, attempt.outcome] += 1
        for finding in request.findings:
            self._findings[finding.entry, finding.check, finding.action] += 1
        if reply.step_index and reply.status < 400:
            self._rescued[provider,] += 1
        self._first_byte.observe(reply.first_byte_s)
        self._duration.observe(self._clock.now() - request.started_at)

    def _model_label(self, model: str) -> str:
        """Return the model's name, or "other" once there are too many names, because clients choose the names."""
        if model not in self._models:
            if len(self._models) >= MAX_MODEL_LABELS:
                return "other"
            self._models.add(model)
        return model

    def families(self) -> Iterator[MetricFamily]:
        for name, help_, labels, counts in (
            (
                "requests",
                "Requests, by status and how they ended.",
                ("provider", "model", "status", "ended"),
                self._requests,
            ),
            ("tokens", "Tokens used, by kind: input or output.", ("provider", "model", "kind"), self._tokens),
            (
                "cost_micro_dollars",
                "Cost in micro-dollars of requests with a known price.",
                ("provider", "model"),
                self._micros,
            ),
            ("attempts", "Attempts at providers, by outcome.", ("provider", "outcome"), self._attempts),
            ("rescued", "Requests answered by a fallback.", ("provider",), self._rescued),
            ("findings", "Findings of guardrails.", ("entry", "check", "action"), self._findings),
        ):
            samples = [(_format_labels(labels, values), n) for values, n in sorted(counts.items())]
            yield MetricFamily.from_samples(f"emberline:gateway_{name}_total", help_, "counter", samples)
        for name, help_, count in self._counters_without_labels():
            full = f"emberline:gateway_{name}_total"
            yield MetricFamily(full, help_, "counter", [f"{full} {count}"])
        if self._spans is not None:
            yield from self._spans.families()
        yield from tls_families(self._tls)
        for name, help_, count in self._gauges_without_labels():
            yield MetricFamily(name, help_, "gauge", [f"{name} {count}"])
        states = [(_format_labels(("place",), (place,)), n) for place, n in self._breakers]
        help_ = "Models and keys of a provider that are in back-off because they failed too often."
        yield MetricFamily.from_samples("emberline:gateway_breaker_open", help_, "gauge", states)
        yield self._first_byte.family('at="gateway"')
        yield self._duration.family('at="gateway"')

    def _counters_without_labels(self) -> Iterator[tuple[str, str, int]]:
        """Yield name, help text and value of each counter without labels."""
        cache, writer = self._cached.stats, self._log_writer
        yield "cache_hits", "Replies served from the cache.", cache.hits
        yield "cache_misses", "Requests without a cached reply.", cache.misses
        yield "cache_shared", "Cache hits that waited for an identical request in progress.", cache.shared
        yield "cache_stored", "Replies stored in the cache.", cache.stored
        yield "cache_too_large", "Replies not cached because they are too large.", cache.too_large
        yield "log_written", "Log records written to the store.", writer.written_count
        yield (
            "log_dropped",
            "Log records dropped: the queue was full, or the store rejected them.",
            writer.dropped_count,
        )
        yield "log_failures", "Failed writes of log records to the store.", writer.failures
        if self._cached.semantic is not None:
            semantic = self._cached.semantic.stats
            yield "semantic_asked", "Prompts looked up in the semantic cache.", semantic.lookups
            yield "semantic_near", "Lookups that found a similar prompt above the threshold.", semantic.similar
            yield "semantic_served", "Replies served for a similar prompt.", semantic.served
            yield "semantic_compared", "Cached replies compared with the real reply in shadow mode.", semantic.compared
            yield "semantic_disagreed", "Compared replies that differed from the real reply.", semantic.disagreed
        if (limits := self._limiter.stats) is not None:
            yield "limits_reserved", "Reservations of limits made in Redis.", limits.reserved
            yield "limits_degraded", "Requests for which Redis was unavailable or returned an error.", limits.degraded
            yield "limits_lost", "Settlements of limits that were never sent to Redis.", limits.lost_settlements

    def _gauges_without_labels(self) -> Iterator[tuple[str, str, int]]:
        """Yield name, help text and value of each gauge without labels."""
        yield "emberline:gateway_open_requests", "Requests open now.", self.open_requests
        yield "emberline:gateway_log_queued", "Log records waiting to be written.", self._log_writer.queue_length
        if (limits := self._limiter.stats) is not None:
            yield (
                "emberline:gateway_limits_owed",
                "Settlements of limits waiting to be sent to Redis.",
                limits.pending_settlements,
            )


class RejectionCounter:
    """Counts the requests that the gateway answers with an error, also those that no layer sees."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, str]] = Counter()  # by status and error code

    def count(self, status: int, code: str) -> None:
        self._counts[status, code] += 1

    def family(self) -> MetricFamily:
        samples = [(f'status="{status}",code="{code}"', n) for (status, code), n in sorted(self._counts.items())]
        help_ = "Requests answered with an error, by error code."
        return MetricFamily.from_samples("emberline:gateway_rejections_total", help_, "counter", samples)


def _format_labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    escaped = (value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for value in values)
    return ",".join(f'{name}="{value}"' for name, value in zip(names, escaped, strict=True))
