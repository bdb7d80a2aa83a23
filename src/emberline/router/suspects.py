"""SuspectRequests: prompts of requests that were abandoned because several workers failed.

Clients retry failed requests automatically, so the same prompt is treated as suspect from its first attempt for a
while."""

from __future__ import annotations

from collections import OrderedDict

SECONDS = 120.0  # longer than clients' automatic retries and a worker's restart
MOST = 1024


class Suspects:
    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()  # by the prompt's digest, the newest last

    def add(self, digest: bytes, now: float) -> None:
        self._until[digest] = now + SECONDS
        self._until.move_to_end(digest)
        if len(self._until) > MOST:
            self._until.popitem(last=False)

    def knows(self, digest: bytes, now: float) -> bool:
        return self._until.get(digest, 0.0) > now
