"""Traces: who says what in `traceparent`, which spans are told, and a collector that costs nothing but spans."""

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
from emberline.server.worker.phase_spans import PhaseSpans
from emberline.trace import otlp_exporter as place
from emberline.trace.context import TraceContext
from emberline.trace.otlp_exporter import OTLPSpanExporter
from emberline.trace.span import Span, SpanKind
from emberline.trace.tracer import Tracer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Said = tuple[int, Mapping[str, str], bytes]


class Kept(list[Span]):
    def put(self, span: Span) -> None:
        self.append(span)


# -- contexts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags,sampled", [("01", True), ("00", False), ("03", True), ("fe", False)])
def test_a_context_is_read_and_written(flags: str, sampled: bool) -> None:
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
def test_what_is_no_context(header: str) -> None:
    assert TraceContext.parse(header) is None


def test_versions_to_come_may_say_more() -> None:
    assert TraceContext.parse(f"01-{TRACE}-{SPAN}-01-more") == TraceContext(TRACE, SPAN)


def test_of_new_traces_a_share_is_wanted() -> None:
    assert not any(TraceContext.start_trace(0.0).is_sampled for _ in range(200))
    assert all(TraceContext.start_trace(1.0).is_sampled for _ in range(200))
    assert 300 < sum(TraceContext.start_trace(0.5).is_sampled for _ in range(1000)) < 700


# -- spans -----------------------------------------------------------------------------------------------------------


def test_spans_hang_together_and_end_once() -> None:
    kept, clock = Kept(), ManualClock(100.0)
    root = Tracer(kept, clock).start_span("a request", SpanKind.SERVER, TraceContext(TRACE, SPAN))
    clock.advance(1.0)
    leg = root.start_child("a leg", SpanKind.CLIENT)
    assert TraceContext.parse(str(leg.context)) == leg.context
    leg.attributes |= {"int": 1, "float": 0.5, "bool": True, "str": "x", "unknown": None}
    leg.add_event("moved", reason="lost")
    clock.advance(1.0)
    leg.end("worker_lost")
    root.start_child("before", start_time=99.0).end(end_time=100.5)
    root.end()
    assert [span.context.trace_id for span in kept] == [TRACE] * 3
    assert [span.parent_id for span in kept] == [root.context.span_id, root.context.span_id, SPAN]
    told = leg.to_otlp(epoch=1000.0)
    assert (told["startTimeUnixNano"], told["endTimeUnixNano"]) == ("1101000000000", "1102000000000")
    assert told["status"] == {"code": 2, "message": "worker_lost"} and told["events"][0]["name"] == "moved"
    values = [{"intValue": "1"}, {"doubleValue": 0.5}, {"boolValue": True}, {"stringValue": "x"}]
    assert [each["value"] for each in told["attributes"]] == [*values, {"stringValue": "worker_lost"}]
    with pytest.raises(AssertionError, match="once"):
        root.end()


def test_who_asks_decides_whether_it_is_told() -> None:
    kept = Kept()
    never, always = Tracer(kept, ManualClock(), 0.0), Tracer(kept, ManualClock(), 1.0)
    for tracer, parent in ((never, None), (always, TraceContext(TRACE, SPAN, False))):
        span = tracer.start_span("x", SpanKind.SERVER, parent)
        child = span.start_child("y")
        child.end()
        span.end()
        assert str(child.context).endswith("-00")  # and so nobody behind us begins a trace of its own
    assert not kept
    never.start_span("x", SpanKind.SERVER, TraceContext(TRACE, SPAN)).end()
    assert [span.context.trace_id for span in kept] == [TRACE]


# -- exchanges -------------------------------------------------------------------------------------------------------


async def answered(x: Exchange) -> None:
    await x.reply_json({})


async def refused(x: Exchange) -> None:
    await x.reply_json({}, 404)


async def broke(x: Exchange) -> None:
    await x.start_event_stream()
    x.log_fields["error"] = "worker_lost"


