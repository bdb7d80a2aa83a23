"""PrefixBlockMap: maps a prefix of a prompt's bytes to the KV block in which it ends.

A worker reports the last full block of each prompt it has computed. The block of a shorter prefix is estimated: it lies
at the same fraction of the block chain as the prefix does of the bytes, but not beyond the blocks that all prompts with
this prefix have in common. The map is bounded; the least recently recorded prefix is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from emberline.router.prefixmap import PromptPrefix

MAX_PROMPT_BLOCKS = 1 << 24

ParentLookup = Callable[[bytes], bytes | None]


class BlockPosition(NamedTuple):
    """A block: its hash, and the number of blocks from the start of the prompt up to it."""

    digest: bytes
    block_count: int

    def __str__(self) -> str:
        return f"{self.digest.hex()} {self.block_count}"

    @staticmethod
    def parse(text: str) -> BlockPosition:
        digest, blocks = text.split()
        if not 0 < int(blocks) <= MAX_PROMPT_BLOCKS:
            raise ValueError(f"the block count {blocks} is not between 1 and {MAX_PROMPT_BLOCKS}")
        return BlockPosition(bytes.fromhex(digest), int(blocks))


class PrefixBlockMap:
    def __init__(self, max_prefixes: int) -> None:
        assert max_prefixes > 0
        self._max_prefixes = max_prefixes
        self._positions: OrderedDict[bytes, BlockPosition] = OrderedDict()  # by the prefix's digest

    def __len__(self) -> int:
        return len(self._positions)

    def get(self, prefix: PromptPrefix) -> BlockPosition | None:
        return self._positions.get(prefix.digest)

    def record(self, prefix: PromptPrefix, position: BlockPosition) -> None:
        """Record the block in which this prefix ends."""
        self._positions[prefix.digest] = position
        self._positions.move_to_end(prefix.digest)
        while len(self._positions) > self._max_prefixes:
            self._positions.popitem(last=False)

    def record_prefixes(
        self, prefixes: Sequence[PromptPrefix], prompt_bytes: int, position: BlockPosition, parent: ParentLookup
    ) -> None:
        """Record the blocks of all prefixes of a prompt that ends at `position`.

        Nothing is recorded unless all blocks before it are known."""
        chain = _chain_to(position, parent)
        for point in prefixes:
            blocks = position.block_count * point.length // prompt_bytes
            if chain and blocks:
                recorded = self._positions.get(point.digest)
                common = _last_common_block(recorded, chain, parent) if recorded is not None else None
                self.record(point, common or BlockPosition(chain[blocks - 1], blocks))


def _chain_to(position: BlockPosition, parent: ParentLookup) -> list[bytes]:
    """Return the hashes of all blocks up to this one, or [] if one of them is unknown."""
    chain = [position.digest]
    while len(chain) < position.block_count:
        digest = parent(chain[-1])
        if digest is None:
            return []
        chain.append(digest)
    return chain[::-1]


def _last_common_block(position: BlockPosition, chain: Sequence[bytes], parent: ParentLookup) -> BlockPosition | None:
    """Return the last block that both chains contain.

    Return None if there is none or a block on the way is unknown."""
    digest: bytes | None = position.digest
    for blocks in range(position.block_count, 0, -1):
        if digest is None:
            return None
        if blocks <= len(chain) and chain[blocks - 1] == digest:
            return BlockPosition(digest, blocks)
        digest = parent(digest)
    return None
