"""Upstream: requests to providers, their replies as they come. Where only a public address may be asked, the one that
was looked at is the one connected to, not the same name."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType

from emberline.gateway.upstream.outgoing import Outgoing
from emberline.gateway.upstream.ssrf import PublicResolver, public_socket
from emberline.net.pool import Pool
from emberline.net.reply import Reply as Incoming

__all__ = ["Incoming", "Upstream"]

IDLE = 15.0  # seconds a connection is kept
VIA = "1.1 emberline-gateway"  # by which a router knows that a call was forwarded, and refuses to be controlled by it


class Upstream:
    def __init__(self, connect: float = 5.0) -> None:
        self._resolver = PublicResolver()
        self._pool = Pool(connect=connect, idle=IDLE, again=True, dial=self.dial)

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()
        await self._resolver.close()

    async def send(self, request: Outgoing, seconds: float) -> Incoming:
        """The reply's head, within this time. Whoever gets it closes it."""
        origin, path = _split(request.url)
        via = f"{request.headers['via']}, {VIA}" if "via" in request.headers else VIA
        headers = {"accept-encoding": "identity", **request.headers, "via": via}
        return await self._pool.ask(
            origin, request.method, path, headers, request.body, seconds, checked=request.public
        )

    async def dial(self, host: str, port: int) -> socket.socket:
        """To a public address, or to none."""
        loop = asyncio.get_running_loop()
        last_error: OSError | None = None
        for address in await self._resolver.resolve(host, port):
            sockaddr = (address["host"], port)
            try:
                connection = public_socket((address["family"], socket.SOCK_STREAM, socket.IPPROTO_TCP, "", sockaddr))
                try:
                    await loop.sock_connect(connection, sockaddr)
                except BaseException:
                    connection.close()
                    raise
                return connection
            except OSError as e:
                last_error = e
        raise last_error or OSError(None, f"{host} has no address")


def _split(url: str) -> tuple[str, str]:
    """The origin, and the path as it is to be asked for."""
    path_start = url.find("/", url.find("://") + 3)
    query = url.find("?")
    if path_start < 0 or 0 <= query < path_start:
        return (url, "/") if query < 0 else (url[:query], f"/{url[query:]}")
    return url[:path_start], url[path_start:]
