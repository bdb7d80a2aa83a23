"""WaitingQueue: requests in the order in which they start: interactive before batch, then by arrival.

A batch request is sorted as if it had arrived `ageing_seconds` later than it did, so it cannot wait for ever."""

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

    def rank(self, request: Request) -> tuple[float, int]:
        """Return the sort key of a request: the lowest starts first and is preempted last."""
        penalty = self._ageing_seconds if request.priority is Priority.BATCH else 0.0
        return request.arrival + penalty, request.index

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=self.rank)

    def first_unblocked(self) -> Request | None:
        return next((request for request in self._requests if request.submission_id not in self.blocked_ids), None)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
