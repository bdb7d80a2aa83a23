"""ServerState: what all connections of a server share: the application, open connections and running tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


class ServerConnection(Protocol):
    """An open connection of the server, HTTP or WebSocket."""

    def close_when_idle(self) -> None:
        """Close the connection after the request in progress."""
        ...

    def abort(self) -> None: ...


class ServerState:
    def __init__(self, app: App, *, max_message_bytes: int) -> None:
        """`max_message_bytes`: limit of one WebSocket message; 0: WebSockets are not accepted."""
        self.app = app
        self.max_message_bytes = max_message_bytes
        self.loop = asyncio.get_running_loop()
        self.connections: set[ServerConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
