"""Tracing: `traceparent`, spans of requests and phases, and the OTLP exporter."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest

from emberline.cli import cluster
from emberline.core.clock import ManualClock
from emberline.core.config import TraceConfig
from emberline.core.errors import InvalidRequest, Overloaded
from emberline.core.events import Output, Timing
from emberline.core.handoff import BlockPull, Handoff
from emberline.core.request import FinishReason
from emberline.net.connection_pool import HTTPConnectionPool
from emberline.net.errors import UpstreamUnreachable
from emberline.router.native import NativeDialect
from emberline.router.upstream_request import UpstreamRequest
from emberline.server.exchange import ClientDisconnected, Exchange
from emberline.server.tracing import Handler, RequestTracing
from emberline.trace import otlp_exporter
from emberline.trace.context import TraceContext
from emberline.trace.otlp_exporter import OTLPSpanExporter
from emberline.trace.span import Span, SpanKind
from emberline.trace.tracer import Tracer
from emberline.worker.phase_spans import PhaseSpans

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CollectorReply = tuple[int, Mapping[str, str], bytes]


class CollectedSpans(list[Span]):
    def put(self, span: Span) -> None:
        self.append(span)


# -- contexts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags,sampled", [("01", True), ("00", False), ("03", True), ("fe", False)])
def test_traceparent_round_trip(flags: str, sampled: bool) -> None:
    found = TraceContext.parse(f"00-{TRACE}-{SPAN}-{flags}")
    assert found == TraceContext(TRACE, SPAN, sampled)
    assert TraceContext.parse(str(found)) == found


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
    ],
)
def test_invalid_traceparent(header: str) -> None:
    assert TraceContext.parse(header) is None


def test_later_traceparent_version_may_have_more_fields() -> None:
    assert TraceContext.parse(f"01-{TRACE}-{SPAN}-01-more") == TraceContext(TRACE, SPAN)


def test_sample_rate_of_new_traces() -> None:
    assert not any(TraceContext.start_trace(0.0).is_sampled for _ in range(200))
    assert all(TraceContext.start_trace(1.0).is_sampled for _ in range(200))
    assert 300 < sum(TraceContext.start_trace(0.5).is_sampled for _ in range(1000)) < 700


# -- spans -----------------------------------------------------------------------------------------------------------


def test_child_spans_and_single_end() -> None:
    collected, clock = CollectedSpans(), ManualClock(100.0)
    root = Tracer(collected, clock).start_span("a request", SpanKind.SERVER, TraceContext(TRACE, SPAN))
    clock.advance(1.0)
    child = root.start_child("a leg", SpanKind.CLIENT)
    assert TraceContext.parse(str(child.context)) == child.context
    child.attributes |= {"int": 1, "float": 0.5, "bool": True, "str": "x", "unknown": None}
    child.add_event("moved", reason="lost")
    clock.advance(1.0)
    child.end("worker_lost")
    root.start_child("before", start_time=99.0).end(end_time=100.5)
    root.end()
    assert [span.context.trace_id for span in collected] == [TRACE] * 3
    assert [span.parent_id for span in collected] == [root.context.span_id, root.context.span_id, SPAN]
    exported = child.to_otlp(epoch=1000.0)
    assert (exported["startTimeUnixNano"], exported["endTimeUnixNano"]) == ("1101000000000", "1102000000000")
    assert exported["status"] == {"code": 2, "message": "worker_lost"} and exported["events"][0]["name"] == "moved"
    values = [{"intValue": "1"}, {"doubleValue": 0.5}, {"boolValue": True}, {"stringValue": "x"}]
    assert [each["value"] for each in exported["attributes"]] == [*values, {"stringValue": "worker_lost"}]
    with pytest.raises(AssertionError, match="once"):
        root.end()


def test_client_decides_sampling() -> None:
    collected = CollectedSpans()
    never, always = Tracer(collected, ManualClock(), 0.0), Tracer(collected, ManualClock(), 1.0)
    for tracer, parent in ((never, None), (always, TraceContext(TRACE, SPAN, False))):
        span = tracer.start_span("x", SpanKind.SERVER, parent)
        child = span.start_child("y")
        child.end()
        span.end()
        assert str(child.context).endswith("-00")  # so that no process behind starts a trace of its own
    assert not collected
    never.start_span("x", SpanKind.SERVER, TraceContext(TRACE, SPAN)).end()
    assert [span.context.trace_id for span in collected] == [TRACE]


# -- exchanges -------------------------------------------------------------------------------------------------------


async def reply_ok(exchange: Exchange) -> None:
    await exchange.reply_json({})


async def reply_rejected(exchange: Exchange) -> None:
    await exchange.reply_json({}, 404)


async def reply_interrupted(exchange: Exchange) -> None:
    await exchange.start_event_stream()
    exchange.log_fields["error"] = "worker_lost"


async def reply_overloaded(exchange: Exchange) -> None:
    raise Overloaded("full")


async def reply_bug(exchange: Exchange) -> None:
    raise KeyError("x")


async def client_left(exchange: Exchange) -> None:
    raise ClientDisconnected


@pytest.mark.parametrize(
    "handler,error",
    [
        (reply_ok, ""),
        (reply_rejected, "404"),
        (reply_interrupted, "worker_lost"),
        (reply_overloaded, "queue_full"),
        (reply_bug, "internal_error"),
        (client_left, "client_gone"),
    ],
)
def test_every_request_outcome_ends_its_span(handler: Handler, error: str) -> None:
    async def unused(*message: Any) -> Any: ...

    collected = CollectedSpans()
    tracing = RequestTracing(Tracer(collected, ManualClock()), cast("OTLPSpanExporter", None))
    headers = [(b"traceparent", b"not one"), (b"tracestate", b"vendor=1")]
    exchange = Exchange({"method": "POST", "path": "/v1/completions", "headers": headers}, unused, unused)

    async def work() -> None:
        with contextlib.suppress(Exception):
            await tracing.trace_handler(handler)(exchange)

    asyncio.run(work())
    (span,) = collected
    assert (span.error_code, span.parent_id, span.name) == (error, "", "text_completion")
    assert exchange.span is span and b"tracestate" not in exchange.headers


# -- a worker's phases -----------------------------------------------------------------------------------------------


def phases(*outputs: tuple[int, Output]) -> tuple[Span, dict[str, Span]]:
    """Return the request's span and its child spans by name, for outputs with their choice; it ends at time 9."""
    collected = CollectedSpans()
    request = Tracer(collected, ManualClock()).start_span("x", SpanKind.SERVER, None)
    exported = PhaseSpans(request, "m", [10, 7])
    for index, output in outputs:
        exported.record_output(index, output)
    exported.close(9.0)
    assert len({span.name for span in collected}) == len(collected)
    return request, {span.name: span for span in collected}


