"""Upstream: requests to workers over HTTP, on connections that are kept for the next."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from functools import partial
from types import TracebackType
from urllib.parse import urlsplit

from emberline.router.call import Call
from emberline.router.connection import Broken, Connection, Reply, Unreached

__all__ = ["Broken", "Reply", "Unreached", "Upstream"]

CONNECT = 2.0  # seconds
IDLE = 3.0  # seconds a connection is kept: less than workers keep it, who would close it under a request


class Upstream:
    def __init__(self) -> None:
        self._idle: dict[str, deque[Connection]] = {}  # by URL, the last used last
        self._tls: ssl.SSLContext | None = None

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()

    async def request(self, at: str, call: Call) -> Reply:
        """`at`: the worker's URL. The reply is the caller's to close."""
        connection = self._kept(at) or await self._connect(at)
        reply = connection.send(call)
        try:
            await reply.head()
        except BaseException:
            reply.close()
            raise
        return reply

    def _kept(self, at: str) -> Connection | None:
        idle = self._idle.get(at)
        while idle:
            connection = idle.pop()
            if connection.reusable and self._now() - connection.idle_since < IDLE:
                return connection
            connection.close()
        return None

    def _keep(self, at: str, connection: Connection) -> None:
        idle = self._idle.setdefault(at, deque())
        connection.idle_since = self._now()
        idle.append(connection)
        while not idle[0].reusable or connection.idle_since - idle[0].idle_since > IDLE:
            idle.popleft().close()

    async def _connect(self, at: str) -> Connection:
        url = urlsplit(at)
        if url.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if url.scheme == "https" else None
        host, port = url.hostname or "", url.port or (443 if tls else 80)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT):
                _, connection = await loop.create_connection(
                    lambda: Connection(url.netloc, partial(self._keep, at)), host, port, ssl=tls
                )
        except (OSError, TimeoutError) as e:
            raise Unreached(f"{type(e).__name__}: {e}") from e
        return connection

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
