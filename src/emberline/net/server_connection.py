"""HTTPServerConnection: an HTTP/1.1 connection of a client to the server.

The requests of a connection are answered one after the other. While requests wait in the queue, the server does not
read from the connection. It closes a connection whose client does not send a request, or does not complete the
request's headers, in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import sys
import termios
from collections import deque
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import httptools

from emberline.core.log_throttle import LogThrottle
from emberline.core.tls import certificate_names
from emberline.net.body_budget import BodyReservation, body_budget
from emberline.net.deadline_timer import DeadlineTimer
from emberline.net.descriptors import descriptor_watch
from emberline.net.request_headers import InvalidRequestHead, check_framing, combine_headers
from emberline.net.request_response_cycle import RequestResponseCycle
from emberline.net.server_state import ServerState

connection_errors = LogThrottle(logging.getLogger("emberline.net"))

KEEP_ALIVE_TIMEOUT_S = 5.0  # from one reply to the next request
HEAD_TIMEOUT_S = 20.0  # for the whole head of a request to arrive
CLOSE_TIMEOUT_S = 20.0  # for the client to read the end of the last reply
FIRST_FLUSH_CHECK_S, MAX_FLUSH_CHECK_S = 0.01, 0.25  # between two looks at what the client of a TLS connection has read
WRITE_STALL_TIMEOUT_S = 60.0  # for a client to read any of the data that waits for it
MAX_HEAD_BYTES = 1 << 16  # of a head without the bytes that arrive together with its end; likewise of trailers
MAX_HEADERS = 200
MAX_DISCARDED_BODY_BYTES = 32 << 20  # of a body that arrives after its reply; then the connection is closed


class HTTPServerConnection(asyncio.Protocol):
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.loop = state.loop
        self.is_write_paused = False  # the write buffer is full: the client reads too slowly
        self._drained: asyncio.Future[None] | None = None  # done once the write buffer has room
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._client = self._server_address = ("", 0)
        self._client_cert_names: tuple[str, ...] | None = None  # None: no verified client certificate
        self._is_tls = False
        self._cycle: RequestResponseCycle | None = None  # the request that is being answered
        self._queue: deque[RequestResponseCycle] = deque()  # requests that arrived meanwhile
        self._reading: RequestResponseCycle | None = None  # the request whose body is arriving
        self._in_head = False  # a head has begun and not ended
        self._ignores_input = False  # further input is discarded
        self._paused = False
        self._discarded_body_bytes = 0  # of the request whose body is arriving
        self._bytes_without_progress = 0  # bytes received since the last head or piece of a body
        self._made_progress = False  # the last bytes received had a head or a piece of a body
        self._unread_bytes = 0  # bytes that the client had not read at the last check
        self._timer = DeadlineTimer(state.loop, self._on_deadline)  # closes the connection
        self._flush_deadline: float | None = None  # for the client to read the last reply over TLS
        self._flush_check_s = FIRST_FLUSH_CHECK_S

    # -- for the request-response cycles -------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def wait_for_drain(self) -> asyncio.Future[None]:
        assert self.is_write_paused and (self._drained is None or self._drained.done()), "a write is already waiting"
        self._drained = self.loop.create_future()
        self._watch_client_reading()
        return self._drained

    def pause_reading(self) -> None:
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused and not self._queue and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def set_body_deadline(self, time: float) -> None:
        if not self.is_write_paused:  # otherwise the timer watches that the client reads
            self._timer.set(time)

    def finish_cycle(self, cycle: RequestResponseCycle) -> None:
        """Start the next request of the queue after a reply was written. If the queue is empty, wait for a request."""
        if cycle is not self._cycle:
            return
        self._cycle = None
        if not cycle.keep_alive or self._ignores_input:
            self.close()
        elif self._queue:
            self._start_cycle(self._queue.popleft())
        else:
            self.resume_reading()
            # The rest of an unread body is discarded; the client has HEAD_TIMEOUT_S to send it.
            self._set_close_deadline(KEEP_ALIVE_TIMEOUT_S if cycle.has_whole_body else HEAD_TIMEOUT_S)

    def send_error(self, status: int, reason: str = "") -> None:
        """Send an error reply that does not come from the application, and close the connection."""
        phrase = HTTPStatus(status).phrase
        body = (f"{phrase}: {reason}" if reason else phrase).encode()
        head = b"HTTP/1.1 %d %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.write(head % (status, phrase.encode(), len(body)) + body)
        self.close()

    def close(self) -> None:
        """Close the connection when all data is sent, or when CLOSE_TIMEOUT_S has passed."""
        self._ignores_input = True
        if self._transport is None or self._flush_deadline is not None:
            return
        if self._is_tls and not self._transport.is_closing() and self._count_unread_bytes():
            # A closed TLS transport would discard what the client has not read after TLS_SHUTDOWN_TIMEOUT_S.
            self._flush_deadline = self.loop.time() + CLOSE_TIMEOUT_S
            self._set_close_deadline(self._flush_check_s)
            return
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._set_close_deadline(CLOSE_TIMEOUT_S)

    def _close_when_flushed(self, flush_deadline: float) -> None:
        assert self._transport is not None
        if not self._count_unread_bytes():
            self._transport.close()
        elif self.loop.time() >= flush_deadline:
            self.abort()
        else:
            self._flush_check_s = min(2 * self._flush_check_s, MAX_FLUSH_CHECK_S)
            self._set_close_deadline(self._flush_check_s)

    def close_mid_reply(self) -> None:
        """Close the connection in the middle of a reply.

        Data that waits to be sent is sent first, unless the client reads too slowly.
        """
        self._ignores_input = True
        if self.is_write_paused:
            self.abort()
        else:
            self.close()

    # -- for the server ------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return self._cycle is None

    def close_when_idle(self) -> None:
        if self._cycle is None:
            self.close()
        else:
            self._cycle.keep_alive = False

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- callbacks of the event loop -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        self._client = (transport.get_extra_info("peername") or ("", 0))[:2]
        self._server_address = (transport.get_extra_info("sockname") or ("", 0))[:2]
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        if certificate := transport.get_extra_info("peercert"):
            self._client_cert_names = certificate_names(certificate)
        self._state.connections[self] = None
        self._set_close_deadline(HEAD_TIMEOUT_S)
        if descriptor_watch.count_missing(transport.get_extra_info("socket").fileno()):
            self._make_room()

    def _make_room(self) -> None:
        """Close the oldest connection without a request, or reject this one if all others have requests."""
        oldest = next(each for each in self._state.connections if each.is_idle)
        descriptor_watch.record_shortage(len(self._state.connections), rejected=oldest is self)
        if oldest is self:
            self.send_error(503, "the server has too many open connections")
        else:
            oldest.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._state.connections.pop(self, None)
        self._ignores_input = True
        self._parser = None  # breaks a reference cycle
        self._timer.cancel()
        self.resume_writing()
        for cycle in (self._cycle, self._reading):
            if cycle is not None:
                cycle.is_disconnected = True
                cycle.wake_receiver()
        self._queue.clear()

    def pause_writing(self) -> None:
        self.is_write_paused = True

    def resume_writing(self) -> None:
        self.is_write_paused = False
        is_open = self._transport is not None and not self._transport.is_closing() and self._flush_deadline is None
        if self._cycle is not None and is_open:
            self._timer.clear()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input or self._parser is None:
            return
        self._made_progress = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            self._ignores_input = True  # the following bytes are not HTTP
            if self._reading is None and self._cycle is None:
                self._switch_to_websocket(data[e.args[0] :])
            return
        except httptools.HttpParserError as e:
            cause = e.__context__
            if isinstance(cause, InvalidRequestHead):
                self._reject_input(cause.status, str(cause))
            elif isinstance(cause, MemoryError):
                connection_errors.write(logging.ERROR, "Request rejected because memory is used up: status=503")
                self._reject_input(503, "the server's memory is used up")
            else:
                self._reject_input(400)
            return
        self._bytes_without_progress = 0 if self._made_progress else self._bytes_without_progress + len(data)
        if self._bytes_without_progress > MAX_HEAD_BYTES:
            self._reject_input(431)

    def _reject_input(self, status: int, reason: str = "") -> None:
        """Reject the client's invalid input with an error status, or close the connection if a reply has started."""
        self._ignores_input = True
        if self._cycle is None:
            self.send_error(status, reason)
        elif self._reading is self._cycle:
            self._cycle.is_disconnected = True
            self._cycle.wake_receiver()
            self.send_error(status) if not self._cycle.has_started else self.close()

    # -- callbacks of the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._in_head, self._bytes_without_progress = True, 0
        if self._cycle is None:
            self._set_close_deadline(HEAD_TIMEOUT_S)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(value) > MAX_HEAD_BYTES or len(self._headers) > MAX_HEADERS:
            raise InvalidRequestHead(431, f"a header has more than {MAX_HEAD_BYTES} bytes, or there are too many")
        if self._in_head:  # a trailer must not pass as a header: the checks of the head did not see it
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        self._in_head, self._made_progress = False, True
        version = parser.get_http_version()
        headers = combine_headers(self._headers)
        check_framing(headers, version)
        self._headers = list(headers.items())
        upgrades = parser.should_upgrade()
        if upgrades and self._is_websocket_upgrade():
            return
        keep_alive = version == "1.1" and parser.should_keep_alive() and not upgrades
        expects_continue = headers.get(b"expect", b"").lower() == b"100-continue"
        scope = self._make_scope("http", parser.get_method().decode("ascii"), version)
        declared_bytes = int(headers.get(b"content-length", 0))
        reservation = BodyReservation(body_budget, self._client[0])
        cycle = RequestResponseCycle(
            self, self._state, scope, keep_alive, expects_continue, declared_bytes, reservation
        )
        self._reading, self._discarded_body_bytes = cycle, 0
        if self._cycle is None:
            self._start_cycle(cycle)
        else:
            self._queue.append(cycle)
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._made_progress = True
        if self._reading is None:
            return
        if not self._reading.is_complete:
            self._reading.add_request_body(body)
            return
        self._discarded_body_bytes += len(body)
        if self._discarded_body_bytes > MAX_DISCARDED_BODY_BYTES:
            self._ignores_input = True
            self.abort()

    def on_message_complete(self) -> None:
        if self._reading is not None:
            self._reading.end_request_body()
            self._reading = None

    # ------------------------------------------------------------------------------------------------------------------

    def _start_cycle(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._timer.clear()  # no limit for a reply, unless the client stops reading
        cycle.task = self.loop.create_task(cycle.run())
        self._state.tasks.add(cycle.task)

    def _make_scope(self, scope_type: str, method: str, version: str) -> dict[str, Any]:
        path, _, query = self._url.partition(b"?")
        if not path.startswith(b"/") or b"#" in self._url:
            parsed = httptools.parse_url(self._url)
            path, query = parsed.path or b"/", parsed.query or b""
        text = path.decode("ascii")
        return {
            "type": scope_type,
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": version,
            "method": method,
            "scheme": ("http" if scope_type == "http" else "ws") + ("s" if self._is_tls else ""),
            "path": unquote(text) if "%" in text else text,
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": self._headers,
            "client": self._client,  # the peer of the connection, regardless of forwarding headers
            "server": self._server_address,
            "client_cert_names": self._client_cert_names,
        }

    def _is_websocket_upgrade(self) -> bool:
        upgrade = next((value for name, value in self._headers if name == b"upgrade"), b"")
        return bool(self._state.max_message_bytes) and upgrade.lower() == b"websocket"

    def _switch_to_websocket(self, bytes_after_head: bytes) -> None:
        from emberline.net.websocket import WebSocketConnection

        assert self._transport is not None
        self._state.connections.pop(self, None)
        self._timer.cancel()
        socket = WebSocketConnection(self._state, self._make_scope("websocket", "GET", "1.1"))
        self._transport.set_protocol(socket)
        socket.connection_made(self._transport)
        head = b"".join(b"%b: %b\r\n" % pair for pair in self._headers)
        socket.data_received(b"GET %b HTTP/1.1\r\n%b\r\n%b" % (self._url, head, bytes_after_head))

    def _set_close_deadline(self, seconds: float) -> None:
        self._timer.set(self.loop.time() + seconds)

    def _on_deadline(self) -> None:
        if self._flush_deadline is not None:
            self._close_when_flushed(self._flush_deadline)
        elif self._cycle is not None and not (self.is_write_paused or self._ignores_input):
            self._cycle.time_out_body()
        elif self._cycle is not None and self._count_unread_bytes() < self._unread_bytes:
            self._watch_client_reading()
        else:
            self.abort() if self._ignores_input or self._cycle is not None else self.close()

    def _watch_client_reading(self) -> None:
        """Close the connection if the client reads nothing of the reply for WRITE_STALL_TIMEOUT_S."""
        self._unread_bytes = self._count_unread_bytes()
        self._set_close_deadline(WRITE_STALL_TIMEOUT_S)

    def _count_unread_bytes(self) -> int:
        """Return the number of bytes of replies that the client has not read: in our buffer and in the kernel's."""
        assert self._transport is not None
        queued = bytearray(4)
        with contextlib.suppress(OSError, ValueError):
            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self._transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)