async def overloaded(x: Exchange) -> None:
    raise Overloaded("full")


async def buggy(x: Exchange) -> None:
    raise KeyError("x")


async def left(x: Exchange) -> None:
    raise ClientDisconnected


@pytest.mark.parametrize(
    "handler,error",
    [
        (answered, ""),
        (refused, "404"),
        (broke, "worker_lost"),
        (overloaded, "queue_full"),
        (buggy, "internal_error"),
        (left, "client_gone"),
    ],
)
def test_an_exchange_is_a_span_however_it_ends(handler: Handler, error: str) -> None:
    async def nobody(*message: Any) -> Any: ...

    kept = Kept()
    tracing = RequestTracing(Tracer(kept, ManualClock()), cast("OTLPSpanExporter", None))
    headers = [(b"traceparent", b"not one"), (b"tracestate", b"vendor=1")]
    x = Exchange({"method": "POST", "path": "/v1/completions", "headers": headers}, nobody, nobody)

    async def work() -> None:
        with contextlib.suppress(Exception):
            await tracing.trace_handler(handler)(x)

    asyncio.run(work())
    (span,) = kept
    assert (span.error_code, span.parent_id, span.name) == (error, "", "text_completion")
    assert x.span is span and b"tracestate" not in x.headers


# -- a worker's phases -----------------------------------------------------------------------------------------------


def phases(*outputs: tuple[int, Output]) -> tuple[Span, dict[str, Span]]:
    """The request's span, and those below it by name; outputs come with their choice. It is over at 9."""
    kept = Kept()
    request = Tracer(kept, ManualClock()).start_span("x", SpanKind.SERVER, None)
    told = PhaseSpans(request, "m", [10, 7])
    for index, output in outputs:
        told.record_output(index, output)
    told.close(9.0)
    assert len({span.name for span in kept}) == len(kept)
    return request, {span.name: span for span in kept}


def test_phases_are_by_the_engines_clock() -> None:
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


def test_what_was_cut_off_ends_too() -> None:
    _, found = phases((0, Output("", 0, [1], timing=Timing(1.0, 2.0, 4.0))))
    assert (found["decode"].end_time, found["decode"].error_code) == (9.0, "cut_off")
    _, found = phases(
        (0, Output("", error="deadline_exceeded", finish=FinishReason.ERROR, timing=Timing(1.0, finished=5.0)))
    )
    assert [(span.name, span.end_time, span.error_code) for span in found.values()] == [("queue", 5.0, "cut_off")]
    assert not phases()[1]  # it never came to an output: nobody knows more than the request's own span tells


# -- the collector ---------------------------------------------------------------------------------------------------


def span(text: str = "") -> Span:
    made = Tracer(Kept(), ManualClock()).start_span("x", SpanKind.SERVER, None)
    made.attributes["text"] = text
    made.end()
    return made


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    async def whole(self, seconds: float, limit: int) -> bytes:
        return self.body

    def close(self) -> None:
        pass


class Peer:
    """A collector that says what it is told to, and then takes everything."""

    def __init__(self, *script: Said | None) -> None:
        self.script = list(script)

    async def ask(self, *request: Any) -> Answer:
        said = self.script.pop(0) if self.script else (200, {}, b"{}")
        if said is None:
            raise UpstreamUnreachable("nobody there")
        return Answer(*said)


class Silent(Peer):
    async def ask(self, *request: Any) -> Answer:
        await asyncio.sleep(3600)
        raise AssertionError


def made(peer: Peer) -> OTLPSpanExporter:
    config = TraceConfig("http://127.0.0.1:1/v1/traces")
    return OTLPSpanExporter(
        cast("HTTPConnectionPool", peer), config, {"service.name": "x"}, ManualClock(), ManualClock()
    )


def test_what_waits_is_bounded() -> None:
    async def work() -> None:
        collector = made(Silent())
        for _ in range(place.MAX_QUEUED_SPANS + 5):
            collector.put(span())
        assert collector.dropped == 5
        large = made(Silent())
        large.put(span("x" * place.MAX_QUEUED_BYTES))
        large.put(span("x"))
        assert large.dropped == 1

    asyncio.run(work())


