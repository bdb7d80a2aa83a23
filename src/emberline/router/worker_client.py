"""WorkerClient: sends HTTP requests to workers over pooled connections.

It never repeats a failed request, because the request itself may have crashed the worker. The relay decides on
retries."""

from __future__ import annotations

import functools
import ssl
from types import TracebackType
from urllib.parse import urlsplit

from emberline.net.client_response import HTTPClientResponse
from emberline.net.connection_pool import HTTPConnectionPool
from emberline.net.errors import UpstreamBroken, UpstreamUnreachable
from emberline.router.upstream_request import UpstreamRequest

__all__ = ["HTTPClientResponse", "UpstreamBroken", "UpstreamUnreachable", "WorkerClient"]

CONNECT_TIMEOUT_S = 2.0
# Shorter than workers' own, so that a worker never closes a connection on which a request was just sent.
IDLE_TIMEOUT_S = 3.0


class WorkerClient:
    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: the context for workers with an https URL; by default one with the system's CAs."""
        self._pool = HTTPConnectionPool(connect_timeout_s=CONNECT_TIMEOUT_S, idle_timeout_s=IDLE_TIMEOUT_S, tls=tls)

    async def __aenter__(self) -> WorkerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    async def request(self, url: str, request: UpstreamRequest) -> HTTPClientResponse:
        """Send a request and return the reply, which the caller must close.

        `url` is the base URL of the worker; a path in it is put before the request's path. Raises UpstreamUnreachable
        if the worker cannot be reached, and UpstreamBroken if the connection breaks."""
        origin, prefix = _split_origin_and_path(url)
        return await self._pool.request(origin, request.method, prefix + request.target, request.headers, request.body)


@functools.lru_cache(256)
def _split_origin_and_path(url: str) -> tuple[str, str]:
    """Return the origin (scheme, host and port) of a URL, and its path without a trailing slash."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
