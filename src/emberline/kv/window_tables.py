"""WindowTables: the block tables of layers with an attention window. They keep only the newest blocks of a request.

The tables of all windows have an entry for each block of the request. A block that the window has passed is released,
and its entry becomes NO_BLOCK; blocks are allocated only for the tokens of the next steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emberline.core.request import Request
from emberline.kv.layer_groups import max_held_blocks
from emberline.kv.pool import BlockPool
from emberline.kv.prefix import PrefixIndex

NO_BLOCK = 0  # the entry of a released block; kernels do not use what they read there


class WindowTable:
    """The block table of one request in one group, of which blocks [released, len(blocks)) are held."""

    __slots__ = ("blocks", "released")

    def __init__(self, blocks: list[int], released: int) -> None:
        self.blocks = blocks
        self.released = released

    @property
    def held_blocks(self) -> list[int]:
        return self.blocks[self.released :]


@dataclass(frozen=True, slots=True)
class WindowAdmission:
    """The blocks of layers with a window with which a request starts."""

    shared: list[list[int]]  # of each group: cached blocks that the first new token attends to
    prefix_blocks: int  # blocks of the cached prefix, including those that are not needed
    new_blocks: int  # to allocate in each group
    num_later: int  # blocks of all groups that later steps of its known tokens will need in addition

    @property
    def all_shared(self) -> list[int]:
        return [block for blocks in self.shared for block in blocks]

    @property
    def num_new(self) -> int:
        return self.new_blocks * len(self.shared)


class WindowTables:
    def __init__(self, windows: Sequence[int], block_size: int, max_step_tokens: int, pool: BlockPool) -> None:
        """`windows`: of each group, in tokens. `max_step_tokens`: new tokens of a request in one step, at most."""
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
        """Remove an evicted block from the prefix index; return False if it is not in one."""
        for prefix in self._prefixes:
            if block in prefix:
                prefix.remove(block)
                return True
        return False

    # -- prefixes ------------------------------------------------------------------------------------------------------

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return the largest number of leading blocks behind which every group has the blocks of its window cached."""
        longest, runs = 0, [0] * len(self._windows)  # cached blocks in a row up to this one, in each group
        for count, digest in enumerate(hashes, 1):
            for group, prefix in enumerate(self._prefixes):
                runs[group] = 0 if prefix.find_block(digest) is None else runs[group] + 1
            needed = (count - self._first_needed(window, count * self._size) for window in self._windows)
            if all(run >= least for run, least in zip(runs, needed, strict=True)):
                longest = count
        return longest

    def _first_needed(self, window: int, num_tokens: int) -> int:
        """Return the first block that the token at position `num_tokens` attends to."""
        return max(0, num_tokens - window + 1) // self._size

    def index_blocks(self, request: Request, first: int, hashes: Sequence[bytes]) -> None:
        """Add blocks [first, len(hashes)) to the prefix index, as far as they are held."""
        for table, prefix in zip(self._tables[request.id], self._prefixes, strict=True):
            for i in range(max(first, table.released), len(hashes)):
                prefix.insert(hashes[i], hashes[i - 1] if i else b"", table.blocks[i])

    # -- allocation ----------------------------------------------------------------------------------------------------

    def plan_admission(self, hashes: Sequence[bytes], num_tokens: int) -> WindowAdmission:
        """Return which blocks a request with `num_tokens` known tokens and the cached prefix `hashes` starts with."""
        count = len(hashes)
        shared = [
            [block for digest in hashes[self._first_needed(window, count * self._size) :]
             if (block := prefix.find_block(digest)) is not None]
            for window, prefix in zip(self._windows, self._prefixes, strict=True)
        ]  # fmt: skip
        end = -(-min(num_tokens, count * self._size + self._max_step_tokens) // self._size)
        total = -(-num_tokens // self._size)
        later = sum(
            max(0, min(total, max_held_blocks(window, self._size, self._max_step_tokens)) - len(blocks) - (end - count))
            for window, blocks in zip(self._windows, shared, strict=True)
        )
        return WindowAdmission(shared, count, end - count, later)

    def admit(self, request: Request, plan: WindowAdmission, holder: int) -> None:
        for block in plan.all_shared:  # all of them before any is allocated, which may evict idle ones
            self._pool.add_holder(block, holder)
        self._tables[request.id] = [
            WindowTable(
                [NO_BLOCK] * (plan.prefix_blocks - len(shared))
                + shared
                + [self._pool.allocate_block(holder) for _ in range(plan.new_blocks)],
                plan.prefix_blocks - len(shared),
            )
            for shared in plan.shared
        ]

    def release_passed(self, request: Request, holder: int) -> None:
        """Release the blocks to which no token that is still to be computed attends."""
        for window, prefix, table in zip(self._windows, self._prefixes, self._tables[request.id], strict=True):
            end = min(self._first_needed(window, request.num_computed), len(table.blocks))
            for i in range(table.released, end):
                self._pool.release_block(table.blocks[i], holder, keep_content=table.blocks[i] in prefix)
                table.blocks[i] = NO_BLOCK
            table.released = max(table.released, end)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Return how many blocks must be allocated until the request has room for `num_tokens` tokens."""
        end = -(-num_tokens // self._size)
        return sum(max(0, end - len(table.blocks)) for table in self._tables[request.id])

    def extend(self, request: Request, num_tokens: int, holder: int) -> None:
        end = -(-num_tokens // self._size)
        for table in self._tables[request.id]:
            table.blocks.extend(self._pool.allocate_block(holder) for _ in range(end - len(table.blocks)))

    def free_request(self, request: Request, holder: int) -> None:
        for prefix, table in zip(self._prefixes, self._tables.pop(request.id), strict=True):
            for block in reversed(table.held_blocks):
                self._pool.release_block(block, holder, keep_content=block in prefix)
