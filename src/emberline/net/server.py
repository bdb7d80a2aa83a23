"""Server: an ASGI application on a socket. Those who are connected, and what is done for them, until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from emberline.net.visitor import Visitor

BACKLOG = 2048  # connections that wait to be taken

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


class Guest(Protocol):
    """A connection of any kind."""

    def leave(self) -> None:
        """As soon as what is under way is done."""
        ...

    def abort(self) -> None: ...


class Server:
    def __init__(self, app: App, *, largest_message: int = 0, proxied: bool = False) -> None:
        """`largest_message`: bytes of one over a WebSocket; 0: there are none. `proxied`: for whom a proxy on this
        machine speaks is looked up."""
        self.app = app
        self.largest_message = largest_message
        self.proxied = proxied
        self.loop = asyncio.get_running_loop()
        self.guests: set[Guest] = set()
        self.work: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        self._listener = await self.loop.create_server(lambda: Visitor(self), sock=listener, backlog=BACKLOG)

    async def stop(self, seconds: float) -> None:
        """Nobody new is taken. Who is here may be answered to the end, within this time."""
        if self._listener is not None:
            self._listener.close()
        for guest in list(self.guests):
            guest.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.guests or self.work:
                    await asyncio.sleep(0.02)
        for task in self.work:
            task.cancel()
        await asyncio.gather(*self.work, return_exceptions=True)
        for guest in list(self.guests):
            guest.abort()
