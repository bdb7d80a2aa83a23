"""The layer that writes one log record for every call when its reply has ended.

The headers of the reply name the record."""

from __future__ import annotations

import asyncio
from typing import Protocol

from emberline.core.clock import Clock
from emberline.gateway.call import Call, Handler, Layer, Reply, Stream
from emberline.gateway.costs.usage import Usage
from emberline.gateway.logs.record import Payload, Record
from emberline.gateway.providers.wire import safe_header

GONE = 499  # nginx's status for a client that closed the connection
LARGEST = 1 << 20  # bytes of a reply that are logged
KINDS = {"openai-chat": "chat", "openai-responses": "chat", "anthropic": "chat", "gemini": "chat",
         "openai-embeddings": "embeddings"}  # fmt: skip


class Journal(Protocol):
    def put(self, record: Record, payload: Payload | None = None) -> None:
        """Queue the record; this never blocks."""
        ...


def logged(journal: Journal, clock: Clock) -> Layer:
    def layer(inner: Handler) -> Handler:
        async def handle(call: Call) -> Reply:
            collect = call.settings.logs.collect if call.options.collect_log is None else call.options.collect_log
            try:
                reply = await inner(call)
            except asyncio.CancelledError:  # the client left before the reply began
                if collect:
                    left = Reply(GONE, {}, b"", ended="left", error="client_gone")
                    journal.put(record(call, left, clock.now() - call.began), None)
                raise
            heads(call, reply)
            if collect:
                chunks = _kept(call, reply)

                async def log_on_end(reply: Reply) -> None:
                    seconds = clock.now() - call.began
                    payload = None if chunks is None else Payload(asked(call, reply), b"".join(chunks))
                    journal.put(record(call, reply, seconds), payload)

                reply.endings.append(log_on_end)
            return reply

        return handle

    return layer


def heads(call: Call, reply: Reply) -> None:
    headers = reply.headers
    headers["cf-aig-log-id"] = headers["cf-aig-request-id"] = call.id
    headers["cf-aig-event-id"] = call.options.event_id or call.id
    headers.setdefault("cf-aig-cache-status", "HIT" if reply.cached else "MISS")
    headers["cf-aig-step"] = str(reply.step)
    headers["cf-aig-provider"] = safe_header(reply.provider or call.provider)
    headers["cf-aig-model"] = safe_header(reply.model or call.model)
    headers.update(call.notes)


def asked(call: Call, reply: Reply) -> bytes:
    """Return the request body to log: of a list of steps only the one that answered.

    The list itself contains keys.
    """
    if call.redacted:
        return call.redacted[-1]
    own = call.steps[reply.step].body if reply.step < len(call.steps) else None
    return call.body if own is None else own


def _kept(call: Call, reply: Reply) -> list[bytes] | None:
    """Return the list that collects the reply's bytes, or None if payloads are not logged."""
    is_enabled = call.settings.logs.payloads if call.options.collect_payload is None else call.options.collect_payload
    is_private = call.settings.zdr if call.options.zdr is None else call.options.zdr
    if not is_enabled or is_private:
        return None
    if isinstance(reply.body, bytes):
        return [reply.body[:LARGEST]]
    reply.body = captured = Tapped(reply.body)
    return captured.kept


class Tapped:
    """A stream that keeps a copy of its first bytes as they pass."""

    def __init__(self, stream: Stream, most: int = LARGEST) -> None:
        self.kept: list[bytes] = []
        self._left = most
        self._stream = stream

    def __aiter__(self) -> Tapped:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._stream.__anext__()
        if self._left > 0:
            self.kept.append(chunk[: self._left])
            self._left -= len(chunk)
        return chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def found(call: Call, reply: Reply) -> dict[str, str]:
    """Return the turn id, guardrail findings and continuing provider, by which the log can be searched."""
    turn_id = call.options.turn_id
    if not (call.findings or reply.continued or turn_id):
        return {}
    findings = ", ".join(dict.fromkeys(map(str, call.findings)))
    metadata = {"guardrails": findings, "continued": reply.continued, "turn_id": turn_id or ""}
    return {name: value for name, value in metadata.items() if value}


def record(call: Call, reply: Reply, seconds: float) -> Record:
    options = call.options
    succeeded = reply.ended == "complete" and reply.status < 400
    return Record(
        id=call.id,
        account=call.account,
        gateway=call.gateway,
        provider=reply.provider or call.provider,
        model=reply.model or call.model,
        path=call.endpoint.partition("?")[0],  # the query may contain a key
        dialect=call.dialect,
        request_type=KINDS.get(call.dialect, ""),
        status=reply.status,
        success=succeeded,
        ended=reply.ended or "left",  # type: ignore[arg-type]
        cached=reply.cached,
        stream=call.stream,
        step=reply.step,
        attempts=max(1, len(call.trail)),
        usage=reply.usage or Usage(),
        estimated=reply.estimated,
        micros=reply.micros,
        custom_cost=options.custom_cost is not None,
        duration_ms=round(seconds * 1e3),
        first_byte_ms=None if reply.first_byte is None else round(reply.first_byte * 1e3),
        error=reply.error,
        key_id=call.identity.key_id,
        user=call.identity.user,
        metadata={**call.metadata, **found(call, reply)},
        event_id=options.event_id or "",
        session_id=options.session_id or "",
        request_content_type=call.headers.get("content-type", ""),
        response_content_type=reply.headers.get("content-type", ""),
    )
