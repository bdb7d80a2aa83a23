"""Upstream: one request to one worker over HTTP, its reply as it comes. Buffers are bounded: who reads slowly is sent
slowly, through us, to the worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType

import aiohttp
import yarl

BUFFER = 1 << 16  # bytes of a reply that may wait here
CONNECT = 2.0  # seconds
IDLE = 3.0  # seconds a connection is kept: less than workers keep it, who would close it under a request


class Unreached(Exception):
    """It got nothing of the request."""


class Broken(Exception):
    """It got the request, and did not answer to the end."""


class Reply:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = response.headers

    async def read(self) -> bytes:
        """What has come, b"" at the end."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as e:
            raise Broken(f"{type(e).__name__}: {e}") from e

    async def whole(self) -> bytes:
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)


class Upstream:
    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
            auto_decompress=False,
            read_bufsize=BUFFER,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
        )

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    @asynccontextmanager
    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> AsyncIterator[Reply]:
        """Leaving before the end closes the connection, by which the worker knows that nobody listens."""
        try:
            response = await self._session.request(
                method, yarl.URL(url, encoded=True), headers=headers, data=body or None, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
            raise Unreached(f"{type(e).__name__}: {e}") from e
        except (aiohttp.ClientError, OSError) as e:
            raise Broken(f"{type(e).__name__}: {e}") from e
        try:
            yield Reply(response)
        finally:
            response.release() if response.content.is_eof() else response.close()
