"""Exchange: one HTTP request and its reply, on the ASGI interface."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from emberline.core.errors import BodyMemoryFull, BodyTooLarge, UnsupportedMediaType
from emberline.trace.span import Span
from emberline.wire.sse import dumps

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
T = TypeVar("T")


EVENT_STREAM_TYPE = "text/event-stream; charset=utf-8"


class ClientDisconnected(Exception):
    """The client closed the connection before the reply was complete."""


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.protocol_path = self.path  # path of the API protocol in which errors are written
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        self.client: str = (scope.get("client") or ("",))[0]
        self.scheme: str = scope.get("scheme", "http")
        # Names in the verified client certificate; None: the connection has none.
        self.client_cert_names: tuple[str, ...] | None = scope.get("client_cert_names")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.status: int | None = None  # set when the reply begins
        self.logged_status: int | None = None  # status for the log if the reply failed after its own status was sent
        self.client_disconnected = False
        self.log_fields: dict[str, object] = {}  # further fields of the request log
        self.span: Span | None = None  # None: not traced
        self._receive = receive
        self._send = send

    def header(self, name: str) -> str:
        return self.headers.get(name.encode(), b"").decode("latin-1")

    async def read_body(self, max_bytes: int) -> bytes:
        """Return the request's whole body.

        Call it only after the request's key was checked. Raises BodyTooLarge, UnsupportedMediaType if the body is
        compressed, RequestBodyTimeout, BodyMemoryFull or ClientDisconnected."""
        if (encoding := self.header("content-encoding")).lower() not in ("", "identity"):
            raise UnsupportedMediaType(
                f"the content-encoding is {encoding[:100]!r}; compressed bodies are not supported",
                hint="send the body uncompressed, without a content-encoding header",
            )
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > max_bytes:
            raise BodyTooLarge(f"the body has {int(declared)} bytes; at most {max_bytes} are allowed")
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > max_bytes:
                raise BodyTooLarge(f"the body has more than the allowed {max_bytes} bytes")
            if not message.get("more_body", False):
                try:
                    return b"".join(parts)
                except MemoryError:  # the memory of the process is limited
                    raise BodyMemoryFull("the memory of the server is used up") from None

    async def reply(
        self, status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        await self.start_reply(status, content_type, headers or {}, len(body))
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def reply_json(self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        await self.reply(status, dumps(body), "application/json", headers)

    async def start_event_stream(
        self, headers: Mapping[str, str] | None = None, media_type: str = EVENT_STREAM_TYPE
    ) -> None:
        fields = {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})}
        await self.start_reply(200, media_type, fields)

    def send(self, data: bytes = b"", *, last: bool = False) -> Awaitable[None]:
        """Send the next part of the reply's body. `last` marks the final part."""
        return self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def run_while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. If the client disconnects, cancel `work` and raise ClientDisconnected.

        The request's body must have been read before."""
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(self._wait_for_disconnect())
        try:
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnected
        finally:
            for each in (task, watcher):
                if not each.done():
                    each.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await each
        return task.result()

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_disconnected = True

    async def start_reply(
        self, status: int, content_type: str, headers: Mapping[str, str], body_length: int | None = None
    ) -> None:
        """Send the reply's status and headers. `body_length`: bytes of its body, if known."""
        assert self.status is None, "the exchange was answered twice"
        self.status = status
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        pairs.append((b"content-type", content_type.encode("latin-1")))
        if body_length is not None:
            pairs.append((b"content-length", b"%d" % body_length))
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
