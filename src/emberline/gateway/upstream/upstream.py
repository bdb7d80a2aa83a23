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

    async def send(self, out: Outgoing, seconds: float) -> Incoming:
        """The reply's head, within this time. Whoever gets it closes it."""
        origin, path = _split(out.url)
        via = f"{out.headers['via']}, {VIA}" if "via" in out.headers else VIA
        headers = {"accept-encoding": "identity", **out.headers, "via": via}
        return await self._pool.ask(origin, out.method, path, headers, out.body, seconds, checked=out.public)

    async def dial(self, host: str, port: int) -> socket.socket:
        """To a public address, or to none."""
        loop = asyncio.get_running_loop()
        failed: OSError | None = None
        for found in await self._resolver.resolve(host, port):
            where = (found["host"], port)
            try:
                made = public_socket((found["family"], socket.SOCK_STREAM, socket.IPPROTO_TCP, "", where))
                try:
                    await loop.sock_connect(made, where)
                except BaseException:
                    made.close()
                    raise
                return made
            except OSError as e:
                failed = e
        raise failed or OSError(None, f"{host} has no address")


def _split(url: str) -> tuple[str, str]:
    """The origin, and the path as it is to be asked for."""
    at = url.find("/", url.find("://") + 3)
    query = url.find("?")
    if at < 0 or 0 <= query < at:
        return (url, "/") if query < 0 else (url[:query], f"/{url[query:]}")
    return url[:at], url[at:]
