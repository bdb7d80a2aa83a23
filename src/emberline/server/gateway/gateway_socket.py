"""GatewaySocket: the gateway over a WebSocket, as Cloudflare's clients speak: a provider's own, where the path names
one, or else ours. Several requests may be open on that; what belongs to which is told by its eventId.

    {"type": "universal.create", "request": {"eventId", "provider", "endpoint", "headers", "query", "config"}}
    {"type": "universal.created", "metadata": {...}, "response"}      the response only of what comes in one piece
    {"type": "universal.stream", "metadata": {"eventId"}, "response"} an event each
    {"type": "universal.done", "metadata": {...}}                     or, in place of it:
    {"type": "universal.error", "metadata": {...}, "error": {"code", "message"}, "response"}
"""

from __future__ import annotations

import asyncio
import base64
import logging
from typing import Any

import msgspec

from emberline.api.errors import openai_error
from emberline.api.sse import dumps
from emberline.core.errors import EmberlineError, InvalidRequest, NotFound
from emberline.core.offload import offload
from emberline.gateway.call import Reply
from emberline.gateway.dialects.problems import read_error
from emberline.gateway.gateway import Gateway, Request
from emberline.gateway.paths import Target, target_of
from emberline.gateway.streams.splitter import Splitter, payload_of
from emberline.net.notjson import NOT_JSON
from emberline.server.exchange import Receive, Scope, Send
from emberline.server.gateway.realtime_socket import RealtimeSocket

log = logging.getLogger("emberline.gateway")

MOST = 100  # requests open at any time
LAST_WORDS = 2.0  # seconds beyond a call's deadline for its client to take what is told then
EVENTS = "text/event-stream"
SPOKEN = {  # what a browser can only say as subprotocols -> the header, and what its value begins with
    "cf-aig-authorization": ("cf-aig-authorization", "Bearer "),
    "openai-insecure-api-key": ("authorization", "Bearer "),
    "xi-api-key": ("xi-api-key", ""),
    "fal-api-key": ("fal-api-key", ""),
}
Json = dict[str, Any]


class _Create(msgspec.Struct, tag_field="type", tag="universal.create", forbid_unknown_fields=True):
    request: dict[str, msgspec.Raw]


_MESSAGE = msgspec.json.Decoder(_Create)


