"""The layer that writes one log record for each request when the reply has ended.

A header of the reply contains the id of the log record.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from emberline.core.clock import Clock
from emberline.core.errors import Unauthorized
from emberline.gateway.core.log_record import LogPayload, LogRecord
from emberline.gateway.core.request import GatewayReply, GatewayRequest, Handler, Layer, ReplyStream
from emberline.gateway.providers.provider_call import safe_header
from emberline.wire.usage import Usage

CLIENT_GONE_STATUS = 499  # nginx's status for a client that closed the connection
MAX_PAYLOAD_BYTES = 1 << 20  # of a reply; the rest is not logged
REQUEST_TYPES = {
    "openai-chat": "chat",
    "openai-responses": "chat",
    "anthropic": "chat",
    "gemini": "chat",
    "openai-embeddings": "embeddings",
}


class RecordSink(Protocol):
    def put(self, record: LogRecord, payload: LogPayload | None = None) -> None:
        """Queue the record without blocking."""
        ...


def log_calls(sink: RecordSink, clock: Clock) -> Layer:
    def layer(inner: Handler) -> Handler:
        async def handle(call: GatewayRequest) -> GatewayReply:
            collect = call.settings.logs.collect if call.options.collect_log is None else call.options.collect_log
            try:
                reply = await inner(call)
            except asyncio.CancelledError:  # the client left before the reply began
                if collect:
                    no_reply = GatewayReply(CLIENT_GONE_STATUS, {}, b"", ended="left", error="client_gone")
                    sink.put(make_record(call, no_reply, clock.now() - call.started_at), None)
                raise
            set_reply_headers(call, reply)
            if is_private(call):
                reply.error_message = ""  # it may repeat parts of the prompt
            if collect and not _is_without_key(reply):
                chunks = _capture_payload(call, reply)

                async def log_on_end(reply: GatewayReply) -> None:
                    seconds = clock.now() - call.started_at
                    payload = None if chunks is None else LogPayload(request_body_to_log(call, reply), b"".join(chunks))
                    sink.put(make_record(call, reply, seconds), payload)

                reply.close_callbacks.append(log_on_end)
            return reply

        return handle

    return layer


def set_reply_headers(call: GatewayRequest, reply: GatewayReply) -> None:
    headers = reply.headers
    headers["cf-aig-log-id"] = headers["cf-aig-request-id"] = call.id
    headers["cf-aig-event-id"] = call.options.event_id or call.id
    headers.setdefault("cf-aig-cache-status", "HIT" if reply.cached else "MISS")
    headers["cf-aig-step"] = str(reply.step_index)
    headers["cf-aig-provider"] = safe_header(reply.provider or call.provider)
    headers["cf-aig-model"] = safe_header(reply.model or call.model)
    headers.update(call.reply_headers)


def request_body_to_log(call: GatewayRequest, reply: GatewayReply) -> bytes:
    """Return the request body to log.

    If the body is a list of steps, return only the body of the step that answered, because the list contains keys.
    """
    if call.redacted_bodies:
        return call.redacted_bodies[-1]
    own = call.steps[reply.step_index].body if reply.step_index < len(call.steps) else None
    return call.body if own is None else own


def is_private(call: GatewayRequest) -> bool:
    """Return whether prompts and replies must not be stored (zero data retention)."""
    return call.settings.zdr if call.options.zdr is None else call.options.zdr


def _is_without_key(reply: GatewayReply) -> bool:
    """Return whether the gateway rejected the request for its key: strangers must not fill the store with records."""
    return reply.status == Unauthorized.status and reply.error == Unauthorized.code


def _capture_payload(call: GatewayRequest, reply: GatewayReply) -> list[bytes] | None:
    """Return a list that collects the bytes of the reply as they are sent.

    Return None if payloads are not logged.
    """
    is_enabled = call.settings.logs.payloads if call.options.collect_payload is None else call.options.collect_payload
    if not is_enabled or is_private(call):
        return None
    if isinstance(reply.body, bytes):
        return [reply.body[:MAX_PAYLOAD_BYTES]]
    reply.body = captured = CapturedStream(reply.body)
    return captured.chunks


class CapturedStream:
    """A wrapper around a stream that keeps a copy of the first bytes."""

    def __init__(self, stream: ReplyStream, max_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self.chunks: list[bytes] = []
        self._bytes_left = max_bytes
        self._stream = stream

    def __aiter__(self) -> CapturedStream:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._stream.__anext__()
        if self._bytes_left > 0:
            self.chunks.append(chunk[: self._bytes_left])
            self._bytes_left -= len(chunk)
        return chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def searchable_metadata(call: GatewayRequest, reply: GatewayReply) -> dict[str, str]:
    """Return metadata for log searches.

    These are the id of the conversation turn, the guardrail findings, and the provider that continued a broken stream.
    """
    turn_id = call.options.turn_id
    if not (call.findings or reply.continued_by or turn_id):
        return {}
    findings = ", ".join(dict.fromkeys(map(str, call.findings)))
    metadata = {"guardrails": findings, "continued": reply.continued_by, "turn_id": turn_id or ""}
    return {name: value for name, value in metadata.items() if value}


def make_record(call: GatewayRequest, reply: GatewayReply, duration_s: float) -> LogRecord:
    options = call.options
    succeeded = reply.ended == "complete" and reply.status < 400
    return LogRecord(
        id=call.id,
        account=call.account,
        gateway=call.gateway,
        provider=reply.provider or call.provider,
        model=reply.model or call.model,
        path=call.endpoint.partition("?")[0],  # the query may contain a key
        dialect=call.dialect,
        request_type=REQUEST_TYPES.get(call.dialect, ""),
        status=reply.status,
        success=succeeded,
        ended=reply.ended or "left",  # type: ignore[arg-type]
        cached=reply.cached,
        stream=call.stream,
        step=reply.step_index,
        attempts=max(1, len(call.attempts)),
        usage=reply.usage or Usage(),
        estimated=reply.estimated,
        micros=reply.micros,
        custom_cost=options.custom_cost is not None,
        duration_ms=round(duration_s * 1e3),
        first_byte_ms=None if reply.first_byte_s is None else round(reply.first_byte_s * 1e3),
        error=reply.error,
        message="" if is_private(call) else reply.error_message,
        key_id=call.identity.key_id,
        user=call.identity.user,
        metadata={**call.metadata, **searchable_metadata(call, reply)},
        event_id=options.event_id or "",
        session_id=options.session_id or "",
        request_content_type=call.headers.get("content-type", ""),
        response_content_type=reply.headers.get("content-type", ""),
    )
