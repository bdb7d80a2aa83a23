"""Turn: one request and its reply, as ASGI says it. A head that tells the length of what follows waits for it, so that
a reply of one piece is one write; any other goes out at once."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any, Protocol

from emberline.net.host import Host

log = logging.getLogger("emberline.net")

BUFFER = 1 << 16  # bytes of a request's body that may wait here before its sender has to
LARGE = 1 << 16  # bytes that are not worth copying
BODILESS = (204, 304)
_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in HTTPStatus}


class CutOff(Exception):
    """Raised by an application whose reply broke after it began: nobody may take it for whole."""


class Line(Protocol):
    """The connection, as a turn sees it."""

    full: bool  # the client does not take what is written

    def write(self, data: bytes) -> None: ...

    def drained(self) -> asyncio.Future[None]: ...

    def pause(self) -> None:
        """Nothing more is read for now."""
        ...

    def resume(self) -> None: ...

    def done(self, turn: Turn) -> None:
        """The reply is written."""
        ...

    def refuse(self, status: int) -> None: ...

    def cut(self) -> None: ...


class Turn:
    __slots__ = ("_awaited", "_chunked", "_head", "_host", "_left", "_line", "_parts", "_size", "_told", "_waiter",
                 "_whole", "complete", "gone", "keep", "scope", "started", "task")  # fmt: skip

    def __init__(self, line: Line, host: Host, scope: dict[str, Any], keep: bool, awaited: bool) -> None:
        """`keep`: the connection, for the next. `awaited`: the client sends its body when it is told to."""
        self.task: asyncio.Task[None] | None = None
        self.scope = scope
        self.keep = keep
        self.gone = False  # there is nobody to answer
        self.started = self.complete = False  # the reply
        self._line = line
        self._host = host
        self._awaited = awaited
        self._parts: list[bytes] = []  # of the body
        self._size = 0
        self._whole = self._told = False  # it has come, and been passed on
        self._head = b""  # waits for what follows
        self._chunked = False
        self._left = 0  # bytes of the reply that its head promised
        self._waiter: asyncio.Future[None] | None = None

    async def run(self) -> None:
        try:
            await self._host.app(self.scope, self.receive, self.send)
            if not (self.complete or self.gone):
                raise RuntimeError("the application returned before its reply was whole")
        except BaseException as e:
            if not isinstance(e, CutOff | asyncio.CancelledError):
                log.exception("%s %s", self.scope["method"], self.scope["path"])
            if self.started or not isinstance(e, Exception):
                self._line.cut()
            elif not self.gone:
                self._line.refuse(500)
            if not isinstance(e, Exception):
                raise
        finally:
            assert self.task is not None
            self._host.work.discard(self.task)

    # -- the request ---------------------------------------------------------------------------------------------------

    def came(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > BUFFER:
            self._line.pause()
        self.wake()

    def ended(self) -> None:
        self._whole = True
        self.wake()

    @property
    def arrived(self) -> bool:
        return self._whole

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> dict[str, Any]:
        """Of the end of the reply is told as of a client that left."""
        if self._awaited and not self._whole and not self.gone:
            self._awaited = False
            self._line.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.gone or self.complete):
            if self._parts or (self._whole and not self._told):
                return self._taken()
            assert self._waiter is None or self._waiter.done(), "one reader at a time"
            self._line.resume()
            self._waiter = self._host.loop.create_future()
            await self._waiter
        return {"type": "http.disconnect"}

    def _taken(self) -> dict[str, Any]:
        parts, self._parts, self._size = self._parts, [], 0
        self._told = self._whole
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return {"type": "http.request", "body": body, "more_body": not self._whole}

    # -- the reply -----------------------------------------------------------------------------------------------------

    async def send(self, message: dict[str, Any]) -> None:
        if self._line.full and not self.gone:
            await self._line.drained()
        if self.gone:
            return
        assert not self.complete, "the reply is over"
        if message["type"] == "http.response.start":
            assert not self.started, "answered twice"
            self._begin(message["status"], message.get("headers", []))
        else:
            assert self.started, "a body without a head"
            self._go_on(message.get("body", b""), message.get("more_body", False))

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Names are in lower case."""
        lines = [_LINES.get(status) or b"HTTP/1.1 %d " % status, *map(b": ".join, headers)]
        said = dict(headers)
        sized = b"content-length" in said
        self._left = int(said.get(b"content-length", 0))
        self.keep = self.keep and said.get(b"connection") != b"close"
        bare = self.scope["method"] == "HEAD" or status in BODILESS
        if bare:
            self._left = 0
        elif not sized and self.scope["http_version"] == "1.1":
            self._chunked = True
            lines.append(b"transfer-encoding: chunked")
        if not (sized or bare or self._chunked):
            self.keep = False  # nothing else tells where it ends
        if not self.keep:
            lines.append(b"connection: close")
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        breaks = len(lines) + 1
        if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b"\0" in head:
            raise ValueError("a header of the reply has a line break in it")
        self.started, self._awaited = True, False
        if sized:
            self._head = head
        else:
            self._line.write(head)

    def _go_on(self, body: bytes, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            body = b""
        if self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                body += b"0\r\n\r\n"
        elif self._head or self._left:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise ValueError("the reply has another length than its head says")
        head, self._head = self._head, b""
        if head and len(body) > LARGE:
            self._line.write(head)
            self._line.write(body)
        elif head or body:
            self._line.write(head + body)
        if not more:
            self.complete = True
            self.wake()
            self._line.done(self)