def test_phase_spans_use_engine_times() -> None:
    pulled = BlockPull("peer", 2.0, 3.0, 0.5, 4096, "ticket_over")
    whole = Timing(1.0, 2.0, 4.0, 8.0, pulled)
    request, found = phases(
        (0, Output("", 0, [1], cached_tokens=4, timing=Timing(1.0, 2.0, 4.0, None, pulled))),
        (1, Output("", 0, [1], cached_tokens=2, timing=whole)),  # of another prompt
        (0, Output("", 0, [2])),
        (0, Output("", 0, [3], finish=FinishReason.LENGTH, timing=whole)),
    )
    edges = {name: (span.start_time, span.end_time, span.error_code) for name, span in found.items()}
    assert edges == {"queue": (1.0, 2.0, ""), "prefill": (2.0, 4.0, ""), "pull": (2.0, 3.0, "ticket_over"),
                     "decode": (4.0, 8.0, "")}  # fmt: skip
    assert found["pull"].parent_id == found["prefill"].context.span_id
    assert found["prefill"].attributes == {"emberline.prompt_tokens": 10, "emberline.cached_tokens": 4}
    assert found["decode"].attributes == {"emberline.tokens": 3, "emberline.ttft": 3.0, "emberline.itl_mean": 2.0}
    assert [request.attributes[f"gen_ai.usage.{name}"] for name in ("input_tokens", "output_tokens")] == [17, 4]
    assert request.attributes["gen_ai.usage.cache_read.input_tokens"] == 6


def test_decode_span_counts_drafts_of_the_first_choice() -> None:
    whole = Timing(1.0, 2.0, 4.0, 8.0)
    last = {"finish": FinishReason.LENGTH, "timing": whole}
    _, found = phases(
        (0, Output("", 0, [1, 2], drafted_tokens=5, accepted_tokens=3, **last)),
        (1, Output("", 1, [1], drafted_tokens=7, accepted_tokens=1, **last)),
    )
    counts = {name: found["decode"].attributes.get(f"emberline.{name}_tokens") for name in ("drafted", "accepted")}
    assert counts == {"drafted": 5, "accepted": 3}


def test_cut_off_phase_has_an_end() -> None:
    _, found = phases((0, Output("", 0, [1], timing=Timing(1.0, 2.0, 4.0))))
    assert (found["decode"].end_time, found["decode"].error_code) == (9.0, "cut_off")
    _, found = phases(
        (0, Output("", error="deadline_exceeded", finish=FinishReason.ERROR, timing=Timing(1.0, finished=5.0)))
    )
    assert [(span.name, span.end_time, span.error_code) for span in found.values()] == [("queue", 5.0, "cut_off")]
    assert not phases()[1]  # without an output there is only the request's own span


# -- the collector ---------------------------------------------------------------------------------------------------


def span(text: str = "") -> Span:
    ended = Tracer(CollectedSpans(), ManualClock()).start_span("x", SpanKind.SERVER, None)
    ended.attributes["text"] = text
    ended.end()
    return ended


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    async def read_all(self, timeout_s: float, max_bytes: int) -> bytes:
        return self.body

    def close(self) -> None:
        pass


class ScriptedCollector:
    """A collector with scripted replies, which then accepts everything."""

    def __init__(self, *script: CollectorReply | None) -> None:
        self.script = list(script)

    async def request(self, *request: Any) -> Answer:
        reply = self.script.pop(0) if self.script else (200, {}, b"{}")
        if reply is None:
            raise UpstreamUnreachable("connection refused")
        return Answer(*reply)