class GatewaySocket:
    """One socket."""

    def __init__(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        self._gateway = gateway
        self._scope = scope
        self._receive, self._send = receive, send
        self._path: str = scope["raw_path"].decode("latin-1")
        self._open: dict[str, asyncio.Task[None]] = {}
        self._unnamed = 0

    async def run(self) -> None:
        opening = await self._receive()
        assert opening["type"] == "websocket.connect"
        try:
            self._headers, plain, chosen = said(self._scope)
            target = self._target()
            if target.kind == "native":
                await RealtimeSocket(self._gateway, target, self._receive, self._send).run(
                    self._path, self._scope["query_string"].decode("latin-1"), self._headers, plain, chosen
                )
                return
            await self._gateway.entered(target, self._headers)
        except EmberlineError as e:
            await self._refuse(e)
            return
        await self._send({"type": "websocket.accept", "subprotocol": chosen})
        try:
            while (message := await self._receive())["type"] == "websocket.receive":
                await self._take(message.get("text") or message.get("bytes") or "")
        finally:
            for task in self._open.values():
                task.cancel()
            await asyncio.gather(*self._open.values(), return_exceptions=True)

    def _target(self) -> Target:
        match self._path.strip("/").split("/"):
            case ["v1", account, gateway, provider]:
                return Target("native", account, gateway, provider)
        target = target_of(self._path)
        if target.kind not in ("universal", "native"):
            raise NotFound(
                f"there is no WebSocket at {self._path[:200]!r}",
                hint="it is at /v1/ACCOUNT/GATEWAY, a provider's at /v1/ACCOUNT/GATEWAY/PROVIDER",
            )
        return target

    async def _refuse(self, error: EmberlineError) -> None:
        shaped = openai_error(error)
        headers = [(b"content-type", b"application/json")]
        await self._send({"type": "websocket.http.response.start", "status": shaped.status, "headers": headers})
        await self._send({"type": "websocket.http.response.body", "body": dumps(shaped.body)})

    async def _take(self, message: str | bytes) -> None:
        """One message: a request, or what is none."""
        id = ""
        try:
            id, body = await offload.run_by_size(len(message), read_message, message)
            if len(self._open) >= MOST:
                raise InvalidRequest(f"{MOST} requests are open on this socket", hint="wait until one is done")
            if id and id in self._open:
                raise InvalidRequest(f"eventId {id[:80]!r} is that of a request still open", param="eventId")
        except EmberlineError as e:
            await self._say("universal.error", {"eventId": id}, error=_told(e))
            return
        self._unnamed += not id
        name = id or f"\0{self._unnamed}"  # no client's
        self._open[name] = task = asyncio.create_task(self._answer(body, id))
        task.add_done_callback(lambda _: self._open.pop(name, None))

    async def _answer(self, body: bytes, id: str) -> None:
        headers = {**self._headers, **({"cf-aig-event-id": id} if id else {})}
        reply = await self._gateway.answer(Request("POST", self._path, "", headers, body))
        about = _metadata(reply, id)
        try:
            async with asyncio.timeout(max(reply.patience, 0.0) + LAST_WORDS):
                await self._give(reply, about)
        except TimeoutError:
            log.warning("%s: the client did not take its reply", self._path)
        except asyncio.CancelledError:
            reply.ended = reply.ended if not isinstance(reply.body, bytes) else "left"
            raise
        except Exception as e:
            if not isinstance(e, EmberlineError):
                log.exception("%s", self._path)
            await self._say("universal.error", about, error=_told(e))
        finally:
            await reply.close()

    async def _give(self, reply: Reply, about: Json) -> None:
        if isinstance(reply.body, bytes):
            if reply.status >= 400:
                error = {"code": reply.error, "message": read_error(reply.body).message}
                await self._show("universal.error", about, reply.body, error=error)
                return
            await self._show("universal.created", about, reply.body)
        else:
            await self._say("universal.created", about)
            splitter = Splitter() if about["contentType"].startswith(EVENTS) else None
            async for chunk in reply.body:
                for part in [chunk] if splitter is None else _payloads(splitter.push(chunk)):
                    await self._show("universal.stream", {"eventId": about["eventId"]}, part)
            if reply.ended == "cut":
                error = {"code": reply.error, "message": "the reply broke off"}
                await self._say("universal.error", about, error=error)
                return
        await self._say("universal.done", about)

    async def _show(self, type: str, metadata: Json, body: bytes, **more: Any) -> None:
        """A message with what a provider replied; a large one is written in another process."""
        text = await offload.run_by_size(len(body), shown_message, type, metadata, body, more)
        await self._send({"type": "websocket.send", "text": text})

    async def _say(self, type: str, metadata: Json, **more: Any) -> None:
        text = msgspec.json.encode({"type": type, "metadata": metadata, **more}).decode()
        await self._send({"type": "websocket.send", "text": text})


def said(scope: Scope) -> tuple[dict[str, str], list[str], str | None]:
    """The headers, with what was said as a subprotocol; the others of those, which say no key; and which is taken, for
    a browser wants one to be."""
    headers = {
        name.decode("latin-1").lower(): value.decode("latin-1")
        for name, value in scope["headers"]
        if not name.lower().startswith((b"sec-", b"content-"))
    }
    offered: list[str] = scope.get("subprotocols", [])
    for name, dot, value in (each.partition(".") for each in offered):
        if dot and name in SPOKEN:
            header, before = SPOKEN[name]
            headers[header] = before + value
    plain = [each for each in offered if each.partition(".")[0] not in SPOKEN]
    return headers, plain, next(iter([*plain, *offered]), None)


def read_message(message: str | bytes) -> tuple[str, bytes]:
    """The eventId of a request, and the request as a list of one step."""
    try:
        request = _MESSAGE.decode(message).request
    except NOT_JSON as e:
        raise InvalidRequest(f"the message is not a universal.create: {e}") from e
    id = _event_id(request)
    return id, msgspec.json.encode([request])


def shown_message(type: str, metadata: Json, body: bytes, more: Json) -> str:
    return msgspec.json.encode({"type": type, "metadata": metadata, **more, "response": _shown(body)}).decode()


def _event_id(request: dict[str, msgspec.Raw]) -> str:
    """Taken out of the request: what stays is a step."""
    if (given := request.pop("eventId", None)) is None:
        return ""
    found = msgspec.json.decode(given)
    if not isinstance(found, str) or not 0 < len(found) <= 512 or not (found.isascii() and found.isprintable()):
        raise InvalidRequest("eventId must be 1 to 512 printable characters of ASCII", param="eventId")
    return found


def _metadata(reply: Reply, id: str) -> Json:
    head = reply.headers
    return {
        "eventId": id or head.get("cf-aig-event-id", ""),
        "logId": head.get("cf-aig-log-id", ""),
        "cacheStatus": head.get("cf-aig-cache-status", ""),
        "step": head.get("cf-aig-step", ""),
        "contentType": head.get("content-type", ""),
        "status": reply.status,
    }


def _payloads(events: list[bytes]) -> list[bytes]:
    found = (payload_of(event)[1] for event in events)
    return [payload for payload in found if payload and payload != b"[DONE]"]


def _shown(body: bytes) -> Any:
    """JSON as it is; else text; else base64 of what is neither."""
    try:
        return msgspec.json.decode(body)
    except NOT_JSON:
        pass
    try:
        return body.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(body).decode()}


def _told(error: Exception) -> Json:
    return {name: openai_error(error).body["error"][name] for name in ("code", "message")}
