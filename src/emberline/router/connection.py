"""Connection: HTTP/1.1 to one worker, one request at a time. Reply: what comes back, as it comes. Little else, because
the router passes on every event of every stream: what is done here is done for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from emberline.router.call import Call

BUFFER = 1 << 16  # bytes of a reply that may wait here: who reads slowly is sent slowly, through us, to the worker


class Unreached(Exception):
    """It got nothing of the request."""


class Broken(Exception):
    """It got the request, and did not answer to the end."""


class Reply:
    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self._connection = connection
        self._parts: list[bytes] = []
        self._size = 0  # of these
        self._whole = False
        self._error = ""
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """What has come, b"" at the end."""
        while not self._parts:
            if self._error:
                raise Broken(self._error)
            if self._whole:
                return b""
            await self._news()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._size > BUFFER:
            self._connection.resume()
        self._size = 0
        return data

    async def whole(self) -> bytes:
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def abort(self, reason: str) -> None:
        """Whoever reads it learns at once that it broke, unless all of it has come."""
        if not self._whole:
            self._parts.clear()
            self._size = 0
            self.broke(reason)

    def close(self) -> None:
        """Before the end this closes the connection, by which the worker knows that nobody listens."""
        self._connection.done_with(self)

    async def head(self) -> None:
        while not self.status:
            if self._error:
                raise Broken(self._error)
            await self._news()

    # -- told by the connection ----------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        return self._whole

    @property
    def ends_with_connection(self) -> bool:
        """Nothing else tells where it ends."""
        return bool(self.status) and "content-length" not in self.headers and "transfer-encoding" not in self.headers

    def came(self, data: bytes) -> None:
        self._parts.append(data)
        before, self._size = self._size, self._size + len(data)
        if before <= BUFFER < self._size:
            self._connection.pause()

    def ended(self) -> None:
        self._whole = True
        self.tell()

    def broke(self, reason: str) -> None:
        self._error = self._error or reason
        self.tell()

    def tell(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Connection(asyncio.Protocol):
    def __init__(self, host: str, idle: Callable[[Connection], None]) -> None:
        self._host = host
        self._idle = idle  # told when it can be used again
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply: Reply | None = None
        self._status, self._headers = 0, dict[str, str]()
        self.reusable = True
        self.idle_since = 0.0

    def send(self, call: Call) -> Reply:
        assert self._transport is not None and self._reply is None
        self._parser = httptools.HttpResponseParser(self)
        self._reply = Reply(self)
        lines = [f"{call.method} {call.target} HTTP/1.1", f"host: {self._host}"]
        lines += [f"{name}: {value}" for name, value in call.headers.items()]
        if call.body or call.method != "GET":
            lines.append(f"content-length: {len(call.body)}")
        head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
        if len(call.body) < BUFFER:
            self._transport.write(head + call.body)
        else:
            self._transport.writelines((head, call.body))
        return self._reply

    def done_with(self, reply: Reply) -> None:
        if self._reply is not reply:
            return
        self._reply = None
        if not (reply.is_whole and self.reusable):
            self.close()
        else:
            self.resume()
            self._idle(self)

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- told by the loop ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by descent

    def data_received(self, data: bytes) -> None:
        if self._reply is None:  # it says what nobody asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as e:
            self.reusable = False
            self._reply.broke(f"{type(e).__name__}: {e}")
            return
        self._reply.tell()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._reply is not None and not self._reply.is_whole:
            if error is None and self._reply.ends_with_connection:
                self._reply.ended()
            else:
                self._reply.broke(f"the connection was lost: {error}")

    # -- told by the parser --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._reply is None or self._reply.is_whole:
            raise ValueError("a reply to nothing")
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._reply is not None and self._status >= 200:  # what is below announces another
            self._reply.status, self._reply.headers = self._status, self._headers

    def on_body(self, body: bytes) -> None:
        if self._reply is not None:
            self._reply.came(body)

    def on_message_complete(self) -> None:
        if self._reply is not None and self._status >= 200:
            self.reusable = self.reusable and bool(self._parser.should_keep_alive())
            self._reply.ended()
