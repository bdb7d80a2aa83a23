"""Server: an ASGI application on a socket, from its start until nobody is left."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from emberline.net.host import App, Host
from emberline.net.visitor import Visitor

BACKLOG = 2048  # connections that wait to be taken


class Server:
    def __init__(self, app: App, *, largest_message: int = 0) -> None:
        """As a Host has them."""
        self.host = Host(app, largest_message=largest_message)
        self._listener: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        host = self.host
        self._listener = await host.loop.create_server(lambda: Visitor(host), sock=listener, backlog=BACKLOG)

    @property
    def open_requests(self) -> int:
        return len(self.host.work)

    async def stop(self, seconds: float) -> None:
        """Nobody new is taken. Who is here may be answered to the end, within this time."""
        host = self.host
        if self._listener is not None:
            self._listener.close()
        for guest in list(host.guests):
            guest.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while host.guests or host.work:
                    await asyncio.sleep(0.02)
        for task in host.work:
            task.cancel()
        await asyncio.gather(*host.work, return_exceptions=True)
        for guest in list(host.guests):
            guest.abort()
