"""GatewaySocket: the gateway over a WebSocket, with Cloudflare's protocol.

A path that names a provider opens that provider's own realtime protocol (see realtime_socket.py). On all other paths a
WebSocket carries several requests at a time, distinguished by their eventId:

    {"type": "universal.create", "request": {"eventId", "provider", "endpoint", "headers", "query", "config"}}
    {"type": "universal.created", "metadata": {...}, "response"}      with the response, unless it is a stream
    {"type": "universal.stream", "metadata": {"eventId"}, "response"} one for each event of a stream
    {"type": "universal.done", "metadata": {...}}                     at the end, or in place of it:
    {"type": "universal.error", "metadata": {...}, "error": {"code", "message"}, "response"}
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from emberline.core.errors import EmberlineError, InvalidRequest, NotFound
from emberline.core.offload import offload
from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.core.paths import RequestTarget, parse_path
from emberline.gateway.core.request import GatewayReply
from emberline.gateway.dialects.errors import parse_error
from emberline.gateway.gateway import Gateway, InboundRequest
from emberline.gateway.http.realtime_socket import RealtimeSocket
from emberline.net.body_budget import BodyReservation, body_budget
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.server.exchange import Receive, Scope, Send
from emberline.wire.errors import render_openai_error
from emberline.wire.event_splitter import EventSplitter, parse_event
from emberline.wire.sse import dumps

log = logging.getLogger("emberline.gateway")

MAX_OPEN_REQUESTS = 100  # per socket
ERROR_SEND_TIMEOUT_S = 2.0  # after a request's deadline, for the client to read the error
EVENT_STREAM_TYPE = "text/event-stream"
SUBPROTOCOL_HEADERS = {  # subprotocol that a browser sends in place of a header -> header, and its value's prefix
    "cf-aig-authorization": ("cf-aig-authorization", "Bearer "),
    "openai-insecure-api-key": ("authorization", "Bearer "),
    "xi-api-key": ("xi-api-key", ""),
    "fal-api-key": ("fal-api-key", ""),
}
Json = dict[str, Any]


class _CreateMessage(msgspec.Struct, tag_field="type", tag="universal.create", forbid_unknown_fields=True):
    request: dict[str, msgspec.Raw]


_MESSAGE = msgspec.json.Decoder(_CreateMessage)


class GatewaySocket:
    def __init__(
        self,
        gateway: Gateway,
        scope: Scope,
        receive: Receive,
        send: Send,
        record_rejection: Callable[[EmberlineError], Awaitable[None]],
    ) -> None:
        """Create a socket. `record_rejection` is called with the error of a refused handshake."""
        self._gateway = gateway
        self._record_rejection = record_rejection
        self._scope = scope
        self._receive, self._send = receive, send
        self._path: str = scope["raw_path"].decode("latin-1")
        self._open: dict[str, asyncio.Task[None]] = {}  # by eventId
        self._without_id = 0  # requests so far

    async def run(self) -> None:
        """Serve the socket until the client closes it."""
        connect = await self._receive()
        assert connect["type"] == "websocket.connect"
        try:
            self._headers, subprotocols, accepted = read_handshake(self._scope)
            target = self._parse_target()
            if target.kind == "native":
                await RealtimeSocket(self._gateway, target, self._receive, self._send).run(
                    self._path, self._scope["query_string"].decode("latin-1"), self._headers, subprotocols, accepted
                )
                return
            await self._gateway.authenticate(target, self._headers)
        except EmberlineError as e:
            await self._refuse_handshake(e)
            return
        await self._send({"type": "websocket.accept", "subprotocol": accepted})
        try:
            while (message := await self._receive())["type"] == "websocket.receive":
                await self._start_request(message.get("text") or message.get("bytes") or "")
        finally:
            for task in self._open.values():
                task.cancel()
            await asyncio.gather(*self._open.values(), return_exceptions=True)

    def _parse_target(self) -> RequestTarget:
        match self._path.strip("/").split("/"):
            case ["v1", account, gateway, provider]:
                return RequestTarget("native", account, gateway, provider)
        target = parse_path(self._path)
        if target.kind not in ("universal", "native"):
            raise NotFound(
                f"the path {self._path[:200]!r} does not accept WebSockets",
                hint="use /v1/ACCOUNT/GATEWAY, or /v1/ACCOUNT/GATEWAY/PROVIDER for a provider's realtime protocol",
            )
        return target

    async def _refuse_handshake(self, error: EmberlineError) -> None:
        await self._record_rejection(error)
        shaped = render_openai_error(error)
        headers = [(b"content-type", b"application/json")]
        await self._send({"type": "websocket.http.response.start", "status": shaped.status, "headers": headers})
        await self._send({"type": "websocket.http.response.body", "body": dumps(shaped.body)})

    async def _start_request(self, message: str | bytes) -> None:
        """Start the request in a message, or send an error if the message is invalid."""
        id = ""
        client = self._scope.get("client") or ("",)
        reservation = BodyReservation(body_budget, client[0])
        try:
            reservation.reserve(len(message))
            id, body = await offload.run_inline_if_small(len(message), read_message, message)
            if len(self._open) >= MAX_OPEN_REQUESTS:
                raise InvalidRequest(
                    f"the WebSocket has {MAX_OPEN_REQUESTS} open requests, the highest allowed number",
                    hint="wait for a universal.done message",
                )
            if id and id in self._open:
                raise InvalidRequest(
                    f"eventId {id[:80]!r} is used by an open request",
                    param="eventId",
                    hint="choose a different eventId",
                )
        except EmberlineError as e:
            reservation.release()
            await self._send_message("universal.error", {"eventId": id}, error=_error_fields(e))
            return
        self._without_id += not id
        name = id or f"\0{self._without_id}"  # eventIds are printable, so no client uses such a name
        self._open[name] = task = asyncio.create_task(self._answer_request(body, id))
        task.add_done_callback(lambda _: self._open.pop(name, None))
        task.add_done_callback(lambda _: reservation.release())

    async def _answer_request(self, body: bytes, event_id: str) -> None:
        headers = {**self._headers, **({"cf-aig-event-id": event_id} if event_id else {})}
        reply = await self._gateway.answer(InboundRequest("POST", self._path, "", headers, body))
        metadata = _reply_metadata(reply, event_id)
        try:
            async with asyncio.timeout(max(reply.send_timeout_s, 0.0) + ERROR_SEND_TIMEOUT_S):
                await self._send_reply(reply, metadata)
        except TimeoutError:
            log.warning("WebSocket reply cut off because the client did not read in time: path=%s", self._path)
        except asyncio.CancelledError:
            reply.ended = reply.ended if not isinstance(reply.body, bytes) else "left"
            raise
        except Exception as e:
            if not isinstance(e, EmberlineError):
                log.exception("WebSocket request failed with an internal error: path=%s", self._path)
            await self._send_message("universal.error", metadata, error=_error_fields(e))
        finally:
            await reply.close()

    async def _send_reply(self, reply: GatewayReply, metadata: Json) -> None:
        if isinstance(reply.body, bytes):
            if reply.status >= 400:
                error = {"code": reply.error, "message": parse_error(reply.body).message}
                await self._send_response("universal.error", metadata, reply.body, error=error)
                return
            await self._send_response("universal.created", metadata, reply.body)
        else:
            await self._send_message("universal.created", metadata)
            splitter = EventSplitter(UpstreamBroken) if metadata["contentType"].startswith(EVENT_STREAM_TYPE) else None
            async for chunk in reply.body:
                for part in [chunk] if splitter is None else _event_payloads(splitter.push(chunk)):
                    await self._send_response("universal.stream", {"eventId": metadata["eventId"]}, part)
            if reply.ended == "cut":
                error = {"code": reply.error, "message": "the stream broke off before its end"}
                await self._send_message("universal.error", metadata, error=error)
                return
        await self._send_message("universal.done", metadata)

    async def _send_response(self, message_type: str, metadata: Json, body: bytes, **fields: Any) -> None:
        """Send a message that contains a provider's response. A large response is encoded in a child process."""
        text = await offload.run_inline_if_small(len(body), encode_message, message_type, metadata, body, fields)
        await self._send({"type": "websocket.send", "text": text})

    async def _send_message(self, message_type: str, metadata: Json, **fields: Any) -> None:
        text = msgspec.json.encode({"type": message_type, "metadata": metadata, **fields}).decode()
        await self._send({"type": "websocket.send", "text": text})


