"""UpstreamClient: the HTTP client for providers.

It connects to exactly the address that was checked to be public.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Mapping
from types import TracebackType

from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.gateway.upstream.ssrf import ResolveHost, open_public_socket, resolve_public_addresses
from emberline.net.client_response import HTTPClientResponse
from emberline.net.connection_pool import HTTPConnectionPool

IDLE_CONNECTION_S = 15.0  # after which an unused connection is closed
VIA_VALUE = "1.1 emberline-gateway"  # tells a router that a request was forwarded, so that it rejects control requests


class UpstreamClient:
    def __init__(
        self,
        resolve: ResolveHost = resolve_public_addresses,
        tls_by_origin: Mapping[str, ssl.SSLContext] | None = None,
    ) -> None:
        """`tls_by_origin`: the TLS contexts of origins whose certificates do not come from one of the system's CAs."""
        self._resolve = resolve
        self._pool = HTTPConnectionPool(
            connect_timeout_s=math.inf,  # each request has its own
            idle_timeout_s=IDLE_CONNECTION_S,
            retries_stale=True,
            dial=self.connect_to_public,
            tls_by_origin=tls_by_origin,
        )

    async def __aenter__(self) -> UpstreamClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    async def send(self, request: ProviderRequest, timeout_s: float) -> HTTPClientResponse:
        """Send the request and return the response once its headers have arrived.

        The caller must close the response.
        """
        origin, path = _split_url(request.url)
        via = f"{request.headers['via']}, {VIA_VALUE}" if "via" in request.headers else VIA_VALUE
        headers = {"accept-encoding": "identity", **request.headers, "via": via}
        return await self._pool.request(
            origin,
            request.method,
            path,
            headers,
            request.body,
            timeout_s,
            checks_address=request.public_only,
            connect_timeout_s=request.connect_timeout_s,
        )

    async def connect_to_public(self, host: str, port: int) -> socket.socket:
        """Return a socket connected to a public address of `host`.

        Raise OSError if no public address can be reached.
        """
        loop = asyncio.get_running_loop()
        last_error: OSError | None = None
        for address in await self._resolve(host, port):
            try:
                connection = open_public_socket(address)
                try:
                    await loop.sock_connect(connection, address[4])
                except BaseException:
                    connection.close()
                    raise
                return connection
            except OSError as e:
                last_error = e
        raise last_error or OSError(None, f"host {host} has no address")


def _split_url(url: str) -> tuple[str, str]:
    """Return the URL's origin (scheme, host and port), and its path with the query."""
    path_start = url.find("/", url.find("://") + 3)
    query = url.find("?")
    if path_start < 0 or 0 <= query < path_start:
        return (url, "/") if query < 0 else (url[:query], f"/{url[query:]}")
    return url[:path_start], url[path_start:]
