"""HTTPClientResponse: the response of a server, whose body the caller reads while it arrives."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from emberline.net.client_connection import NO_TIMEOUT_S, HTTPClientConnection
from emberline.net.errors import UpstreamBroken, UpstreamTimeout


class HTTPClientResponse:
    """The status, headers and body of a response. The caller must close it."""

    __slots__ = ("_connection", "_release", "content_type", "headers", "status")

    def __init__(self, connection: HTTPClientConnection, release: Callable[[HTTPClientConnection], None]) -> None:
        """`release` is called with the connection when the response is closed, and returns it to the pool."""
        self._connection: HTTPClientConnection | None = connection
        self._release = release
        self.status = connection.status
        self.headers = connection.headers  # names in lower case
        self.content_type = connection.headers.get("content-type", "").partition(";")[0].strip().lower()

    def read(self, timeout_s: float = NO_TIMEOUT_S) -> Coroutine[Any, Any, bytes]:
        """Return the next bytes of the body, or b"" at its end.

        Raises UpstreamTimeout if no byte arrives for `timeout_s`.
        """
        assert self._connection is not None, "closed"
        return self._connection.read(timeout_s)

    async def read_all(self, timeout_s: float = NO_TIMEOUT_S, max_bytes: int = sys.maxsize) -> bytes:
        """Return the whole body.

        Raises UpstreamTimeout if the body is not complete after `timeout_s`, and UpstreamBroken if it is longer than
        `max_bytes`.
        """
        loop = asyncio.get_running_loop()
        deadline, size = loop.time() + timeout_s, 0
        parts: list[bytes] = []
        while True:
            assert self._connection is not None, "closed"
            is_last = self._connection.is_complete
            try:
                part = (
                    self._connection.take_received() if is_last else await self._connection.read(deadline - loop.time())
                )
            except UpstreamTimeout:
                raise UpstreamTimeout(f"the reply did not end within {timeout_s:.3g} s after its headers") from None
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise UpstreamBroken(f"the reply is larger than the limit of {max_bytes} bytes")
            if is_last:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def abort(self, reason: str) -> None:
        """Close the connection and make the waiting read raise UpstreamBroken, unless the whole body has arrived."""
        if self._connection is not None:
            self._connection.fail(reason)

    def close(self) -> None:
        """Return the connection to the pool. If the body is not complete, close the connection to stop the server."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._release(connection)