class Handshake(NamedTuple):
    headers: dict[str, str]  # with keys that the client sent as subprotocols
    subprotocols: list[str]  # without those keys
    accepted_subprotocol: str | None  # browsers require that one of the offered is accepted


def read_handshake(scope: Scope) -> Handshake:
    """Return the headers and subprotocols of a WebSocket handshake.

    A key that the client sent as a subprotocol is moved to the headers.
    """
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1")
        for name, value in scope["headers"]
        if not name.lower().startswith((b"sec-", b"content-"))
    }
    offered: list[str] = scope.get("subprotocols", [])
    for name, dot, value in (each.partition(".") for each in offered):
        if dot and name in SUBPROTOCOL_HEADERS:
            header, prefix = SUBPROTOCOL_HEADERS[name]
            headers[header] = prefix + value
    plain = [each for each in offered if each.partition(".")[0] not in SUBPROTOCOL_HEADERS]
    return Handshake(headers, plain, next(iter([*plain, *offered]), None))


def read_message(message: str | bytes) -> tuple[str, bytes]:
    """Return the eventId of a message, and its request encoded as a JSON list with one step."""
    try:
        request = _MESSAGE.decode(message).request
    except JSON_DECODE_ERRORS as e:
        raise InvalidRequest(
            f"the message is not a valid universal.create message: {e}",
            hint='send {"type": "universal.create", "request": {...}}',
        ) from e
    id = _pop_event_id(request)
    return id, msgspec.json.encode([request])


