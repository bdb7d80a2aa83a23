"""WindowTables: the block tables of layers with an attention window. They keep only the newest blocks of a request.

The tables of all windows have an entry for each block of the request. A block that the window has passed is released,
and its entry becomes NO_BLOCK; blocks are allocated only for the tokens of the next steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from emberline.core.request import Request
from emberline.kv.layer_groups import max_held_blocks
from emberline.kv.pool import BlockPool
from emberline.kv.prefix import PrefixIndex
from emberline.tokens.blockhash import group_block_hash

NO_BLOCK = 0  # the entry of a released block; kernels do not use what they read there


class WindowTable:
    """The block table of one request for one group of layers. The request holds the blocks from `released` on."""

    __slots__ = ("blocks", "released")

    def __init__(self, blocks: list[int], released: int) -> None:
        self.blocks = blocks
        self.released = released

    @property
    def held_blocks(self) -> list[int]:
        return self.blocks[self.released :]


@dataclass(frozen=True, slots=True)
class WindowAdmission:
    """The blocks with which a request starts, for the layers with an attention window."""

    # For each group, the blocks of the prefix that the first new token attends to. None: not cached, to be loaded.
    tails: list[list[int | None]]
    prefix_blocks: int  # blocks of the prefix, including those that are not needed
    new_blocks: int  # blocks to allocate in each group for the tokens after the prefix
    num_later: int  # further blocks, of all groups together, that later steps of its known tokens will need

    @property
    def all_shared(self) -> list[int]:
        return [block for tail in self.tails for block in tail if block is not None]

    @property
    def num_new(self) -> int:
        """The number of blocks to allocate in all groups."""
        return sum(self.new_blocks + tail.count(None) for tail in self.tails)


class WindowTables:
    def __init__(self, windows: Sequence[int], block_size: int, max_step_tokens: int, pool: BlockPool) -> None:
        """`windows`: the window of each group in tokens. `max_step_tokens`: most new tokens of a request in a step."""
        self._windows = windows
        self._size = block_size
        self._max_step_tokens = max_step_tokens
        self._pool = pool
        self._prefixes = [PrefixIndex() for _ in windows]
        self._tables: dict[str, list[WindowTable]] = {}

    def tables_of(self, request: Request) -> list[list[int]]:
        return [table.blocks for table in self._tables[request.id]]

    def held_blocks(self) -> list[int]:
        return [block for name in self._tables for block in self.held_by(name)]

    def held_by(self, request_id: str) -> list[int]:
        return [block for table in self._tables[request_id] for block in table.held_blocks]

    def forget_block(self, block: int) -> bool:
        """Remove an evicted block from the prefix index of its group. Return False if no group has it indexed."""
        for prefix in self._prefixes:
            if block in prefix:
                prefix.remove(block)
                return True
        return False

    def is_indexed(self, block: int) -> bool:
        return any(block in prefix for prefix in self._prefixes)

    # -- prefixes ------------------------------------------------------------------------------------------------------

    def longest_prefix(self, hashes: Sequence[bytes], is_stored: Callable[[bytes], bool] = lambda digest: False) -> int:
        """Return the number of blocks of the longest prefix after which a request can continue.

        For that, each group needs the blocks within its window at the end of the prefix, in the cache or in a tier.
        `is_stored` returns whether a tier has the block with a given hash."""
        count = len(hashes)
        while True:
            for group, index in self.uncached_blocks(hashes, count):
                if not is_stored(group_block_hash(hashes[index], group)):
                    count = index  # all prefixes between this length and `count` need this block too
                    break
            else:
                return count

    def uncached_blocks(self, hashes: Sequence[bytes], count: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks that a request needs after a prefix of `count` blocks and that are not cached.

        Each item is the number of the block's group, which is at least 1, and the block's index in the table."""
        for group, (window, prefix) in enumerate(zip(self._windows, self._prefixes, strict=True), 1):
            for i in range(self._first_needed(window, count * self._size), count):
                if prefix.find_block(hashes[i]) is None:
                    yield group, i

    def _first_needed(self, window: int, num_tokens: int) -> int:
        """Return the index of the first block that the token at position `num_tokens` attends to."""
        return max(0, num_tokens - window + 1) // self._size

    def index_blocks(self, request: Request, first_index: int, hashes: Sequence[bytes]) -> None:
        """Add a request's blocks [first_index, len(hashes)) to the prefix indexes, except blocks that were released."""
        for group, index in self._held_indices(request, first_index, len(hashes)):
            self.index_block(request, group, index, hashes)

    def hashed_blocks(
        self, request: Request, first_index: int, hashes: Sequence[bytes]
    ) -> Iterator[tuple[int, bytes, int]]:
        """Yield a request's blocks [first_index, len(hashes)) of all groups, except blocks that were released.

        Each item is the block, the hash under which tiers store it, and its group."""
        tables = self._tables[request.id]
        for group, index in self._held_indices(request, first_index, len(hashes)):
            yield tables[group - 1].blocks[index], group_block_hash(hashes[index], group), group

    def _held_indices(self, request: Request, first_index: int, end: int) -> Iterator[tuple[int, int]]:
        for group, table in enumerate(self._tables[request.id], 1):
            for index in range(max(first_index, table.released), end):
                yield group, index

    def index_block(self, request: Request, group: int, index: int, hashes: Sequence[bytes]) -> int:
        """Add one block of a request to the prefix index and return the block."""
        block = self._tables[request.id][group - 1].blocks[index]
        self._prefixes[group - 1].insert(hashes[index], hashes[index - 1] if index else b"", block)
        return block

    def tail_blocks(self, request: Request, num_tokens: int) -> list[int]:
        """Return the blocks of all groups that another engine needs to continue after the first `num_tokens` tokens.

        Only full blocks are returned, group by group. The request must still hold them. The blocks also suffice to
        compute the last of these tokens again, which the other engine needs for its logits."""
        end, blocks = num_tokens // self._size, []
        for window, table in zip(self._windows, self._tables[request.id], strict=True):
            start = self._first_needed(window, self._first_new(num_tokens))
            assert table.released <= start
            blocks += table.blocks[start:end]
        return blocks

    def _first_new(self, num_tokens: int) -> int:
        """Return the earliest position that an engine may compute if it has the full blocks of `num_tokens` tokens."""
        return min(num_tokens // self._size * self._size, num_tokens - 1)

    # -- allocation ----------------------------------------------------------------------------------------------------

    def plan_admission(self, hashes: Sequence[bytes], num_tokens: int) -> WindowAdmission:
        """Return the blocks with which a request of `num_tokens` known tokens starts after the prefix `hashes`.

        Blocks of the prefix that are not cached must be loaded."""
        count = len(hashes)
        first = [self._first_needed(window, count * self._size) for window in self._windows]
        tails = [list(map(p.find_block, hashes[i:])) for i, p in zip(first, self._prefixes, strict=True)]
        return self._make_admission(tails, count, num_tokens)

    def plan_pull(self, pulled_tokens: int, num_tokens: int) -> WindowAdmission:
        """Return the blocks with which a request starts if a peer sends the blocks of its first `pulled_tokens` tokens.

        No block is shared with other requests, because the pull writes to all of them."""
        count, first = pulled_tokens // self._size, self._first_new(pulled_tokens)
        tails: list[list[int | None]] = [[None] * (count - self._first_needed(w, first)) for w in self._windows]
        return self._make_admission(tails, count, num_tokens)

    def _make_admission(self, tails: list[list[int | None]], count: int, num_tokens: int) -> WindowAdmission:
        end = -(-min(num_tokens, count * self._size + self._max_step_tokens) // self._size)
        total = -(-num_tokens // self._size)
        later = sum(
            max(0, min(total, max_held_blocks(window, self._size, self._max_step_tokens)) - len(tail) - (end - count))
            for window, tail in zip(self._windows, tails, strict=True)
        )
        return WindowAdmission(tails, count, end - count, later)

    def admit(self, request: Request, plan: WindowAdmission, holder: int) -> None:
        for block in plan.all_shared:  # all of them before any is allocated, which may evict idle ones
            self._pool.add_holder(block, holder)
        self._tables[request.id] = [
            WindowTable(
                [NO_BLOCK] * (plan.prefix_blocks - len(tail))
                + [self._pool.allocate_block(holder, group) if block is None else block for block in tail]
                + [self._pool.allocate_block(holder, group) for _ in range(plan.new_blocks)],
                plan.prefix_blocks - len(tail),
            )
            for group, tail in enumerate(plan.tails, 1)
        ]

    def release_passed(self, request: Request, holder: int) -> None:
        """Release the blocks outside the window: no token that is still to be computed attends to them."""
        for window, prefix, table in zip(self._windows, self._prefixes, self._tables[request.id], strict=True):
            end = min(self._first_needed(window, request.num_computed), len(table.blocks))
            for i in range(table.released, end):
                self._pool.release_block(table.blocks[i], holder, keep_content=table.blocks[i] in prefix)
                table.blocks[i] = NO_BLOCK
            table.released = max(table.released, end)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Return how many blocks must be allocated so that the request has room for `num_tokens` tokens."""
        end = -(-num_tokens // self._size)
        return sum(max(0, end - len(table.blocks)) for table in self._tables[request.id])

    def extend(self, request: Request, num_tokens: int, holder: int) -> None:
        end = -(-num_tokens // self._size)
        for group, table in enumerate(self._tables[request.id], 1):
            table.blocks.extend(self._pool.allocate_block(holder, group) for _ in range(end - len(table.blocks)))

    def remove_request(self, request: Request) -> list[int]:
        """Forget the tables of a request and return its blocks without releasing them."""
        return [block for table in self._tables.pop(request.id) for block in table.held_blocks]

    def free_request(self, request: Request, holder: int) -> None:
        for prefix, table in zip(self._prefixes, self._tables.pop(request.id), strict=True):
            for block in reversed(table.held_blocks):
                self._pool.release_block(block, holder, keep_content=block in prefix)
