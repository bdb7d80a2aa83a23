"""WaitingQueue: who may start next. Interactive before batch, first come first served, and nobody waits for ever:
a batch request counts as if it had come `ageing` seconds later than it did."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from emberline.core.request import Priority, Request


class WaitingQueue:
    def __init__(self, ageing: float) -> None:
        self._ageing = ageing
        self._requests: list[Request] = []
        self.held: set[str] = set()  # submissions that cannot start yet: others overtake them, their place is kept

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def rank(self, request: Request) -> tuple[float, int]:
        """The order among all requests, waiting or running: lower goes first and is preempted last."""
        late = self._ageing if request.priority is Priority.BATCH else 0.0
        return request.arrival + late, request.index

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=self.rank)

    def head(self) -> Request | None:
        return next((request for request in self._requests if request.parent not in self.held), None)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
