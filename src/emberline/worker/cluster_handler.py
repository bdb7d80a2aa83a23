"""ClusterHandler: endpoints that a router calls.

The router lets this worker continue a reply that a different worker has started (resume), or compute a prompt whose
reply a different worker will generate (prefill).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec

from emberline.cluster.resumable_streams import ReclaimRequest
from emberline.core.errors import BodyTooLarge, EmberlineError, EngineFailed, InvalidRequest
from emberline.core.events import Output
from emberline.core.handoff import EVENT_IDS_HEADER, Handoff
from emberline.core.offload import offload
from emberline.core.pickle_cost import check_pickle_cost
from emberline.core.request import FinishReason
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.server.exchange import Exchange
from emberline.wire.errors import render_openai_error
from emberline.wire.sse import dumps
from emberline.worker.generation_handler import GenerationHandler
from emberline.worker.protocols import PROTOCOLS
from emberline.worker.request_context import CHAIN_HEADER, RequestContext, tenant_from_router

log = logging.getLogger("emberline.server")

MAX_CALL_BYTES = 1 << 16  # size of a router's call to continue a stream, or to sleep
MAX_FORWARD_OVERHEAD_BYTES = 8 << 20  # of a forwarded request beside the client's body


class ForwardedRequest(msgspec.Struct):
    """A client's request as a router forwards it, with the output that other workers have generated."""

    path: str
    body: msgspec.Raw
    seed: int | None = None
    id: str | None = None  # of the reply, as the client sees it
    created: int | None = None
    handoff: dict[str, Any] = {}
    timeout: float | None = None  # seconds left for the request

    def to_context(self) -> RequestContext:
        given: dict[str, Any] = {}
        if self.id is not None:
            given["id"] = self.id.removeprefix(PROTOCOLS[self.path].id_prefix)
        if self.created is not None:
            given["created"] = self.created
        if self.timeout is not None:
            given["timeout"] = self.timeout
        return RequestContext(seed=self.seed, is_tracked=True, handoff=Handoff.parse(self.handoff), **given)


class WorkerSleepRequest(msgspec.Struct):
    on: bool = True  # False: wake


class ClusterHandler:
    def __init__(
        self,
        handler: GenerationHandler,
        max_body: int,
        has_api_keys: bool = False,
        set_asleep: Callable[[bool], None] | None = None,
    ) -> None:
        """`max_body`: size limit of a client's body in bytes. `has_api_keys`: clients need an API key.

        `set_asleep`: puts the models to sleep or wakes them; None: they cannot sleep."""
        self._handler = handler
        self._has_api_keys = has_api_keys
        self._max_body = max_body
        self._set_asleep = set_asleep

    async def sleep(self, exchange: Exchange) -> None:
        """Put the models to sleep if they have no open requests, or wake them. Heartbeats show when that is done."""
        try:
            request = msgspec.json.decode(await exchange.read_body(MAX_CALL_BYTES), type=WorkerSleepRequest)
        except JSON_DECODE_ERRORS as e:
            raise InvalidRequest(f"invalid request to sleep or wake: {e}") from e
        if self._set_asleep is None:
            raise InvalidRequest("this worker cannot sleep", hint="start it with --can-sleep")
        self._set_asleep(request.on)
        await exchange.reply_json({})

    async def resume(self, exchange: Exchange) -> None:
        """Continue a reply that a different worker has started."""
        forwarded, body = await self._read_forwarded_request(exchange)
        tenant = tenant_from_router(exchange, self._has_api_keys)
        context = replace(
            forwarded.to_context(),
            has_event_ids=exchange.header(EVENT_IDS_HEADER) == "1",
            reports_chain=exchange.header(CHAIN_HEADER) == "1",
            span=exchange.span,
            tenant=tenant,
        )
        await self._handler.handle(exchange, forwarded.path, body, context)

    async def reclaim(self, exchange: Exchange) -> None:
        """Reply with the tokens of a stream up to an event, so that the stream can be continued after that event."""
        try:
            position = msgspec.json.decode(await exchange.read_body(MAX_CALL_BYTES), type=ReclaimRequest)
        except JSON_DECODE_ERRORS as e:
            raise InvalidRequest(f"invalid request to continue a stream: {e}") from e
        tenant = tenant_from_router(exchange, self._has_api_keys)
        await exchange.reply_json(self._handler.resumable_streams.reclaim(position, tenant))

    async def prefill(self, exchange: Exchange) -> None:
        """Compute a prompt for a different worker, and reply with a stream of JSON lines.

        The first line has the ticket with which that worker reads the prompt's KV blocks, the last line the result or
        an error.
        """
        forwarded, body = await self._read_forwarded_request(exchange)
        context = replace(
            forwarded.to_context(), span=exchange.span, tenant=tenant_from_router(exchange, self._has_api_keys)
        )
        call, model = await self._handler.parse(forwarded.path, body, context)
        await exchange.run_while_connected(_stream_lines(exchange, model.generator.prefill(call, context)))

    async def _read_forwarded_request(self, exchange: Exchange) -> tuple[ForwardedRequest, bytes]:
        """Return the forwarded request and the client's body inside it. Raises InvalidRequest or BodyTooLarge."""
        data = await exchange.read_body(self._max_body + MAX_FORWARD_OVERHEAD_BYTES)
        forwarded, body = await offload.run_inline_if_small(len(data), parse_forwarded_request, data)
        if forwarded.path not in PROTOCOLS:
            raise InvalidRequest(f"path is {forwarded.path[:200]!r}, which is not a generation endpoint", param="path")
        exchange.protocol_path = forwarded.path  # errors of the call have the format of the client's protocol
        if len(body) > self._max_body:
            raise BodyTooLarge(f"the body has {len(body)} bytes; the limit is {self._max_body}")
        return forwarded, body


