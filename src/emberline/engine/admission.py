"""WaitingQueue: the waiting requests, sorted by the order in which they will start.

Requests are sorted by arrival time. `ageing_seconds` are added to the arrival time of a batch request, so interactive
requests usually start first, but a batch request cannot wait for ever."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from emberline.core.request import Priority, Request


class WaitingQueue:
    def __init__(self, ageing_seconds: float) -> None:
        self._ageing_seconds = ageing_seconds
        self._requests: list[Request] = []
        self.blocked_ids: set[str] = set()  # submissions that cannot start yet; later ones overtake them

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def sort_key(self, request: Request) -> tuple[float, int]:
        """Return a request's sort key. The request with the lowest key starts first and is preempted last."""
        penalty = self._ageing_seconds if request.priority is Priority.BATCH else 0.0
        return request.arrival + penalty, request.index

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=self.sort_key)

    def first_unblocked(self) -> Request | None:
        return next((request for request in self._requests if request.submission_id not in self.blocked_ids), None)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
