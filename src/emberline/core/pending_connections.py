"""PendingConnections: the connections of a listener whose peers have not shown their key yet.

Their number is limited. A new connection takes the place of the oldest one of the address that has the most, so that
connections on which nothing arrives cannot keep peers out.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable


class PendingConnections:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: dict[Hashable, tuple[str, Callable[[], None]]] = {}  # the oldest first
        self.evictions = 0  # since the start

    def add(self, connection: Hashable, address: str, close: Callable[[], None]) -> None:
        """Add a connection. If there are too many, call the function `close` of one of them.

        `close` may be called from another thread, and must not wait."""
        with self._lock:
            self._open[connection] = address, close
            if len(self._open) <= self._limit:
                return
            busiest = Counter(address for address, _ in self._open.values()).most_common(1)[0][0]
            oldest = next(each for each, (address, _) in self._open.items() if address == busiest)
            _, close_oldest = self._open.pop(oldest)
            self.evictions += 1
        close_oldest()

    def remove(self, connection: Hashable) -> bool:
        """Remove a connection that has authenticated or ended. Return False if it was closed to make room."""
        with self._lock:
            return self._open.pop(connection, None) is not None

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)
