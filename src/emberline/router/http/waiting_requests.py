"""WaitingRequests: counts the requests that wait at the router until a worker is available."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class WaitingRequests:
    def __init__(self) -> None:
        self.total = 0
        self.by_model: Counter[str] = Counter()  # "": requests that name no model

    @contextmanager
    def add(self, model: str) -> Iterator[None]:
        """Count a request for the duration of a `with` statement."""
        self.total += 1
        self.by_model[model] += 1
        try:
            yield
        finally:
            self.total -= 1
            self.by_model[model] -= 1
            if not self.by_model[model]:
                del self.by_model[model]  # clients choose the names
