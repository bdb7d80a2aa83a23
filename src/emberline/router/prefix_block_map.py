"""PrefixBlockMap: maps a prefix of a prompt (in bytes) to the KV block (of tokens) in which the prefix ends.

A worker reports the last full block of each prompt that it has computed. The block of a shorter prefix is estimated: a
prefix with half of the prompt's bytes is assumed to end after half of the prompt's blocks. If several prompts have the
same prefix, the estimate never goes beyond the blocks that these prompts have in common. The number of prefixes is
limited; the least recently recorded prefix is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from emberline.router.prefixmap import PromptPrefix

MAX_PROMPT_BLOCKS = 1 << 24

ParentLookup = Callable[[bytes], bytes | None]


class BlockPosition(NamedTuple):
    """The hash of a KV block, and the number of blocks from the start of the prompt to the end of this block."""

    digest: bytes
    block_count: int

    def __str__(self) -> str:
        return f"{self.digest.hex()} {self.block_count}"

    @staticmethod
    def parse(text: str) -> BlockPosition:
        digest, blocks = text.split()
        if not 0 < int(blocks) <= MAX_PROMPT_BLOCKS:
            raise ValueError(f"the block count {blocks} must be between 1 and {MAX_PROMPT_BLOCKS}")
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

    def record_prefix(self, prefix: PromptPrefix, last_block: BlockPosition) -> None:
        """Record in which KV block this prefix ends."""
        self._positions[prefix.digest] = last_block
        self._positions.move_to_end(prefix.digest)
        while len(self._positions) > self._max_prefixes:
            self._positions.popitem(last=False)

    def record_prefixes_of_prompt(
        self, prefixes: Sequence[PromptPrefix], prompt_bytes: int, last_block: BlockPosition, find_parent: ParentLookup
    ) -> None:
        """Record in which KV block each prefix of a prompt ends, estimated from its length.

        `last_block`: the last block of the prompt. `find_parent` returns the hash of the block before a given block.
        Nothing is recorded if one of the prompt's blocks is unknown."""
        chain = _block_hashes_up_to(last_block, find_parent)
        for point in prefixes:
            blocks = last_block.block_count * point.length // prompt_bytes
            if chain and blocks:
                recorded = self._positions.get(point.digest)
                common = _last_common_block(recorded, chain, find_parent) if recorded is not None else None
                self.record_prefix(point, common or BlockPosition(chain[blocks - 1], blocks))


def _block_hashes_up_to(last_block: BlockPosition, find_parent: ParentLookup) -> list[bytes]:
    """Return the hashes of all blocks of a prompt that ends in `last_block`, or [] if one of them is unknown."""
    chain = [last_block.digest]
    while len(chain) < last_block.block_count:
        digest = find_parent(chain[-1])
        if digest is None:
            return []
        chain.append(digest)
    return chain[::-1]


def _last_common_block(
    block: BlockPosition, block_hashes: Sequence[bytes], find_parent: ParentLookup
) -> BlockPosition | None:
    """Return the last block that two prompts have in common, or None if they have none.

    `block`: the last block of one prompt. `block_hashes`: all blocks of the other prompt. Return None also if
    `find_parent` does not know a block on the way back from `block`."""
    digest: bytes | None = block.digest
    for blocks in range(block.block_count, 0, -1):
        if digest is None:
            return None
        if blocks <= len(block_hashes) and block_hashes[blocks - 1] == digest:
            return BlockPosition(digest, blocks)
        digest = find_parent(digest)
    return None