def test_what_was_sent_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "BATCH_DELAY_S", 0.0)
    monkeypatch.setattr(place, "MAX_QUEUED_BYTES", 1000)

    async def work() -> OTLPSpanExporter:
        async with asyncio.timeout(20), made(Peer()) as collector:
            for sent in range(3):
                collector.put(span("x" * 600))
                while collector.sent == sent and not collector.dropped:
                    await asyncio.sleep(0.001)
        return collector

    collector = asyncio.run(work())
    assert (collector.sent, collector.dropped) == (3, 0)


def test_leaving_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "SHUTDOWN_TIMEOUT_S", 0.05)

    async def work() -> None:
        async with asyncio.timeout(20), made(Silent()) as collector:
            for _ in range(place.MAX_BATCH_SPANS + 1):  # one batch is under way then, the rest waits
                collector.put(span())
        assert collector.sent == 0 and collector.dropped == place.MAX_BATCH_SPANS + 1

    asyncio.run(work())


@pytest.mark.parametrize(
    "script,sent,dropped",
    [
        ([(503, {"retry-after": "1"}, b""), None], 3, 0),  # it may have been taken twice, but is there
        ([(400, {}, b"no")], 0, 3),
        ([None] * 4, 0, 3),
        ([(200, {}, b'{"partialSuccess":{"rejectedSpans":"2"}}')], 1, 2),
        ([(200, {}, b"not JSON")], 3, 0),
    ],
)
def test_all_are_sent_or_counted(script: list[Said | None], sent: int, dropped: int) -> None:
    async def work() -> OTLPSpanExporter:
        async with asyncio.timeout(20), made(Peer(*script)) as collector:  # who leaves makes it hurry
            for _ in range(3):
                collector.put(span())
        return collector

    collector = asyncio.run(work())
    assert (collector.sent, collector.dropped) == (sent, dropped)


# -- where to --------------------------------------------------------------------------------------------------------


def test_an_address_that_is_none() -> None:
    for url in ("collector:4318", "ftp://collector", "http://"):
        with pytest.raises(InvalidRequest, match="otlp"):
            TraceConfig.from_options(url, 1.0)
    with pytest.raises(InvalidRequest, match="share"):
        TraceConfig.from_options("http://collector:4318", 1.5)


def test_where_spans_go(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TraceConfig.from_options(None, 1.0) is None
    assert TraceConfig.from_options("http://c:4318", 0.5) == TraceConfig("http://c:4318/v1/traces", {}, 0.5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://env:4318/base/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Key=a%20b, other = c,")
    assert TraceConfig.from_options(None, 1.0) == TraceConfig(
        "http://env:4318/base/v1/traces", {"key": "a b", "other": "c"}
    )
    assert TraceConfig.from_options("", 1.0) is None


def test_a_cluster_is_traced_as_one() -> None:
    parser = argparse.ArgumentParser()
    cluster.add_arguments(parser)
    args = parser.parse_args(["up", "--otlp", "http://c:4318", "--trace-share", "0.5"])
    assert cluster._trace_options(args) == ["--otlp", "http://c:4318", "--trace-share", "0.5"]
    with pytest.raises(InvalidRequest, match="otlp"):
        cluster._trace_options(parser.parse_args(["up", "--otlp", "c:4318"]))


def test_what_is_not_traced_here_is_passed_on_as_it_came() -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1", "x-other": "1"}
    spoken = NativeDialect(UpstreamRequest("POST", "/v1/completions", headers, b"{}"), 1, None)
    for call in (
        spoken.build_plain_request(True),
        spoken.build_prefill_request({}, 1.0)[0],
        spoken.build_resume_request(Handoff(), 1.0, None, None),
    ):
        assert call.headers["traceparent"] == headers["traceparent"] and call.headers["tracestate"] == "vendor=1"
