"""StatePages: the recurrent states of a slot as pages of the size of a KV block, so that tiers can keep them.

The bytes of a slot, the states of all layers in order, are cut into pages; the last page is filled up with any bytes.
In a tier, each page of a snapshot is stored like a block, under a hash of its own (`state_page_hash`). Other engines
get the pages in blocks of the KV cache. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from emberline.tokens.blockhash import state_page_hash


@dataclass(frozen=True, slots=True)
class StatePages:
    num_blocks: int  # of the KV cache; pages are numbered from here on, slot by slot
    per_slot: int  # pages of one slot

    @staticmethod
    def for_slots(slot_bytes: int, block_bytes: int, num_blocks: int) -> StatePages:
        return StatePages(num_blocks, -(-slot_bytes // block_bytes))

    def page_numbers(self, slot: int) -> range:
        """Return the numbers of a slot's pages, which a BlockCopy has in place of a block number."""
        first = self.num_blocks + slot * self.per_slot
        return range(first, first + self.per_slot)

    def locate(self, number: int) -> tuple[int, int] | None:
        """Return the slot and the index of the page with this number; None if it is the number of a block."""
        return None if number < self.num_blocks else divmod(number - self.num_blocks, self.per_slot)

    def hashes(self, digest: bytes) -> Sequence[bytes]:
        """Return the hashes of the pages of the snapshot that was made after the block with the hash `digest`."""
        return [state_page_hash(digest, page) for page in range(self.per_slot)]


def split_page(page: int, page_bytes: int, part_sizes: Sequence[int]) -> Iterator[tuple[int, slice, slice]]:
    """Yield the pieces of a slot that make up a page: index of a part of the slot, bytes in the part and in the page.

    `part_sizes`: sizes in bytes of the slot's parts. A part is the states of one kind in one layer."""
    first, at = page * page_bytes, 0
    for index, size in enumerate(part_sizes):
        low, high = max(first, at), min(first + page_bytes, at + size)
        if low < high:
            yield index, slice(low - at, high - at), slice(low - first, high - first)
        at += size
