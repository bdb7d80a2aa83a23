"""PrefixIndex: maps each block hash to the one cache block that has this content, and each block to its hash.

After `track_changes`, the index also records which hashes were added and removed. The router needs these changes for
its map of cached prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence

# Whether this is the full state; (hash, parent hash) of each added block; hashes of the removed blocks.
PrefixChanges = tuple[bool, list[tuple[bytes, bytes]], list[bytes]]


class PrefixIndex:
    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, tuple[bytes, bytes]] = {}  # hash and parent hash, by block
        self._changes: dict[bytes, bytes | None] | None = None  # parent of each new hash, None for each removed hash
        self._full_state_taken = False  # whether `take_changes` has returned the full state

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def __len__(self) -> int:
        return len(self._block_of)

    def find_block(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def hash_of(self, block: int) -> bytes:
        return self._hash_of[block][0]

    def parent_of(self, block_hash: bytes) -> bytes | None:
        """Return the parent hash of an indexed hash; None if it is not in the index."""
        block = self._block_of.get(block_hash)
        return None if block is None else self._hash_of[block][1]

    def find_longest_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix of the hash chain that is in the index."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, block_hash: bytes, parent_hash: bytes, block: int) -> None:
        """Add a block, unless a different block with this hash is in the index.

        Two requests may compute the same content at the same time.
        """
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash, parent_hash
            if self._changes is not None:
                self._changes[block_hash] = parent_hash

    def remove(self, block: int) -> None:
        digest, _ = self._hash_of.pop(block)
        del self._block_of[digest]
        if self._changes is not None:
            self._changes[digest] = None

    def parent_hashes(self) -> dict[bytes, bytes]:
        """Return the parent hash of each indexed hash."""
        return dict(self._hash_of.values())

    def track_changes(self) -> None:
        """Start recording changes; the next `take_changes` returns the full state."""
        self._changes, self._full_state_taken = {}, False

    @property
    def is_tracking_changes(self) -> bool:
        return self._changes is not None

    def take_changes(self) -> PrefixChanges | None:
        """Return the changes since the last call, or None if nothing changed.

        The first call returns the whole index.
        """
        if self._changes is None or (self._full_state_taken and not self._changes):
            return None
        changes, self._changes = self._changes, {}
        if not self._full_state_taken:
            self._full_state_taken = True
            return True, list(self._hash_of.values()), []
        stored = [(digest, parent) for digest, parent in changes.items() if parent is not None]
        return False, stored, [digest for digest, parent in changes.items() if parent is None]
