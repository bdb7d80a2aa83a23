"""SuspectRequests: hashes of the prompts of requests during which several workers crashed.

Clients often send a failed request again. For `SUSPECT_TTL_S`, a new request with the same prompt is treated as suspect
from its first attempt."""

from __future__ import annotations

from collections import OrderedDict

SUSPECT_TTL_S = 120.0  # longer than clients' automatic retries and a worker's restart
MAX_SUSPECTS = 1024


class SuspectRequests:
    def __init__(self) -> None:
        self._expiry: OrderedDict[bytes, float] = OrderedDict()  # by the prompt's digest, the newest last

    def add(self, prompt_digest: bytes, now: float) -> None:
        self._expiry[prompt_digest] = now + SUSPECT_TTL_S
        self._expiry.move_to_end(prompt_digest)
        if len(self._expiry) > MAX_SUSPECTS:
            self._expiry.popitem(last=False)

    def contains(self, prompt_digest: bytes, now: float) -> bool:
        return self._expiry.get(prompt_digest, 0.0) > now
