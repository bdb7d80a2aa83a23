"""PrefixIndex: which block holds the content with which hash. One block per hash, one hash per block."""

from __future__ import annotations

from collections.abc import Sequence


class PrefixIndex:
    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def __len__(self) -> int:
        return len(self._block_of)

    def longest(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a chain of hashes."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, digest: bytes, block: int) -> None:
        """Content computed twice at the same time stays known by its first block only."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of.clear()
