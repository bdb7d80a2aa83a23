"""OriginConnections: a server, given by scheme, host and port, and the idle connections to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from emberline.core.errors import InvalidRequest
from emberline.net.client_connection import HTTPClientConnection


@dataclass(slots=True, eq=False)
class OriginConnections:
    host: str
    port: int
    tls: bool
    host_header: str  # value of the Host header
    is_address_checked: bool  # `dial` connects, and may refuse the host's addresses
    idle: deque[HTTPClientConnection] = field(default_factory=deque)  # the most recently used one last

    @staticmethod
    def parse(origin: str, is_address_checked: bool = False) -> OriginConnections:
        """Return an OriginConnections for the server at `origin`, a URL without a path.

        Raises InvalidRequest if the URL is not of the form http://HOST[:PORT] or https://HOST[:PORT].
        """
        try:
            parts = urlsplit(origin)
            host, port = parts.hostname, parts.port
        except ValueError as e:
            raise InvalidRequest(f"{origin[:200]!r} is not a valid URL: {e}") from e
        if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc:
            raise InvalidRequest(f"{origin[:200]!r} is not a URL of the form http://HOST[:PORT] or https://HOST[:PORT]")
        tls = parts.scheme == "https"
        return OriginConnections(host, port or (443 if tls else 80), tls, parts.netloc, is_address_checked)

    def take_idle(self, stale_before: float) -> HTTPClientConnection | None:
        """Return the idle connection that was used last, or None if no usable one is left.

        Idle connections that were last used before the time `stale_before` are closed.
        """
        self.close_stale(stale_before)
        while self.idle:
            if not (connection := self.idle.pop()).is_closed:
                return connection
        return None

    def close_stale(self, stale_before: float) -> None:
        """Close the idle connections that were last used before the time `stale_before`."""
        while self.idle and self.idle[0].idle_since < stale_before:
            self.idle.popleft().abort()

    def close(self) -> None:
        while self.idle:
            self.idle.pop().abort()
