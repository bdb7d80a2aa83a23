"""ServerState: the application, the open connections and the running tasks of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


class ServerConnection(Protocol):
    """An open HTTP or WebSocket connection of the server."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""
        ...

    def close_when_idle(self) -> None:
        """Close the connection when the request in progress has been answered, or at once if there is no request."""
        ...

    def abort(self) -> None: ...


class ServerState:
    def __init__(self, app: App, *, max_message_bytes: int) -> None:
        """`max_message_bytes` limits the size of a WebSocket message. If it is 0, WebSockets are rejected."""
        self.app = app
        self.max_message_bytes = max_message_bytes
        self.loop = asyncio.get_running_loop()
        self.connections: dict[ServerConnection, None] = {}  # a set, the oldest first
        self.tasks: set[asyncio.Task[None]] = set()
