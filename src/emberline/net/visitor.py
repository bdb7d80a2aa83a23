"""Visitor: one client's connection, HTTP/1.1. Its requests are answered one after the other, in the order they came;
what comes while one is answered waits, and is bounded. Who says nothing, or never ends a request's head, is sent away.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import sys
import termios
from collections import deque
from typing import Any, cast
from urllib.parse import unquote

import httptools

from emberline.net.host import Host
from emberline.net.turn import Turn

KEEP = 5.0  # seconds between two requests
HEAD = 20.0  # seconds for a head to come
LINGER = 20.0  # seconds for the last words to be taken
STALLED = 60.0  # seconds in which a client that is owed something takes nothing
LARGEST_HEAD = 1 << 16  # bytes, but for what comes with its end; of trailers, too
MOST_HEADERS = 200
REFUSALS = {400: b"Bad Request", 431: b"Request Header Fields Too Large", 500: b"Internal Server Error"}


class Visitor(asyncio.Protocol):
    def __init__(self, host: Host) -> None:
        self._host = host
        self.loop = host.loop
        self.full = False  # the client does not take what is written
        self._drained: asyncio.Future[None] | None = None  # waited for
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._client = self._server_address = ("", 0)
        self._turn: Turn | None = None  # is answered
        self._queue: deque[Turn] = deque()  # came before that was done
        self._reading: Turn | None = None  # whose body comes
        self._heading = False  # a head has begun, and not ended
        self._deaf = False  # nothing that comes is read any more
        self._paused = False
        self._size = 0  # of what came since the last head or piece of a body
        self._moved = False  # one of those was in what came last
        self._untaken = 0  # bytes, when it was last looked
        self._due = math.inf  # when it is sent away, if nothing happens
        self._alarm: asyncio.TimerHandle | None = None

    # -- for its turns -------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def drained(self) -> asyncio.Future[None]:
        assert self.full and (self._drained is None or self._drained.done()), "one writer at a time"
        self._drained = self.loop.create_future()
        self._watch()
        return self._drained

    def pause(self) -> None:
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self._queue and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def done(self, turn: Turn) -> None:
        """The reply is written."""
        if turn is not self._turn:
            return
        self._turn = None
        if not turn.keep or self._deaf:
            self.close()
        elif self._queue:
            self._start(self._queue.popleft())
        else:
            self.resume()
            self._wait(KEEP if turn.arrived else HEAD)  # what is left of its body passes unread

    def refuse(self, status: int) -> None:
        """In no application's words."""
        body = REFUSALS[status]
        head = b"HTTP/1.1 %d %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.write(head % (status, body, len(body)) + body)
        self.close()

    def close(self) -> None:
        """When all that was written is sent; who does not take it is not waited for much longer."""
        self._deaf = True
        if self._transport is not None:
            self._transport.close()
            if self._transport.get_write_buffer_size():
                self._wait(LINGER)

    def cut(self) -> None:
        """As close, but one who does not take what is written is not waited for."""
        self._deaf = True
        if self.full:
            self.abort()
        else:
            self.close()

    # -- for the server ------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        if self._turn is None:
            self.close()
        else:
            self._turn.keep = False

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- told by the loop ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by descent
        self._client = (transport.get_extra_info("peername") or ("", 0))[:2]
        self._server_address = (transport.get_extra_info("sockname") or ("", 0))[:2]
        self._host.guests.add(self)
        self._wait(HEAD)

    def connection_lost(self, error: Exception | None) -> None:
        self._host.guests.discard(self)
        self._deaf = True
        self._parser = None  # which knows us, too
        if self._alarm is not None:
            self._alarm.cancel()
        self.resume_writing()
        for turn in (self._turn, self._reading):
            if turn is not None:
                turn.gone = True
                turn.wake()
        self._queue.clear()

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self._turn is not None and self._transport is not None and not self._transport.is_closing():
            self._due = math.inf
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self._parser is None:
            return
        self._moved = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            self._deaf = True  # what follows is not HTTP
            if self._reading is None and self._turn is None:
                self._switch(data[e.args[0] :])
            return
        except httptools.HttpParserError as e:
            self._spoiled(431 if isinstance(e.__context__, _TooLarge) else 400)
            return
        self._size = 0 if self._moved else self._size + len(data)
        if self._size > LARGEST_HEAD:
            self._spoiled(431)

    def _spoiled(self, status: int) -> None:
        """What is under way is answered to its end."""
        self._deaf = True
        if self._turn is None:
            self.refuse(status)
        elif self._reading is self._turn:
            self._turn.gone = True
            self._turn.wake()
            self.refuse(status) if not self._turn.started else self.close()

    # -- told by the parser --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._heading, self._size = True, 0
        if self._turn is None:
            self._wait(HEAD)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(value) > LARGEST_HEAD or len(self._headers) > MOST_HEADERS:
            raise _TooLarge
        if self._heading:  # else it is a trailer, which no check of the head has seen
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        self._heading, self._moved = False, True
        version = parser.get_http_version()
        names = [name for name, _ in self._headers]
        hosts = names.count(b"host")
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            raise _BadHost  # a check of its name would look at another one than whoever reads it next
        upgrades = parser.should_upgrade()
        if upgrades and self._wants_socket():
            return
        keep = version == "1.1" and parser.should_keep_alive() and not upgrades
        awaited = b"expect" in names and dict(self._headers)[b"expect"].lower() == b"100-continue"
        turn = Turn(self, self._host, self._scope("http", parser.get_method().decode("ascii"), version), keep, awaited)
        self._reading = turn
        if self._turn is None:
            self._start(turn)
        else:
            self._queue.append(turn)
            self.pause()

    def on_body(self, body: bytes) -> None:
        self._moved = True
        if self._reading is not None and not self._reading.complete:
            self._reading.came(body)

    def on_message_complete(self) -> None:
        if self._reading is not None:
            self._reading.ended()
            self._reading = None

    # ------------------------------------------------------------------------------------------------------------------

    def _start(self, turn: Turn) -> None:
        self._turn = turn
        self._due = math.inf  # but for one who does not take what is written
        turn.task = self.loop.create_task(turn.run())
        self._host.work.add(turn.task)

    def _scope(self, kind: str, method: str, version: str) -> dict[str, Any]:
        path, _, query = self._url.partition(b"?")
        if not path.startswith(b"/") or b"#" in self._url:
            parsed = httptools.parse_url(self._url)
            path, query = parsed.path or b"/", parsed.query or b""
        text = path.decode("ascii")
        return {
            "type": kind,
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": version,
            "method": method,
            "scheme": "http" if kind == "http" else "ws",
            "path": unquote(text) if "%" in text else text,
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": self._headers,
            "client": self._client,  # the peer of the connection, whatever headers say
            "server": self._server_address,
        }

    def _wants_socket(self) -> bool:
        upgrade = next((value for name, value in self._headers if name == b"upgrade"), b"")
        return bool(self._host.largest_message) and upgrade.lower() == b"websocket"

    def _switch(self, rest: bytes) -> None:
        from emberline.net.websocket import WebSocket

        assert self._transport is not None
        self._host.guests.discard(self)
        if self._alarm is not None:
            self._alarm.cancel()
        socket = WebSocket(self._host, self._scope("websocket", "GET", "1.1"))
        self._transport.set_protocol(socket)
        socket.connection_made(self._transport)
        head = b"".join(b"%b: %b\r\n" % pair for pair in self._headers)
        socket.data_received(b"GET %b HTTP/1.1\r\n%b\r\n%b" % (self._url, head, rest))

    def _wait(self, seconds: float) -> None:
        """One alarm for all that is waited for: it is moved when it goes off too early."""
        self._due = self.loop.time() + seconds
        if self._alarm is None or self._alarm.when() > self._due:
            self._ring_at(self._due)

    def _ring_at(self, when: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self.loop.call_at(when, self._rings)

    def _rings(self) -> None:
        self._alarm = None
        if self.loop.time() < self._due:
            if self._due < math.inf:
                self._ring_at(self._due)
        elif self._turn is not None and self._count_untaken() < self._untaken:
            self._watch()
        else:
            self.abort() if self._deaf or self._turn is not None else self.close()

    def _watch(self) -> None:
        """Who takes nothing of what is written is sent away, who takes it slowly is not."""
        self._untaken = self._count_untaken()
        self._wait(STALLED)

    def _count_untaken(self) -> int:
        """With what the system keeps: it takes no more from us before much of that has gone."""
        assert self._transport is not None
        kept = bytearray(4)
        with contextlib.suppress(OSError, ValueError):
            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kept)
        return self._transport.get_write_buffer_size() + int.from_bytes(kept, sys.byteorder)


class _TooLarge(Exception):
    """A head."""


class _BadHost(Exception):
    """A request has no Host header, or several."""
