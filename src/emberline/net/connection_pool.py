"""HTTPConnectionPool: sends HTTP requests and keeps their connections open for later requests.

The caller chooses the server of each request and decides what to do after a failure.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from emberline.core.errors import InvalidRequest
from emberline.net.client_connection import NO_TIMEOUT_S, HTTPClientConnection
from emberline.net.client_response import HTTPClientResponse
from emberline.net.errors import UpstreamBroken, UpstreamUnreachable
from emberline.net.origin import OriginConnections

MAX_IDLE_PER_ORIGIN = 256  # connections
MAX_ORIGINS = 4096
STALE_RETRY_WINDOW_S = 1.0  # a server that closes the connection later than this may have processed the request

Dial = Callable[[str, int], Awaitable[socket.socket]]  # host and port


class FetchedReply(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


class HTTPConnectionPool:
    def __init__(
        self,
        *,
        connect_timeout_s: float,
        idle_timeout_s: float,
        retries_stale: bool = False,
        dial: Dial | None = None,
        tls: ssl.SSLContext | None = None,
        tls_by_origin: Mapping[str, ssl.SSLContext] | None = None,
    ) -> None:
        """Create a pool without connections.

        An unused connection is kept for `idle_timeout_s`. With `retries_stale`, a request is sent once more on a new
        connection if a reused connection breaks within STALE_RETRY_WINDOW_S without a byte of a reply: the server may
        have closed it before the request arrived. For a request with `checks_address`, `dial` opens the connection; it
        may refuse the host's IP address. `tls` is the context for https origins, by default one with the system's CAs.
        `tls_by_origin` has other contexts for the origins that it lists.
        """
        self._connect_timeout_s, self._idle_timeout_s = connect_timeout_s, idle_timeout_s
        self._retries_stale = retries_stale
        self._dial = dial
        self._loop = asyncio.get_running_loop()
        self._origins: dict[tuple[str, bool], OriginConnections] = {}
        self._open: set[HTTPClientConnection] = set()
        self._tls = tls
        self._tls_by_origin = tls_by_origin or {}

    def close(self) -> None:
        for connection in self._open:
            connection.abort()
        self._close_idle_connections()

    async def request(
        self,
        origin: str,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        timeout_s: float = NO_TIMEOUT_S,
        *,
        checks_address: bool = False,
        connect_timeout_s: float = math.inf,
    ) -> HTTPClientResponse:
        """Send a request and return the response when its status and headers have arrived.

        The caller must close the response. `origin` is a URL without a path. A new connection must be open within
        `connect_timeout_s` and the pool's own limit. Raises UpstreamUnreachable, UpstreamTimeout or UpstreamBroken.
        """
        target = self._origins.get((origin, checks_address)) or self._add_origin(origin, checks_address)
        head = _encode_request_head(method, path, target.host_header, headers, body)
        deadline = self._loop.time() + timeout_s
        idle = target.take_idle(self._loop.time() - self._idle_timeout_s)
        while True:
            connection = idle or await self._open_connection(target, min(timeout_s, connect_timeout_s))
            self._open.add(connection)
            stale_until = self._loop.time() + STALE_RETRY_WINDOW_S
            try:
                connection.send(method, head, body)
                await connection.wait_for_head(deadline - self._loop.time())
            except BaseException as e:
                self._release(target, connection)
                was_stale = isinstance(e, UpstreamBroken) and idle is not None and connection.is_silent
                if not (was_stale and self._retries_stale) or self._loop.time() > stale_until:
                    raise
                idle = None
            else:
                return HTTPClientResponse(connection, partial(self._release, target))

    async def fetch(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        *,
        timeout_s: float = NO_TIMEOUT_S,
        max_bytes: int = sys.maxsize,
    ) -> FetchedReply:
        """Send a request and return the whole reply, even if its status is an error.

        `timeout_s` limits the time until the reply is complete, `max_bytes` the size of its body. Raises
        UpstreamUnreachable, UpstreamTimeout or UpstreamBroken.
        """
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        deadline = self._loop.time() + timeout_s
        response = await self.request(f"{parts.scheme}://{parts.netloc}", method, path, headers, body, timeout_s)
        try:
            content = await response.read_all(deadline - self._loop.time(), max_bytes)
            return FetchedReply(response.status, response.headers, content)
        finally:
            response.close()

    def _release(self, target: OriginConnections, connection: HTTPClientConnection) -> None:
        self._open.discard(connection)
        if connection.is_reusable() and len(target.idle) < MAX_IDLE_PER_ORIGIN:
            connection.idle_since = self._loop.time()
            target.idle.append(connection)
        else:
            connection.abort()

    def _add_origin(self, origin: str, checks_address: bool) -> OriginConnections:
        if len(self._origins) >= MAX_ORIGINS:
            self._close_idle_connections()
        # An origin without further requests would never close its idle connections itself.
        for each in self._origins.values():
            each.close_stale(self._loop.time() - self._idle_timeout_s)
        target = self._origins[origin, checks_address] = OriginConnections.parse(origin, checks_address)
        return target

    def _close_idle_connections(self) -> None:
        for target in self._origins.values():
            target.close()
        self._origins.clear()

    # -- new connections -----------------------------------------------------------------------------------------------

    async def _open_connection(self, target: OriginConnections, timeout_s: float) -> HTTPClientConnection:
        timeout_s = min(timeout_s, self._connect_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._connect(target)
        except TimeoutError:
            raise UpstreamUnreachable(
                f"connecting to {target.host_header} took longer than the limit of {timeout_s:.3g} s"
            ) from None
        except (OSError, ValueError) as e:
            kind = "TLS error: " if isinstance(e, ssl.SSLError) else ""
            raise UpstreamUnreachable(f"cannot connect to {target.host_header}: {kind}{e}") from e

    async def _connect(self, target: OriginConnections) -> HTTPClientConnection:
        connection = HTTPClientConnection(self._loop)
        tls, name = (self._tls_context(target), target.host) if target.tls else (None, None)
        if not target.is_address_checked:
            await self._loop.create_connection(
                lambda: connection, target.host, target.port, ssl=tls, server_hostname=name
            )
            return connection
        assert self._dial is not None
        sock = await self._dial(target.host, target.port)
        try:
            await self._loop.create_connection(lambda: connection, sock=sock, ssl=tls, server_hostname=name)
        except BaseException:
            sock.close()
            raise
        return connection

    def _tls_context(self, target: OriginConnections) -> ssl.SSLContext:
        if (own := self._tls_by_origin.get(f"https://{target.host_header}")) is not None:
            return own
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _encode_request_head(method: str, path: str, host: str, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body or method not in ("GET", "HEAD", "DELETE"):
        lines.append(f"content-length: {len(body)}")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        raise InvalidRequest(f"a header or the path of the request to {host} contains a line break")
    try:
        return text.encode("latin-1") + b"\r\n\r\n"
    except UnicodeEncodeError as e:
        raise InvalidRequest(f"a header or the path of the request to {host} is not Latin-1: {e}") from e
