"""Upstream: requests to providers over HTTP, their replies as they come. Lines are kept and shared by all calls."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Coroutine
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.errors import Broken, TimedOut, Unreached
from emberline.gateway.line import Line
from emberline.gateway.providers.base import Outgoing
from emberline.gateway.ssrf import PublicResolver, public_socket

IDLE = 15.0  # seconds a line is kept
MOST_IDLE = 256  # lines to one place
MOST_PLACES = 4096


class Place(msgspec.Struct, frozen=True):
    """Where lines lead; all to one are alike."""

    host: str
    port: int
    tls: bool
    public: bool
    header: str  # as the Host header has it

    @staticmethod
    def of(origin: str, public: bool) -> Place:
        """From a URL without a path."""
        try:
            parts = urlsplit(origin)
            host, port = parts.hostname, parts.port
        except ValueError as e:
            raise InvalidRequest(f"{origin[:200]!r} is not a URL: {e}") from e
        if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc:
            raise InvalidRequest(f"{origin[:200]!r} is not an http or https URL of a host")
        tls = parts.scheme == "https"
        return Place(host, port or (443 if tls else 80), tls, public, parts.netloc)


class Incoming:
    """A reply whose head has come."""

    __slots__ = ("_line", "_place", "_upstream", "headers", "kind", "status")

    def __init__(self, upstream: Upstream, place: Place, line: Line) -> None:
        self._upstream, self._place = upstream, place
        self._line: Line | None = line
        self.status = line.status
        self.headers = line.headers
        self.kind = line.headers.get("content-type", "").partition(";")[0].strip().lower()

    def read(self, seconds: float) -> Coroutine[Any, Any, bytes]:
        """What has come, b"" at the end."""
        assert self._line is not None, "closed"
        return self._line.read(seconds)

    async def whole(self, seconds: float, limit: int) -> bytes:
        """All of it, if it is at most `limit` bytes and comes in this time, however many of them trickle in."""
        loop = asyncio.get_running_loop()
        until, size = loop.time() + seconds, 0
        parts: list[bytes] = []
        while True:
            try:
                part = await self.read(until - loop.time())
            except TimedOut:
                raise TimedOut(f"a reply of one piece had begun, and not ended {seconds:.3g} s later") from None
            if not part:
                return parts[0] if len(parts) == 1 else b"".join(parts)
            parts.append(part)
            size += len(part)
            if size > limit:
                raise Broken(f"the reply has more than {limit} bytes")

    def close(self) -> None:
        """Before the end: by this the provider knows that nobody listens. After it the line is kept."""
        line, self._line = self._line, None
        if line is not None:
            self._upstream.done(self._place, line)


class Upstream:
    def __init__(self, connect: float = 5.0) -> None:
        self._connect_seconds = connect
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Place, deque[Line]] = {}
        self._places: dict[tuple[str, bool], Place] = {}
        self._resolver = PublicResolver()
        self._tls: ssl.SSLContext | None = None
        self._open: set[Line] = set()

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in [*self._open, *(line for lines in self._idle.values() for line in lines)]:
            line.abort()
        await self._resolver.close()

    async def send(self, out: Outgoing, seconds: float) -> Incoming:
        """The reply's head, within this time. Whoever gets it closes it."""
        origin, path = _split(out.url)
        place = self._place(origin, out.public)
        head = _head(out, place, path)
        until = self._loop.time() + seconds
        while True:
            line = self._kept(place)
            fresh = line is None
            if line is None:
                line = await self._connected(place, seconds)
            self._open.add(line)
            try:
                line.send(out.method, head, out.body)
                await line.head(until - self._loop.time())
                return Incoming(self, place, line)
            except Broken:
                self.done(place, line)
                if fresh or not line.silent:
                    raise
                # It was kept for too long, and closed at the other end when we wrote: that is nobody's failure.
            except BaseException:
                self.done(place, line)
                raise

    def done(self, place: Place, line: Line) -> None:
        self._open.discard(line)
        lines = self._idle.setdefault(place, deque())
        if line.rest() and len(lines) < MOST_IDLE:
            line.idle_since = self._loop.time()
            lines.append(line)
        else:
            line.abort()

    def _kept(self, place: Place) -> Line | None:
        """The one used last; those idle for too long go."""
        lines = self._idle.get(place)
        if not lines:
            return None
        now = self._loop.time()
        while lines and now - lines[0].idle_since > IDLE:
            lines.popleft().abort()
        while lines:
            if not (line := lines.pop()).closed:
                return line
        return None

    def _place(self, origin: str, public: bool) -> Place:
        place = self._places.get((origin, public))
        if place is None:
            if len(self._places) >= MOST_PLACES:
                self._places.clear()
            place = self._places[origin, public] = Place.of(origin, public)
        return place

    # -- new lines -----------------------------------------------------------------------------------------------------

    async def _connected(self, place: Place, seconds: float) -> Line:
        seconds = min(seconds, self._connect_seconds)
        try:
            async with asyncio.timeout(seconds):
                return await self._connect(place)
        except TimeoutError:
            raise Unreached(f"no connection to {place.header} within {seconds:.3g} s") from None
        except (OSError, ValueError) as e:
            kind = "TLS: " if isinstance(e, ssl.SSLError) else ""
            raise Unreached(f"no connection to {place.header} ({kind}{e})") from e

    async def _connect(self, place: Place) -> Line:
        if place.public:
            return await self._connect_public(place)
        line = Line(self._loop)
        tls, name = (self._context(), place.host) if place.tls else (None, None)
        await self._loop.create_connection(lambda: line, place.host, place.port, ssl=tls, server_hostname=name)
        return line

    async def _connect_public(self, place: Place) -> Line:
        """To an address that was looked at: the same one, not the same name."""
        failed: OSError | None = None
        tls, name = (self._context(), place.host) if place.tls else (None, None)
        for found in await self._resolver.resolve(place.host, place.port):
            where = (found["host"], place.port)
            line = Line(self._loop)
            try:
                made = public_socket((found["family"], socket.SOCK_STREAM, socket.IPPROTO_TCP, "", where))
                try:
                    await self._loop.sock_connect(made, where)
                    await self._loop.create_connection(lambda: line, sock=made, ssl=tls, server_hostname=name)  # noqa: B023
                except BaseException:
                    made.close()
                    raise
                return line
            except OSError as e:
                failed = e
        raise failed or OSError(None, f"{place.host} has no address")

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _split(url: str) -> tuple[str, str]:
    """The origin, and the path as it is to be asked for."""
    at = url.find("/", url.find("://") + 3)
    query = url.find("?")
    if at < 0 or 0 <= query < at:
        return (url, "/") if query < 0 else (url[:query], f"/{url[query:]}")
    return url[:at], url[at:]


def _head(out: Outgoing, place: Place, path: str) -> bytes:
    lines = [f"{out.method} {path} HTTP/1.1", f"host: {place.header}", "accept-encoding: identity"]
    lines += [f"{name}: {value}" for name, value in out.headers.items()]
    if out.body or out.method not in ("GET", "HEAD", "DELETE"):
        lines.append(f"content-length: {len(out.body)}")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        raise InvalidRequest("a header or a path has a line break in it")
    try:
        return text.encode("latin-1") + b"\r\n\r\n"
    except UnicodeEncodeError as e:
        raise InvalidRequest(f"a header or a path has a character that HTTP cannot carry: {e}") from e