def parse_forwarded_request(data: bytes) -> tuple[ForwardedRequest, bytes]:
    """Return the forwarded request and the client's body inside it. Raises InvalidRequest."""
    try:
        forwarded = msgspec.json.decode(data, type=ForwardedRequest)
    except JSON_DECODE_ERRORS as e:
        raise InvalidRequest(f"invalid forwarded request: {e}") from e
    check_pickle_cost(forwarded.handoff, description="the handoff")
    body, forwarded.body = bytes(forwarded.body), msgspec.Raw(b"")
    return forwarded, body


async def _stream_lines(exchange: Exchange, outputs: AsyncGenerator[Output, None]) -> None:
    """Send the engine's outputs as JSON lines. An error before the first line becomes an error reply."""
    async with aclosing(outputs):
        try:
            ended = False
            async for output in outputs:
                lines = []
                if output.ticket is not None and exchange.status is None:
                    lines.append(_encode_line("ticket", output.ticket))
                if output.finish is not None:
                    lines.append(_encode_line("done", _build_result_json(output)))
                    ended = True
                if lines:
                    await _send_lines(exchange, lines, last=ended)
        except Exception as e:
            if exchange.status is None:
                raise
            if not isinstance(e, EmberlineError):
                log.exception("Prefill failed: path=%s", exchange.path)
            reply = render_openai_error(e)
            exchange.log_fields["error"] = reply.body["error"]["code"]
            details = {"code": reply.body["error"]["code"], "message": reply.body["error"]["message"]}
            await _send_lines(exchange, [_encode_line("error", details | {"status": reply.status})], last=True)


def _build_result_json(output: Output) -> dict[str, Any]:
    if output.finish is not FinishReason.HANDOFF:
        raise EngineFailed("the engine did not compute the whole prompt", hint="send the request again")
    seconds = output.timing.prefill if output.timing else None
    return {"token": output.tokens[0], "cached": output.cached_tokens, "seconds": seconds or 0.0}


async def _send_lines(exchange: Exchange, lines: list[bytes], *, last: bool) -> None:
    if exchange.status is None:
        await exchange.start_reply(200, "application/x-ndjson", {"cache-control": "no-cache"})
    await exchange.send(b"".join(lines), last=last)


def _encode_line(name: str, value: Any) -> bytes:
    return dumps({name: value}) + b"\n"
