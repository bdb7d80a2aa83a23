"""PrefixMap: which workers received a prompt with a given prefix, and therefore probably have the prefix cached.

The number of prefixes is limited; the least recently seen prefix is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

MAX_WORKERS_PER_PREFIX = 4


class PromptPrefix(NamedTuple):
    """A prefix of a prompt: the hash and the number of its bytes."""

    digest: bytes
    length: int


class PrefixEntry(NamedTuple):
    worker_ids: tuple[str, ...] = ()  # workers that received the prefix, latest first
    # A prompt ended here and no other has continued it yet: a conversation's next request will.
    is_prompt_end: bool = False


class PrefixMap:
    def __init__(self, max_prefixes: int) -> None:
        assert max_prefixes > 0
        self._max_prefixes = max_prefixes
        self._entries: OrderedDict[bytes, PrefixEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def record_prompt(self, prefixes: Sequence[PromptPrefix], worker_id: str) -> None:
        continued = self._longest_known_prefix(prefixes)
        for point in reversed(prefixes):  # the shortest prefix, which most prompts share, is then evicted last
            entry = self._entries.get(point.digest, PrefixEntry())
            others = (name for name in entry.worker_ids if name != worker_id)
            ends = point is not continued and (entry.is_prompt_end or point is prefixes[-1])
            self._entries[point.digest] = PrefixEntry((worker_id, *others)[:MAX_WORKERS_PER_PREFIX], ends)
            self._entries.move_to_end(point.digest)
        while len(self._entries) > self._max_prefixes:
            self._entries.popitem(last=False)

    def cached_bytes_by_worker(self, prefixes: Sequence[PromptPrefix]) -> dict[str, int]:
        """Return how many bytes of this prompt's start each worker has received before, by worker id.

        Workers with more bytes come first; among equals, the worker that received them most recently."""
        cached_bytes: dict[str, int] = {}
        for point in reversed(prefixes):
            for worker in self._entries.get(point.digest, PrefixEntry()).worker_ids:
                cached_bytes.setdefault(worker, point.length)
        return cached_bytes

    def continues_conversation(self, prefixes: Sequence[PromptPrefix]) -> bool:
        """Whether this prompt continues exactly one earlier prompt, like the next turn of a conversation.

        If it does not, the prefix that the router has seen before may be one that many prompts share, like a system
        prompt."""
        deepest = self._longest_known_prefix(prefixes)
        return deepest is not None and self._entries[deepest.digest].is_prompt_end

    def _longest_known_prefix(self, prefixes: Sequence[PromptPrefix]) -> PromptPrefix | None:
        return next((point for point in reversed(prefixes) if point.digest in self._entries), None)
