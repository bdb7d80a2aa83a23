"""What a cache that forgets nothing and is everywhere would save: the bound of every way of routing."""

from __future__ import annotations

from emberline.tokens.blockhash import block_hash, root_hash


class Oracle:
    def __init__(self, block_size: int = 16) -> None:
        self._block_size = block_size
        self._seen: set[bytes] = set()

    def cached(self, tokens: list[int]) -> int:
        """Of a prompt, and remembers it."""
        size, parent, cached, whole = self._block_size, root_hash("oracle", ""), 0, True
        for at in range(0, len(tokens) - size + 1, size):
            parent = block_hash(parent, tokens[at : at + size])
            whole = whole and parent in self._seen and at + size < len(tokens)
            cached += size * whole
            self._seen.add(parent)
        return cached
