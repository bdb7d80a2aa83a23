"""PrefixOracle: counts the hits of an unlimited cache that all workers share.

No routing policy can reach more hits."""

from __future__ import annotations

from emberline.sim.prompt import SimRequest


class PrefixOracle:
    def __init__(self, block_size: int = 16) -> None:
        self._block_size = block_size
        self._seen_digests: set[bytes] = set()

    def count_cached_and_add(self, request: SimRequest) -> int:
        """Return how many tokens of a prompt are in the cache, then add the prompt and its reply to the cache."""
        cached = 0
        for segment, digest in zip(request.segments, request.digests, strict=True):
            if digest not in self._seen_digests:
                break
            cached += segment.num_tokens
        self._seen_digests.update(request.digests)
        self._seen_digests.add(request.reply_digest)
        return min(cached, request.num_prompt_tokens - 1) // self._block_size * self._block_size
