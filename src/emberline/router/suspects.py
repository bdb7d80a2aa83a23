"""Suspects: requests that were given up because workers broke under them, by their prompts. Clients send again what
failed, most by themselves: for a while the same request is a suspect from its beginning."""

from __future__ import annotations

from collections import OrderedDict

SECONDS = 120.0  # longer than clients try again by themselves, and than workers take to be back
MOST = 1024


class Suspects:
    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()  # by digest of the prompt, the newest last

    def add(self, digest: bytes, now: float) -> None:
        self._until[digest] = now + SECONDS
        self._until.move_to_end(digest)
        if len(self._until) > MOST:
            self._until.popitem(last=False)

    def knows(self, digest: bytes, now: float) -> bool:
        return self._until.get(digest, 0.0) > now
