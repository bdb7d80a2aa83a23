"""Reply: what somebody answers, from its head on, as it comes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from emberline.net.connection import FOREVER, Connection
from emberline.net.errors import Broken, TimedOut


class Reply:
    """Whoever gets one closes it."""

    __slots__ = ("_connection", "_done", "headers", "kind", "status")

    def __init__(self, connection: Connection, done: Callable[[Connection], None]) -> None:
        """`done` takes the connection back."""
        self._connection: Connection | None = connection
        self._done = done
        self.status = connection.status
        self.headers = connection.headers  # names in lower case
        self.kind = connection.headers.get("content-type", "").partition(";")[0].strip().lower()

    def read(self, seconds: float = FOREVER) -> Coroutine[Any, Any, bytes]:
        """What has come, b"" at the end. TimedOut, if for so long nothing does."""
        assert self._connection is not None, "closed"
        return self._connection.read(seconds)

    async def whole(self, seconds: float = FOREVER, limit: int = sys.maxsize) -> bytes:
        """All of it, if it is at most `limit` bytes and comes in this time, however many of them trickle in."""
        loop = asyncio.get_running_loop()
        until, size = loop.time() + seconds, 0
        parts: list[bytes] = []
        while True:
            assert self._connection is not None, "closed"
            last = self._connection.complete
            try:
                part = self._connection.taken() if last else await self._connection.read(until - loop.time())
            except TimedOut:
                raise TimedOut(f"a reply of one piece had begun, and not ended {seconds:.3g} s later") from None
            parts.append(part)
            size += len(part)
            if size > limit:
                raise Broken(f"the reply has more than {limit} bytes")
            if last:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def abort(self, reason: str) -> None:
        """Whoever reads it learns at once that it broke, unless all of it has come."""
        if self._connection is not None:
            self._connection.cut(reason)

    def close(self) -> None:
        """Before the end: by this the other side knows that nobody listens. After it the connection is kept."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._done(connection)
