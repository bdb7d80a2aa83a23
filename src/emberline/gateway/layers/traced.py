"""The layer that records one OpenTelemetry span for each call, ended when its reply has ended.

The parent is the caller's span, if the headers name one (`cf-aig-otel-trace-id`, `cf-aig-otel-parent-span-id`, or W3C's
`traceparent`), and the provider receives this span as its parent. Payloads are recorded only if enabled."""

from __future__ import annotations

import asyncio

from emberline.gateway.call import Call, Handler, Layer, Reply
from emberline.gateway.layers.logged import GONE, Tapped, asked, record
from emberline.gateway.logs.record import Record
from emberline.trace.context import PARENT, STATE, Context
from emberline.trace.span import About, Kind, Span
from emberline.trace.tracer import Tracer

LONGEST = 1 << 16  # of a prompt or a completion


def traced(tracer: Tracer, *, payloads: bool) -> Layer:
    def layer(inner: Handler) -> Handler:
        async def handle(call: Call) -> Reply:
            span = _begun(tracer, call)
            try:
                reply = await inner(call)
            except asyncio.CancelledError:  # the client left before the reply began
                _end(span, call, Reply(GONE, {}, b"", ended="left", error="client_gone"), None)
                raise
            chunks: list[bytes] | None = None
            if payloads and span.context.sampled and not _private(call):
                if isinstance(reply.body, bytes):
                    chunks = [reply.body[:LONGEST]]
                else:
                    reply.body = captured = Tapped(reply.body, LONGEST)
                    chunks = captured.kept

            async def end_span(reply: Reply) -> None:
                _end(span, call, reply, chunks)

            reply.endings.append(end_span)
            return reply

        return handle

    return layer


def _begun(tracer: Tracer, call: Call) -> Span:
    options, parent = call.options, Context.read(call.trace.get(PARENT, ""))
    if parent is None:
        call.trace.pop(STATE, None)  # tracestate is invalid without a traceparent
    if options.otel_trace_id:
        parent = Context(options.otel_trace_id, options.otel_parent_span_id or "")
    span = tracer.begin("", Kind.CLIENT, parent)
    call.trace[PARENT] = str(span.context)
    return span


def _private(call: Call) -> bool:
    options, settings = call.options, call.settings
    zdr = settings.zdr if options.zdr is None else options.zdr
    return zdr or options.collect_payload is False


def _end(span: Span, call: Call, reply: Reply, kept: list[bytes] | None) -> None:
    if not span.context.sampled:
        return
    row = record(call, reply, 0.0)
    span.name = f"{row.request_type or 'call'} {row.model}".strip()
    span.about |= _about(row)
    if kept is not None:
        prompt, completion = _text(asked(call, reply)), _text(b"".join(kept))
        span.about |= {"gen_ai.prompt_json": prompt, "gen_ai.completion_json": completion}
    span.end("" if row.success else row.error or row.ended)


def _about(record: Record) -> About:
    return {
        **{f"metadata.{name}": value for name, value in record.metadata.items()},
        "gen_ai.operation.name": record.request_type or None,
        "gen_ai.provider.name": record.provider,
        "gen_ai.model.provider": record.provider,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.usage.input,
        "gen_ai.usage.output_tokens": record.usage.output,
        "gen_ai.usage.cost": None if record.micros is None else record.micros / 1e6,  # dollars
        "gen_ai.conversation.id": record.session_id or None,
        "http.response.status_code": record.status,
        "emberline.log_id": record.id,
        "emberline.gateway": f"{record.account}/{record.gateway}",
        "emberline.cached": record.cached,
        "emberline.step": record.step,
        "emberline.attempts": record.attempts,
        "emberline.stream": record.stream,
        "emberline.first_byte_ms": record.first_byte_ms,
        "user.id": record.user or None,
    }


def _text(said: bytes) -> str:
    return said[:LONGEST].decode("utf-8", "replace")
