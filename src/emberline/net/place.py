"""OriginConnections: one origin (scheme, host, port) and its idle connections."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from emberline.core.errors import InvalidRequest
from emberline.net.connection import Connection


@dataclass(slots=True, eq=False)
class Place:
    host: str
    port: int
    tls: bool
    header: str  # value of the Host header
    checked: bool  # `dial` connects, and may refuse the host's addresses
    idle: deque[Connection] = field(default_factory=deque)  # the most recently used one last

    @staticmethod
    def of(origin: str, checked: bool = False) -> Place:
        """Parse a URL without a path. Raises InvalidRequest if it is not an http or https URL of a host."""
        try:
            parts = urlsplit(origin)
            host, port = parts.hostname, parts.port
        except ValueError as e:
            raise InvalidRequest(f"{origin[:200]!r} is not a valid URL: {e}") from e
        if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc:
            raise InvalidRequest(f"{origin[:200]!r} is not a URL of the form http://HOST[:PORT] or https://HOST[:PORT]")
        tls = parts.scheme == "https"
        return Place(host, port or (443 if tls else 80), tls, parts.netloc, checked)

    def kept(self, since: float) -> Connection | None:
        """Return the most recently used idle connection, if any, after closing those not used since this time."""
        self.tidy(since)
        while self.idle:
            if not (connection := self.idle.pop()).closed:
                return connection
        return None

    def tidy(self, since: float) -> None:
        """Close the idle connections not used since this time."""
        while self.idle and self.idle[0].idle_since < since:
            self.idle.popleft().abort()

    def close(self) -> None:
        while self.idle:
            self.idle.pop().abort()
