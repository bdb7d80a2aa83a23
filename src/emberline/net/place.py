"""Place: where connections lead; all to one are alike, and those that nobody uses wait here for the next request."""

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
    header: str  # as the Host header has it
    checked: bool  # its addresses are looked at before one is connected to
    idle: deque[Connection] = field(default_factory=deque)  # the last used last

    @staticmethod
    def of(origin: str, checked: bool = False) -> Place:
        """From a URL without a path."""
        try:
            parts = urlsplit(origin)
            host, port = parts.hostname, parts.port
        except ValueError as e:
            raise InvalidRequest(f"{origin[:200]!r} is not a URL: {e}") from e
        if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc:
            raise InvalidRequest(f"{origin[:200]!r} is not an http or https URL of a host")
        tls = parts.scheme == "https"
        return Place(host, port or (443 if tls else 80), tls, parts.netloc, checked)

    def kept(self, since: float) -> Connection | None:
        """The one used last; those not used `since` then go."""
        self.tidy(since)
        while self.idle:
            if not (connection := self.idle.pop()).closed:
                return connection
        return None

    def tidy(self, since: float) -> None:
        """Those not used `since` then go."""
        while self.idle and self.idle[0].idle_since < since:
            self.idle.popleft().abort()

    def close(self) -> None:
        while self.idle:
            self.idle.pop().abort()
