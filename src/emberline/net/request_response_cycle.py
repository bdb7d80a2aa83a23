"""RequestResponseCycle: one request and its reply, as the ASGI application sees them.

If the reply has a content-length, its status and headers are written together with the first part of the body, which
saves a write. The status and headers of a stream are written at once.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any, Protocol

from emberline.core.errors import RequestBodyTimeout
from emberline.net.body_budget import BodyReservation
from emberline.net.server_state import ServerState

log = logging.getLogger("emberline.net")

MAX_BUFFERED_BODY_BYTES = 1 << 16  # above it, reading from the client pauses
MAX_JOINED_BODY_BYTES = 1 << 16  # a larger body is written apart from its head: joining them would copy it
BODILESS_STATUSES = (204, 304)
# A body must arrive within this time, plus the time that its bytes take at the lowest accepted rate.
BODY_TIMEOUT_S = 30.0
MIN_BODY_BYTES_PER_S = 1 << 14
_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in HTTPStatus}


class ReplyInterrupted(Exception):
    """Raised by an application to close the connection in the middle of a reply that cannot be completed."""


class CycleConnection(Protocol):
    """The methods of a server connection that its request-response cycle calls."""

    is_write_paused: bool  # the write buffer is full: the client reads too slowly

    def write(self, data: bytes) -> None: ...

    def wait_for_drain(self) -> asyncio.Future[None]: ...

    def pause_reading(self) -> None:
        """Stop reading from the client's socket until resume_reading() is called."""
        ...

    def resume_reading(self) -> None: ...

    def set_body_deadline(self, time: float) -> None:
        """Call the cycle's `time_out_body` at this time of the event loop, unless its body is complete by then."""
        ...

    def finish_cycle(self, cycle: RequestResponseCycle) -> None:
        """Start the connection's next request. The cycle calls this when its reply is written."""
        ...

    def send_error(self, status: int) -> None: ...

    def close_mid_reply(self) -> None: ...