def encode_message(message_type: str, metadata: Json, body: bytes, extra_fields: Json) -> str:
    return msgspec.json.encode(
        {"type": message_type, "metadata": metadata, **extra_fields, "response": _decode_json_or_text(body)}
    ).decode()


def _pop_event_id(request: dict[str, msgspec.Raw]) -> str:
    """Remove the eventId from the request and return it.

    The remaining fields form a step of the universal endpoint.
    """
    if (encoded := request.pop("eventId", None)) is None:
        return ""
    id = msgspec.json.decode(encoded)
    if not isinstance(id, str) or not 0 < len(id) <= 512 or not (id.isascii() and id.isprintable()):
        raise InvalidRequest(f"eventId must have 1 to 512 printable ASCII characters, not {id!r:.80}", param="eventId")
    return id


def _reply_metadata(reply: GatewayReply, event_id: str) -> Json:
    head = reply.headers
    return {
        "eventId": event_id or head.get("cf-aig-event-id", ""),
        "logId": head.get("cf-aig-log-id", ""),
        "cacheStatus": head.get("cf-aig-cache-status", ""),
        "step": head.get("cf-aig-step", ""),
        "contentType": head.get("content-type", ""),
        "status": reply.status,
    }


def _event_payloads(events: list[bytes]) -> list[bytes]:
    found = (parse_event(event)[1] for event in events)
    return [payload for payload in found if payload and payload != b"[DONE]"]


def _decode_json_or_text(body: bytes) -> Any:
    """Return the body as decoded JSON, else as text, else (if it is not UTF-8) as base64."""
    try:
        return msgspec.json.decode(body)
    except JSON_DECODE_ERRORS:
        pass
    try:
        return body.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(body).decode()}


def _error_fields(error: Exception) -> Json:
    return {name: render_openai_error(error).body["error"][name] for name in ("code", "message")}
