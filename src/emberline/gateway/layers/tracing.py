"""The layer that records one OpenTelemetry span per request. The span ends when the reply has ended.

The parent is the span named in the request's headers (`cf-aig-otel-trace-id`, `cf-aig-otel-parent-span-id`, or W3C's
`traceparent`). The span that the layer records is in turn sent to the provider, as the parent of the
provider's spans. Prompts and replies are recorded only if enabled.
"""

from __future__ import annotations

import asyncio

from emberline.gateway.core.log_record import LogRecord
from emberline.gateway.core.request import GatewayReply, GatewayRequest, Handler, Layer
from emberline.gateway.layers.call_logging import CLIENT_GONE_STATUS, CapturedStream, make_record, request_body_to_log
from emberline.trace.context import TRACEPARENT_HEADER, TRACESTATE_HEADER, TraceContext
from emberline.trace.span import Attributes, Span, SpanKind
from emberline.trace.tracer import Tracer

MAX_PAYLOAD_BYTES = 1 << 16  # of a prompt or a completion


def trace_calls(tracer: Tracer, *, record_payloads: bool) -> Layer:
    def layer(inner: Handler) -> Handler:
        async def handle(call: GatewayRequest) -> GatewayReply:
            span = _start_span(tracer, call)
            try:
                reply = await inner(call)
            except asyncio.CancelledError:  # the client left before the reply began
                _end_span(
                    span, call, GatewayReply(CLIENT_GONE_STATUS, {}, b"", ended="left", error="client_gone"), None
                )
                raise
            chunks: list[bytes] | None = None
            if record_payloads and span.context.is_sampled and not _payload_is_private(call):
                if isinstance(reply.body, bytes):
                    chunks = [reply.body[:MAX_PAYLOAD_BYTES]]
                else:
                    reply.body = captured = CapturedStream(reply.body, MAX_PAYLOAD_BYTES)
                    chunks = captured.chunks

            async def end_span(reply: GatewayReply) -> None:
                _end_span(span, call, reply, chunks)

            reply.close_callbacks.append(end_span)
            return reply

        return handle

    return layer


def _start_span(tracer: Tracer, call: GatewayRequest) -> Span:
    options, parent = call.options, TraceContext.parse(call.trace_headers.get(TRACEPARENT_HEADER, ""))
    if parent is None:
        call.trace_headers.pop(TRACESTATE_HEADER, None)  # tracestate is invalid without a traceparent
    if options.otel_trace_id:
        parent = TraceContext(options.otel_trace_id, options.otel_parent_span_id or "")
    span = tracer.start_span("", SpanKind.CLIENT, parent)
    call.trace_headers[TRACEPARENT_HEADER] = str(span.context)
    return span


def _payload_is_private(call: GatewayRequest) -> bool:
    options, settings = call.options, call.settings
    zdr = settings.zdr if options.zdr is None else options.zdr
    return zdr or options.collect_payload is False


def _end_span(span: Span, call: GatewayRequest, reply: GatewayReply, reply_chunks: list[bytes] | None) -> None:
    if not span.context.is_sampled:
        return
    row = make_record(call, reply, 0.0)
    span.name = f"{row.request_type or 'call'} {row.model}".strip()
    span.attributes |= _span_attributes(row)
    if reply_chunks is not None:
        prompt, completion = _decode_text(request_body_to_log(call, reply)), _decode_text(b"".join(reply_chunks))
        span.attributes |= {"gen_ai.prompt_json": prompt, "gen_ai.completion_json": completion}
    span.end("" if row.success else row.error or row.ended)


def _span_attributes(record: LogRecord) -> Attributes:
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


def _decode_text(payload: bytes) -> str:
    return payload[:MAX_PAYLOAD_BYTES].decode("utf-8", "replace")
