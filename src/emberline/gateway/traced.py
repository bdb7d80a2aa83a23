"""Traced: every call is told as a span when its reply has ended, below the caller's own if it says which
(`cf-aig-otel-trace-id`, `cf-aig-otel-parent-span-id`). What was asked and answered is in it only if wished."""

from __future__ import annotations

import asyncio
from typing import Protocol

from emberline.core.clock import Clock
from emberline.gateway.call import Call, Handler, Layer, Reply
from emberline.gateway.logged import GONE, Tapped, record
from emberline.gateway.span import LONGEST, Span


class Spans(Protocol):
    def put(self, span: Span) -> None:
        """Never waits."""
        ...


def traced(spans: Spans, clock: Clock, *, payloads: bool) -> Layer:
    def layer(inner: Handler) -> Handler:
        async def handle(call: Call) -> Reply:
            try:
                reply = await inner(call)
            except asyncio.CancelledError:  # the client left before there was anything to send
                spans.put(_span(call, Reply(GONE, {}, b"", ended="left", error="client_gone"), clock.now(), None))
                raise
            kept: list[bytes] | None = None
            if payloads and not _private(call):
                if isinstance(reply.body, bytes):
                    kept = [reply.body[:LONGEST]]
                else:
                    reply.body = tapped = Tapped(reply.body, LONGEST)
                    kept = tapped.kept

            async def ended(reply: Reply) -> None:
                spans.put(_span(call, reply, clock.now(), kept))

            reply.endings.append(ended)
            return reply

        return handle

    return layer


def _private(call: Call) -> bool:
    options, settings = call.options, call.settings
    zdr = settings.zdr if options.zdr is None else options.zdr
    return zdr or options.collect_payload is False


def _span(call: Call, reply: Reply, now: float, kept: list[bytes] | None) -> Span:
    asked = call.redacted[-1] if call.redacted else call.body
    return Span(
        record=record(call, reply, now - call.began),
        trace=call.options.otel_trace_id or "",
        parent=call.options.otel_parent_span_id or "",
        prompt=None if kept is None else asked[:LONGEST],
        completion=None if kept is None else b"".join(kept),
    )
