"""KVManager: allocates KV blocks to requests, shares blocks between requests with equal prefixes, and frees them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from emberline.core.clock import Clock, SystemClock
from emberline.core.plan import BlockCopy
from emberline.core.request import Request
from emberline.kv.block_copies import PendingCopies
from emberline.kv.pool import BlockPool
from emberline.kv.prefix import PrefixChanges, PrefixIndex
from emberline.kv.request_hashes import RequestHasher
from emberline.kv.residency import ResidencySampler
from emberline.kv.retained_blocks import RetainedBlocks
from emberline.kv.tier_loads import TierLoads
from emberline.kv.tiers.stack import TierStack
from emberline.kv.window_tables import WindowAdmission, WindowTables

if TYPE_CHECKING:  # imports numpy, which would delay the start of a GPU engine
    from emberline.kv.pulls import Pull, PullManager


class KVManager:
    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        layout: str,
        *,
        prefix_cache: bool = True,
        clock: Clock | None = None,
        load_timeout_s: float = 5.0,
        tiers: TierStack | None = None,
        pulls: PullManager | None = None,
        on_allocate: Callable[[int, int], None] = lambda block, group: None,
        windows: Sequence[int] = (),
        max_step_tokens: int = 0,
    ) -> None:
        """Manage `total_blocks` blocks of `block_size` tokens.

        A request waits at most `load_timeout_s` for blocks from tiers (host memory, disk, store), then it computes
        them. `on_allocate`: see BlockPool. `windows`: attention windows of further groups of layers, see WindowTables,
        with at most `max_step_tokens` new tokens of a request in one step."""
        assert tiers is None or prefix_cache, "tiers are only used by the prefix cache"
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.queried_tokens = 0  # tokens looked up in the prefix cache at admission
        self.hit_tokens = 0  # tokens found there
        self.tiers = tiers
        self.pulls = pulls
        self._clock = clock or SystemClock()
        self._hasher = RequestHasher(layout, block_size, prefix_cache=prefix_cache)
        self._prefix = PrefixIndex()
        self.residency = ResidencySampler(total_blocks, self._clock)
        self._pool = BlockPool(total_blocks, self._forget_evicted_block, self.residency, on_allocate)
        self._windows = WindowTables(windows, block_size, max_step_tokens, self._pool) if windows else None
        self._needs_whole_prefix = self._windows is not None  # a load of which a part is missing cannot be used
        self._num_tables = 1 + len(windows)  # of a request
        self._block_tables: dict[str, list[int]] = {}
        self._holders: dict[str, int] = {}  # holder number in the pool, by request
        self._holder_numbers = itertools.count(1)
        self._num_indexed: dict[str, int] = {}  # number of leading blocks in the prefix index, by request
        self._tier_loads = TierLoads(tiers, block_size, self._clock, load_timeout_s) if tiers is not None else None
        self._active_pulls: dict[str, Pull] = {}  # running pull from another engine, by request
        self.retained = RetainedBlocks(self._pool, self._release_blocks)
        self.copies = PendingCopies(tiers)

    @property
    def num_blocks(self) -> int:
        return self._pool.total

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        return self._pool.num_idle

    def num_blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def count_prefix_tokens(self, request: Request) -> int:
        """Return how many leading tokens of a request are in the cache. Blocks of attention windows are ignored."""
        return len(self._prefix.find_longest_prefix(self._shareable_hashes(request))) * self.block_size

    def block_table(self, request: Request) -> Sequence[int]:
        return self._block_tables[request.id]

    @property
    def has_windows(self) -> bool:
        """Whether layers with an attention window have block tables of their own."""
        return self._windows is not None

    def window_tables(self, request: Request) -> Sequence[Sequence[int]]:
        """Return the block tables of the layers with a window, one for each group of them."""
        return () if self._windows is None else self._windows.tables_of(request)

    def admit(self, request: Request, reserved_blocks: int = 0) -> bool:
        """Allocate blocks for all known tokens of a request and return True.

        Return False if that would leave fewer than `reserved_blocks` blocks available. A prefix that is already in the
        cache is shared, and the request's computed and cached tokens are set to the length of this prefix.
        """
        return self._admit(request, reserved_blocks)

    def _admit(self, request: Request, reserved_blocks: int) -> bool:
        assert request.id not in self._block_tables
        hashes = self._shareable_hashes(request)
        shared = self._prefix.find_longest_prefix(hashes)
        if self.pulls is not None and request.source is not None:  # a pull must not write into a shared block
            block_step = max(1, self.pulls.peer_block_tokens(request) // self.block_size)
            shared = shared[: len(shared) // block_step * block_step]
        known = request.num_known + (request.source is not None)  # the peer may send the next token with its blocks
        later = self._num_moving_blocks(request)
        needed, reused, cached = self.num_blocks_for(known), shared, len(shared)
        in_windows: WindowAdmission | None = None
        if self._windows is not None:
            cached, in_windows = self._plan_windows(self._windows, request, hashes, len(shared), known)
            shared = shared[: in_windows.prefix_blocks]
            reused, needed = shared + in_windows.all_shared, needed + in_windows.num_new
            later += in_windows.num_later  # without these, it would stall in its prompt
        needed -= len(shared)
        idle = sum(1 for block in reused if self._pool.num_holders(block) == 0)
        if needed + later + reserved_blocks * self._num_tables > self._pool.num_available - idle:
            return False
        if self._tier_loads is not None and self._tier_loads.drop_reused_lookup():
            return self._admit(request, reserved_blocks)  # the tiers may have changed since the request waits
        holder = self._holders[request.id] = next(self._holder_numbers)
        for block in shared:
            self._pool.add_holder(block, holder)
        if self._windows is not None and in_windows is not None:
            self._windows.admit(request, in_windows, holder)
            needed -= in_windows.num_new
        self._block_tables[request.id] = shared + [self._pool.allocate_block(holder) for _ in range(needed)]
        self._num_indexed[request.id] = cached
        request.num_computed = request.num_planned = request.num_cached = cached * self.block_size
        num_wanted = len(shared) if in_windows is None else in_windows.prefix_blocks
        self._load_missing_prefix(request, hashes, len(shared), num_wanted)
        lacks_prefix = self._needs_whole_prefix and num_wanted * self.block_size > request.num_cached
        if lacks_prefix and not self.is_loading(request):
            self.free_request(request)  # its pull could not start; what it needs is computed
            return self._admit(request, reserved_blocks)
        if not (request.preemptions or request.load_limit):  # otherwise the request would hit its own blocks
            self.queried_tokens += request.num_known
            self.hit_tokens += request.num_cached
        if not self.is_loading(request):
            request.load_limit = None
        return True

    def _plan_windows(
        self, windows: WindowTables, request: Request, hashes: Sequence[bytes], num_shared: int, num_tokens: int
    ) -> tuple[int, WindowAdmission]:
        """Return how many leading blocks all groups have cached, and the blocks that the request gets in window tables.

        If a peer or the tiers have a longer prefix than the cache, the window tables are planned for that prefix.
        `num_shared`: leading blocks that the first group has cached."""
        cached = wanted = windows.longest_prefix(hashes[:num_shared])
        if self.pulls is not None and request.source is not None:
            covered = self.pulls.covered_tokens(request)
            if covered // self.block_size > cached:
                return cached, windows.plan_pull(covered, num_tokens)
        elif (loads := self._tier_loads) is not None:
            wanted = loads.count_available_in_windows(request, hashes, num_shared, cached, windows)
        return cached, windows.plan_admission(hashes[:wanted], num_tokens)

    def extend_block_table(self, request: Request, num_tokens: int, reserved_blocks: int = 0) -> bool:
        """Allocate blocks until the request has room for `num_tokens` tokens and return True.

        Return False if that would leave fewer than `reserved_blocks` blocks available."""
        table, windows = self._block_tables[request.id], self._windows
        if windows is None and num_tokens <= len(table) * self.block_size:
            return True
        holder, needed = self._holders[request.id], max(0, self.num_blocks_for(num_tokens) - len(table))
        missing = 0
        if windows is not None:
            windows.release_passed(request, holder)
            missing = windows.num_missing(request, num_tokens)
        if needed + missing and needed + missing + reserved_blocks * self._num_tables > self._pool.num_available:
            return False
        table.extend(self._pool.allocate_block(holder) for _ in range(needed))
        if windows is not None:
            windows.extend(request, num_tokens, holder)
        return True

    def _forget_evicted_block(self, block: int) -> None:
        if self._windows is None or not self._windows.forget_block(block):
            self._prefix.remove(block)

    def index_full_blocks(self, request: Request) -> None:
        """Add the request's full blocks of computed tokens to the prefix index, so that other requests find them."""
        full, indexed = request.num_computed // self.block_size, self._num_indexed[request.id]
        if full <= indexed or not self._can_share_blocks(request):
            return
        hashes, table = self._block_hashes(request, full), self._block_tables[request.id]
        for i in range(indexed, full):
            self._prefix.insert(hashes[i], self._parent_hash(request, i), table[i])
        self.copies.add_saves((table[i], hashes[i], 0) for i in range(indexed, full))
        if self._windows is not None:
            self._windows.index_blocks(request, indexed, hashes)
            self.copies.add_saves(self._windows.hashed_blocks(request, indexed, hashes))
        self._num_indexed[request.id] = full

    def free_request(self, request: Request) -> None:
        """Release the blocks of the request.

        The last block is released first, so that the beginning of a prefix is evicted after its end."""
        table, holder = self._block_tables.pop(request.id), self._holders.pop(request.id)
        del self._num_indexed[request.id]
        if (pull := self._active_pulls.pop(request.id, None)) is not None:
            assert self.pulls is not None
            self.pulls.cancel(pull)
            in_windows = [] if self._windows is None else self._windows.remove_request(request)
            self.retained.quarantine(pull, table + in_windows, holder)
        else:
            if self._tier_loads is not None:
                self._tier_loads.cancel(request)
            if self._windows is not None:
                self._windows.free_request(request, holder)
            self._release_blocks(table, holder)
        self._pool.forget_holder(holder)

    # -- cached prefixes, for the router ---------------------------------------------------------------------------

    def track_prefix_changes(self) -> None:
        """Start recording changes of the prefix index for `take_prefix_changes`."""
        self._prefix.track_changes()

    @property
    def is_tracking_prefixes(self) -> bool:
        return self._prefix.is_tracking_changes

    def take_prefix_changes(self) -> PrefixChanges | None:
        """Return the prefix blocks that were added and removed since the last call, or None if nothing changed.

        The first call returns all blocks."""
        return self._prefix.take_changes()

    def parent_hashes(self) -> dict[bytes, bytes]:
        return self._prefix.parent_hashes()

    def publishable_blocks(self, request: Request, first_index: int) -> list[int]:
        """Return the computed blocks from `first_index` on that other engines need to continue the submitted tokens.

        These are the full blocks of the first group and, once they are all computed, the last blocks of each window."""
        last = request.submitted_len // self.block_size
        full = min(last, request.num_computed // self.block_size)
        blocks = self._block_tables[request.id][first_index:full]
        if self._windows is not None and full == last >= first_index:
            blocks += self._windows.tail_blocks(request, request.submitted_len)
        return blocks

    def _release_blocks(self, blocks: Sequence[int], holder: int = 0) -> None:
        windows = self._windows
        for block in reversed(blocks):
            is_indexed = block in self._prefix or (windows is not None and windows.is_indexed(block))
            self._pool.release_block(block, holder, keep_content=is_indexed)

    # -- prefixes from tiers and from other engines -----------------------------------------------------------------

    def is_loading(self, request: Request) -> bool:
        is_fetching = self._tier_loads is not None and request.id in self._tier_loads
        return is_fetching or request.id in self._active_pulls

    def keep_source_lease_alive(self, request: Request) -> None:
        """Keep renewing the lease on the blocks that a peer holds for a request that waits for admission.

        If this engine does not pull blocks from peers, remove the peer from the request instead."""
        if self.pulls is None:
            request.source = None
        elif request.source is not None:
            self.pulls.keep_lease_alive(request)

    def drop_unadmitted_request(self, request: Request) -> None:
        """Release the peer's lease of a request that ended before it was admitted."""
        if self.pulls is not None:
            self.pulls.drop_lease(request)

    def update_loaded_prefix(self, request: Request) -> bool:
        """Mark the blocks of the request's prefix that have arrived from a tier or a peer as computed.

        Other requests may share these blocks immediately, because the step plan that is being built copies them before
        it computes anything.

        Return False if the load failed and the request must be freed and admitted again, because its layers with a
        window lack blocks. Without such layers, a request can use the blocks that arrived before a failure.
        """
        if (pull := self._active_pulls.get(request.id)) is not None:
            return self._take_pulled_tokens(request, pull)
        return self._take_fetched_blocks(request)

    def _take_pulled_tokens(self, request: Request, pull: Pull) -> bool:
        assert self.pulls is not None
        num_available, ended = self.pulls.poll_available_tokens(pull)
        if ended:
            del self._active_pulls[request.id]
            request.pulled = pull.summary
            if pull.indivisible_tokens is not None and not num_available:
                return False
            request.prefill_result, request.prefill_result_len = pull.prefill_result, pull.covered_tokens
        # At least one token must be computed for its logits: the last token, or the one that the peer sampled after it.
        limit = request.num_known - (request.usable_prefill_result is None)
        num_available = min(num_available, pull.covered_tokens, limit)
        if num_available > request.num_computed:
            self.pulls.record_hit_tokens(num_available - request.num_computed)
            request.num_computed = request.num_planned = num_available
            self.index_full_blocks(request)
        if request.prefill_result is not None:
            request.num_cached = min(request.prefill_result.cached, request.num_computed)
        return True

    def _take_fetched_blocks(self, request: Request) -> bool:
        assert self._tier_loads is not None
        load, arrivals = self._tier_loads.take_arrivals(request)
        for (group, index), arrival in arrivals:
            block = self._index_loaded_block(request, group, index)
            self.copies.add_load(BlockCopy(block, arrival.block_hash, arrival.buffer, max(0, group)))
        if self._needs_whole_prefix and load.num_missing:
            if not self.is_loading(request):  # a shorter prefix may have all blocks of windows, or a snapshot
                request.load_limit = load.positions[load.num_arrived][1], load.deadline
            return self.is_loading(request)
        request.load_limit = None
        self._num_indexed[request.id] = load.prefix_blocks - load.num_missing
        request.num_computed = self._num_indexed[request.id] * self.block_size
        request.num_planned = request.num_cached = request.num_computed
        return True

    def _index_loaded_block(self, request: Request, group: int, index: int) -> int:
        """Return a block that a tier will fill, after adding it to the prefix index of its group of layers."""
        if group and self._windows is not None:
            return self._windows.index_block(request, group, index, request.block_hashes)
        block = self._block_tables[request.id][index]
        self._prefix.insert(request.block_hashes[index], self._parent_hash(request, index), block)
        return block

    def _num_moving_blocks(self, request: Request) -> int:
        """Return how many blocks the request needs to receive or send recurrent states between engines."""
        return 0

    def _load_missing_prefix(self, request: Request, hashes: Sequence[bytes], num_shared: int, num_wanted: int) -> None:
        """Start to load the part of a newly admitted request's prefix that is not in the cache.

        The blocks come from the request's peer (a pull) or from the tiers (a fetch). `num_shared`: blocks that the
        first group has cached. `num_wanted`: length in blocks of the prefix for which window blocks were allocated.
        """
        table, windows = self._block_tables[request.id], self._windows
        if self.pulls is not None and request.source is not None:
            whole = None
            if windows is not None and num_wanted > self._num_indexed[request.id]:
                tail = windows.tail_blocks(request, self.pulls.covered_tokens(request))
                table, whole = table[:num_wanted] + tail, (num_shared, num_wanted * self.block_size)
            if (pull := self.pulls.start(request, table, whole)) is not None:
                self._active_pulls[request.id] = pull
                self.copies.drop(table[num_shared:])
        elif self._tier_loads is not None:
            if windows is None:
                num_wanted = self._tier_loads.count_available(request, hashes, num_shared)
            positions = [(0, index) for index in range(num_shared, num_wanted)]
            if windows is not None:
                positions += windows.uncached_blocks(hashes, num_wanted)
            if positions:
                self._tier_loads.start(request, hashes, positions, num_wanted)

    def num_reclaimable_blocks(self, request: Request) -> int:
        """Return how many blocks would become available immediately if this request were freed."""
        if request.id in self._active_pulls:
            return 0
        return self._pool.num_exclusive_blocks(self._holders[request.id])

    def check_invariants(self) -> None:
        """Assert that the number of holders of each block is correct.

        It must equal the number of block tables that contain the block, plus the count of the block in `kept`."""
        self._pool.check_invariants()
        loading = set(self._active_pulls) | (self._tier_loads.request_ids() if self._tier_loads is not None else set())
        assert loading <= self._block_tables.keys()
        held = Counter(b for table in self._block_tables.values() for b in table) + self.retained.count_holders()
        if self._windows is not None:
            held.update(self._windows.held_blocks())
        assert self._pool.count_holders() == held
        assert self._pool.num_free + self._pool.num_idle + len(held) == self._pool.total
        for name, table in self._block_tables.items():
            alone = sum(1 for block in table if self._pool.num_holders(block) == 1)
            if self._windows is not None:
                alone += sum(1 for block in self._windows.held_by(name) if self._pool.num_holders(block) == 1)
            assert self._pool.num_exclusive_blocks(self._holders[name]) == alone

    def _parent_hash(self, request: Request, index: int) -> bytes:
        return request.block_hashes[index - 1] if index else b""  # the first block has no parent

    def _shareable_hashes(self, request: Request) -> list[bytes]:
        return self._hasher.shareable_hashes(request)

    def _can_share_blocks(self, request: Request) -> bool:
        return self._hasher.can_share_blocks(request)

    def _block_hashes(self, request: Request, count: int) -> list[bytes]:
        return self._hasher.block_hashes(request, count)
