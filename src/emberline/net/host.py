"""Host: what all connections of a server share: the application, who is here, and what is done for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

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


class Host:
    def __init__(self, app: App, *, largest_message: int) -> None:
        """`largest_message`: bytes of one over a WebSocket; 0: there are none."""
        self.app = app
        self.largest_message = largest_message
        self.loop = asyncio.get_running_loop()
        self.guests: set[Guest] = set()
        self.work: set[asyncio.Task[None]] = set()
