"""PrefixIndex: which block holds the content with which hash. One block per hash, one hash per block. Whoever watches
it is told what has changed; until somebody does, nothing is kept for that."""

from __future__ import annotations

from collections.abc import Sequence

News = tuple[bool, list[tuple[bytes, bytes]], list[bytes]]  # whether it is all there is; hashes and parents'; removed


class PrefixIndex:
    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, tuple[bytes, bytes]] = {}  # and its parent's
        self._changes: dict[bytes, bytes | None] | None = None  # parents of what is new, None for what is gone
        self._told = False  # all there was, before these

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

    def insert(self, digest: bytes, parent: bytes, block: int) -> None:
        """Content computed twice at the same time stays known by its first block only."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest, parent
            if self._changes is not None:
                self._changes[digest] = parent

    def forget(self, block: int) -> None:
        digest, _ = self._hash_of.pop(block)
        del self._block_of[digest]
        if self._changes is not None:
            self._changes[digest] = None

    def holdings(self) -> dict[bytes, bytes]:
        """Hashes, and their parents'."""
        return dict(self._hash_of.values())

    def watch(self) -> None:
        """From now on there is news, and all there is comes first."""
        self._changes, self._told = {}, False

    @property
    def watched(self) -> bool:
        return self._changes is not None

    def news(self) -> News | None:
        if self._changes is None or (self._told and not self._changes):
            return None
        changes, self._changes = self._changes, {}
        if not self._told:
            self._told = True
            return True, list(self._hash_of.values()), []
        stored = [(digest, parent) for digest, parent in changes.items() if parent is not None]
        return False, stored, [digest for digest, parent in changes.items() if parent is None]