class RequestResponseCycle:
    __slots__ = (
        "_body_bytes",
        "_body_is_late",
        "_body_started_at",
        "_bytes_left",
        "_connection",
        "_declared_body_bytes",
        "_end_received",
        "_expects_continue",
        "_has_whole_body",
        "_head",
        "_is_chunked",
        "_parts",
        "_reservation",
        "_size",
        "_state",
        "_waiter",
        "has_started",
        "is_complete",
        "is_disconnected",
        "keep_alive",
        "scope",
        "task",
    )

    def __init__(
        self,
        connection: CycleConnection,
        state: ServerState,
        scope: dict[str, Any],
        keep_alive: bool,
        expects_continue: bool,
        declared_body_bytes: int,
        reservation: BodyReservation,
    ) -> None:
        """`keep_alive`: the connection stays open after the reply.

        `expects_continue`: the client sends its body only after it has received status 100. `declared_body_bytes`: the
        content-length, 0 if there is none. `reservation`: of memory for the body, until the reply begins.
        """
        self.task: asyncio.Task[None] | None = None
        self.scope = scope
        self.keep_alive = keep_alive
        self.is_disconnected = False  # the client has disconnected
        self.has_started = self.is_complete = False  # state of the reply
        self._connection = connection
        self._state = state
        self._expects_continue = expects_continue
        self._parts: list[bytes] = []  # of the request body
        self._size = 0
        self._declared_body_bytes = declared_body_bytes
        self._reservation = reservation
        self._body_bytes = 0  # bytes of the request body that the application has received
        self._body_started_at = 0.0  # when the application began to wait for the body; 0: it has not yet
        self._body_is_late = False
        self._has_whole_body = False  # all of the request body has arrived
        self._end_received = False  # the application has received the end of the request body
        self._head = b""  # head of the reply, held back until the body
        self._is_chunked = False
        self._bytes_left = 0  # bytes of the body that are still to come, by the content-length
        self._waiter: asyncio.Future[None] | None = None

    async def run(self) -> None:
        try:
            await self._state.app(self.scope, self.receive, self.send)
            if not (self.is_complete or self.is_disconnected):
                raise RuntimeError("the ASGI application returned before the end of its reply")
        except BaseException as e:
            if not isinstance(e, ReplyInterrupted | asyncio.CancelledError):
                log.exception("Request failed: method=%s path=%s", self.scope["method"], self.scope["path"])
            if self.has_started or not isinstance(e, Exception):
                self._connection.close_mid_reply()
            elif not self.is_disconnected:
                self._connection.send_error(500)
            if not isinstance(e, Exception):
                raise
        finally:
            assert self.task is not None
            self._reservation.release()
            self._state.tasks.discard(self.task)

    # -- the request ---------------------------------------------------------------------------------------------------

    def add_request_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > MAX_BUFFERED_BODY_BYTES:
            self._connection.pause_reading()
        self.wake_receiver()

    def end_request_body(self) -> None:
        self._has_whole_body = True
        self.wake_receiver()

    @property
    def has_whole_body(self) -> bool:
        return self._has_whole_body

    def wake_receiver(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> dict[str, Any]:
        """Return the next ASGI message: a part of the request's body, or http.disconnect.

        The message is http.disconnect once the client has disconnected or the reply has ended. Raises BodyMemoryFull if
        there is no memory for the body, and RequestBodyTimeout if it arrives too slowly.
        """
        if self._declared_body_bytes and not self.has_started:
            self._reservation.reserve(self._declared_body_bytes)
        if self._expects_continue and not self._has_whole_body and not self.is_disconnected:
            self._expects_continue = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.is_disconnected or self.is_complete):
            if self._parts or (self._has_whole_body and not self._end_received):
                return self._take_body()
            assert self._waiter is None or self._waiter.done(), "receive() is already waiting"
            self._connection.resume_reading()
            self._waiter = self._state.loop.create_future()
            if not self._has_whole_body:
                self._set_body_deadline()
            await self._waiter
            if self._body_is_late:
                raise RequestBodyTimeout(
                    f"the request's body arrived too slowly: {self._body_bytes} bytes in "
                    f"{self._state.loop.time() - self._body_started_at:.0f} s"
                )
        return {"type": "http.disconnect"}

    def _set_body_deadline(self) -> None:
        self._body_started_at = self._body_started_at or self._state.loop.time()
        seconds = BODY_TIMEOUT_S + self._body_bytes / MIN_BODY_BYTES_PER_S
        self._connection.set_body_deadline(self._body_started_at + seconds)

    def time_out_body(self) -> None:
        """Let the application's `receive` raise RequestBodyTimeout. The connection is closed after the reply."""
        if not (self._has_whole_body or self.is_complete) and self._waiter is not None and not self._waiter.done():
            self._body_is_late, self.keep_alive = True, False
            self.wake_receiver()

    def _take_body(self) -> dict[str, Any]:
        if not self.has_started:
            self._reservation.add(self._size)
        self._body_bytes += self._size
        parts, self._parts, self._size = self._parts, [], 0
        self._end_received = self._has_whole_body
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return {"type": "http.request", "body": body, "more_body": not self._has_whole_body}

    # -- the reply -----------------------------------------------------------------------------------------------------

    async def send(self, message: dict[str, Any]) -> None:
        if self._connection.is_write_paused and not self.is_disconnected:
            await self._connection.wait_for_drain()
        if self.is_disconnected:
            return
        assert not self.is_complete, "the reply has already ended"
        if message["type"] == "http.response.start":
            assert not self.has_started, "the reply has already started"
            self._write_head(message["status"], message.get("headers", []))
        else:
            assert self.has_started, "http.response.body before http.response.start"
            self._write_body(message.get("body", b""), message.get("more_body", False))

    def _write_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Write the status and headers of the reply.

        If the reply has a content-length, keep them until the body is written. The names of the headers must be in
        lower case.
        """
        lines = [_LINES.get(status) or b"HTTP/1.1 %d " % status, *map(b": ".join, headers)]
        values = dict(headers)
        has_length = b"content-length" in values
        self._bytes_left = int(values.get(b"content-length", 0))
        self.keep_alive = self.keep_alive and values.get(b"connection") != b"close"
        is_bodiless = self.scope["method"] == "HEAD" or status in BODILESS_STATUSES
        if is_bodiless:
            self._bytes_left = 0
        elif not has_length and self.scope["http_version"] == "1.1":
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked")
        if not (has_length or is_bodiless or self._is_chunked):
            self.keep_alive = False  # only the end of the connection marks the end of the body
        if not self.keep_alive:
            lines.append(b"connection: close")
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        num_lines = len(lines) + 1
        if head.count(b"\n") != num_lines or head.count(b"\r") != num_lines or b"\0" in head:
            raise ValueError("a header of the reply contains a line break")
        self.has_started, self._expects_continue = True, False
        self._reservation.release()
        if has_length:
            self._head = head
        else:
            self._connection.write(head)

    def _write_body(self, body: bytes, has_more: bool) -> None:
        if self.scope["method"] == "HEAD":
            body = b""
        if self._is_chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not has_more:
                body += b"0\r\n\r\n"
        elif self._head or self._bytes_left:
            self._bytes_left -= len(body)
            if self._bytes_left < 0 or (self._bytes_left and not has_more):
                raise ValueError("the reply's body does not have the length that the content-length header states")
        head, self._head = self._head, b""
        if head and len(body) > MAX_JOINED_BODY_BYTES:
            self._connection.write(head)
            self._connection.write(body)
        elif head or body:
            self._connection.write(head + body)
        if not has_more:
            self.is_complete = True
            self.wake_receiver()
            self._connection.finish_cycle(self)