class SilentCollector(ScriptedCollector):
    async def request(self, *request: Any) -> Answer:
        await asyncio.sleep(3600)
        raise AssertionError


def make_exporter(peer: ScriptedCollector) -> OTLPSpanExporter:
    config = TraceConfig("http://127.0.0.1:1/v1/traces")
    return OTLPSpanExporter(
        cast("HTTPConnectionPool", peer), config, {"service.name": "x"}, ManualClock(), ManualClock()
    )


def test_queue_is_bounded() -> None:
    async def work() -> None:
        collector = make_exporter(SilentCollector())
        for _ in range(otlp_exporter.MAX_QUEUED_SPANS + 5):
            collector.put(span())
        assert collector.dropped_count == 5
        large = make_exporter(SilentCollector())
        large.put(span("x" * otlp_exporter.MAX_QUEUED_BYTES))
        large.put(span("x"))
        assert large.dropped_count == 1

    asyncio.run(work())


def test_sent_spans_free_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_exporter, "BATCH_DELAY_S", 0.0)
    monkeypatch.setattr(otlp_exporter, "MAX_QUEUED_BYTES", 1000)

    async def work() -> OTLPSpanExporter:
        async with asyncio.timeout(20), make_exporter(ScriptedCollector()) as collector:
            for sent in range(3):
                collector.put(span("x" * 600))
                while collector.sent_count == sent and not collector.dropped_count:
                    await asyncio.sleep(0.001)
        return collector

    collector = asyncio.run(work())
    assert (collector.sent_count, collector.dropped_count) == (3, 0)


def test_shutdown_does_not_wait_for_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_exporter, "SHUTDOWN_TIMEOUT_S", 0.05)

    async def work() -> None:
        async with asyncio.timeout(20), make_exporter(SilentCollector()) as collector:
            for _ in range(otlp_exporter.MAX_BATCH_SPANS + 1):  # one batch is being sent, the rest waits
                collector.put(span())
        assert collector.sent_count == 0 and collector.dropped_count == otlp_exporter.MAX_BATCH_SPANS + 1

    asyncio.run(work())


@pytest.mark.parametrize(
    "script,sent,dropped",
    [
        ([(503, {"retry-after": "1"}, b""), None], 3, 0),  # it may have been received twice
        ([(400, {}, b"no")], 0, 3),
        ([None] * 4, 0, 3),
        ([(200, {}, b'{"partialSuccess":{"rejectedSpans":"2"}}')], 1, 2),
        ([(200, {}, b"not JSON")], 3, 0),
    ],
)
def test_every_span_is_sent_or_counted_as_dropped(script: list[CollectorReply | None], sent: int, dropped: int) -> None:
    async def work() -> OTLPSpanExporter:
        async with (
            asyncio.timeout(20),
            make_exporter(ScriptedCollector(*script)) as collector,
        ):  # leaving the context skips the delays
            for _ in range(3):
                collector.put(span())
        return collector

    collector = asyncio.run(work())
    assert (collector.sent_count, collector.dropped_count) == (sent, dropped)


# -- where to --------------------------------------------------------------------------------------------------------


def test_invalid_collector_url() -> None:
    for url in ("collector:4318", "ftp://collector", "http://"):
        with pytest.raises(InvalidRequest, match="otlp"):
            TraceConfig.from_options(url, 1.0)
    with pytest.raises(InvalidRequest, match="share"):
        TraceConfig.from_options("http://collector:4318", 1.5)


def test_collector_url_from_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TraceConfig.from_options(None, 1.0) is None
    assert TraceConfig.from_options("http://c:4318", 0.5) == TraceConfig("http://c:4318/v1/traces", {}, 0.5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://env:4318/base/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Key=a%20b, other = c,")
    assert TraceConfig.from_options(None, 1.0) == TraceConfig(
        "http://env:4318/base/v1/traces", {"key": "a b", "other": "c"}
    )
    assert TraceConfig.from_options("", 1.0) is None


def test_cluster_shares_trace_settings() -> None:
    parser = argparse.ArgumentParser()
    cluster.add_arguments(parser)
    args = parser.parse_args(["up", "--otlp", "http://c:4318", "--trace-share", "0.5"])
    assert cluster._trace_options(args) == ["--otlp", "http://c:4318", "--trace-share", "0.5"]
    with pytest.raises(InvalidRequest, match="otlp"):
        cluster._trace_options(parser.parse_args(["up", "--otlp", "c:4318"]))


def test_untraced_process_forwards_trace_headers() -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1", "x-other": "1"}
    spoken = NativeDialect(UpstreamRequest("POST", "/v1/completions", headers, b"{}"), 1, None)
    for call in (
        spoken.build_plain_request(True),
        spoken.build_prefill_request({}, 1.0)[0],
        spoken.build_resume_request(Handoff(), 1.0, None, None),
    ):
        assert call.headers["traceparent"] == headers["traceparent"] and call.headers["tracestate"] == "vendor=1"
