"""HTTPServer: runs an ASGI application on a listening socket, from start to graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from emberline.net.host import App, Host
from emberline.net.visitor import Visitor

BACKLOG = 2048  # connections that wait to be accepted


class Server:
    def __init__(self, app: App, *, largest_message: int = 0) -> None:
        """`max_message_bytes`: limit of one WebSocket message; 0: WebSockets are not accepted."""
        self.host = Host(app, largest_message=largest_message)
        self._listener: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        host = self.host
        self._listener = await host.loop.create_server(lambda: Visitor(host), sock=listener, backlog=BACKLOG)

    @property
    def open_requests(self) -> int:
        return len(self.host.work)

    async def stop(self, seconds: float) -> None:
        """Stop accepting connections, let open requests finish within this time, then abort the rest."""
        host = self.host
        if self._listener is not None:
            self._listener.close()
        for connection in list(host.guests):
            connection.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while host.guests or host.work:
                    await asyncio.sleep(0.02)
        for task in host.work:
            task.cancel()
        await asyncio.gather(*host.work, return_exceptions=True)
        for connection in list(host.guests):
            connection.abort()
