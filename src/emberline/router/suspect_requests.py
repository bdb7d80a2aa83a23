"""SuspectRequests: prompts of requests that were abandoned because several workers failed.

Clients retry failed requests automatically, so the same prompt is treated as suspect from its first attempt for a
while."""

from __future__ import annotations

from collections import OrderedDict

SUSPECT_TTL_S = 120.0  # longer than clients' automatic retries and a worker's restart
MAX_SUSPECTS = 1024


class SuspectRequests:
    def __init__(self) -> None:
        self._expiry: OrderedDict[bytes, float] = OrderedDict()  # by the prompt's digest, the newest last

    def add(self, digest: bytes, now: float) -> None:
        self._expiry[digest] = now + SUSPECT_TTL_S
        self._expiry.move_to_end(digest)
        if len(self._expiry) > MAX_SUSPECTS:
            self._expiry.popitem(last=False)

    def contains(self, digest: bytes, now: float) -> bool:
        return self._expiry.get(digest, 0.0) > now
