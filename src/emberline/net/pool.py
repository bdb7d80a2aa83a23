"""Pool: requests over HTTP, on connections that are kept for the next. Whom to ask, and what a failure means, is for
whoever has one to say."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from emberline.core.errors import InvalidRequest
from emberline.net.connection import FOREVER, Connection
from emberline.net.errors import Broken, Unreached
from emberline.net.place import Place
from emberline.net.reply import Reply

MOST_IDLE = 256  # connections to one place
MOST_PLACES = 4096  # remembered
SOON = 1.0  # seconds after a request: who hangs up later may have worked on it

Dial = Callable[[str, int], Awaitable[socket.socket]]  # host and port


class Pool:
    def __init__(self, *, connect: float, idle: float, again: bool = False, dial: Dial | None = None) -> None:
        """`connect`: seconds for a connection to be made; `idle`: that one is kept. `again`: one that was kept, and
        ended soon, before a byte of the reply, is taken for closed by then, and a new one is asked, once. `dial`
        connects to what is to be checked."""
        self._connect_seconds, self._idle = connect, idle
        self._again = again
        self._dial = dial
        self._loop = asyncio.get_running_loop()
        self._places: dict[tuple[str, bool], Place] = {}
        self._open: set[Connection] = set()
        self._tls: ssl.SSLContext | None = None

    def close(self) -> None:
        for connection in self._open:
            connection.abort()
        self._forget()

    async def ask(
        self,
        origin: str,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        seconds: float = FOREVER,
        *,
        checked: bool = False,
    ) -> Reply:
        """The reply's head, within this time. Whoever gets it closes it. `origin`: a URL without a path."""
        place = self._places.get((origin, checked)) or self._place(origin, checked)
        head = _head(method, path, place.header, headers, body)
        until = self._loop.time() + seconds
        kept = place.kept(self._loop.time() - self._idle)
        while True:
            connection = kept or await self._connected(place, seconds)
            self._open.add(connection)
            soon = self._loop.time() + SOON
            try:
                connection.send(method, head, body)
                await connection.head(until - self._loop.time())
            except BaseException as e:
                self._done(place, connection)
                closed = isinstance(e, Broken) and kept is not None and connection.silent
                if not (closed and self._again) or self._loop.time() > soon:
                    raise
                kept = None
            else:
                return Reply(connection, partial(self._done, place))

    def _done(self, place: Place, connection: Connection) -> None:
        self._open.discard(connection)
        if connection.rest() and len(place.idle) < MOST_IDLE:
            connection.idle_since = self._loop.time()
            place.idle.append(connection)
        else:
            connection.abort()

    def _place(self, origin: str, checked: bool) -> Place:
        if len(self._places) >= MOST_PLACES:
            self._forget()
        for each in self._places.values():  # nobody may ask there again
            each.tidy(self._loop.time() - self._idle)
        place = self._places[origin, checked] = Place.of(origin, checked)
        return place

    def _forget(self) -> None:
        for place in self._places.values():
            place.close()
        self._places.clear()

    # -- new connections -----------------------------------------------------------------------------------------------

    async def _connected(self, place: Place, seconds: float) -> Connection:
        seconds = min(seconds, self._connect_seconds)
        try:
            async with asyncio.timeout(seconds):
                return await self._connect(place)
        except TimeoutError:
            raise Unreached(f"no connection to {place.header} within {seconds:.3g} s") from None
        except (OSError, ValueError) as e:
            kind = "TLS: " if isinstance(e, ssl.SSLError) else ""
            raise Unreached(f"no connection to {place.header} ({kind}{e})") from e

    async def _connect(self, place: Place) -> Connection:
        connection = Connection(self._loop)
        tls, name = (self._context(), place.host) if place.tls else (None, None)
        if not place.checked:
            await self._loop.create_connection(
                lambda: connection, place.host, place.port, ssl=tls, server_hostname=name
            )
            return connection
        assert self._dial is not None
        dialled = await self._dial(place.host, place.port)
        try:
            await self._loop.create_connection(lambda: connection, sock=dialled, ssl=tls, server_hostname=name)
        except BaseException:
            dialled.close()
            raise
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _head(method: str, path: str, host: str, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body or method not in ("GET", "HEAD", "DELETE"):
        lines.append(f"content-length: {len(body)}")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        raise InvalidRequest("a header or a path has a line break in it")
    try:
        return text.encode("latin-1") + b"\r\n\r\n"
    except UnicodeEncodeError as e:
        raise InvalidRequest(f"a header or a path has a character that HTTP cannot carry: {e}") from e
