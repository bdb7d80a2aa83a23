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
from emberline.kv.kept_blocks import KeptBlocks
from emberline.kv.pool import BlockPool
from emberline.kv.prefix import PrefixChanges, PrefixIndex
from emberline.kv.residency import ResidencySampler
from emberline.kv.tiers.stack import TierFetch, TierStack
from emberline.kv.window_tables import WindowAdmission, WindowTables
from emberline.tokens.blockhash import block_hash, root_hash

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
        on_allocate: Callable[[int], None] = lambda block: None,
        windows: Sequence[int] = (),
        max_step_tokens: int = 0,
    ) -> None:
        """Manage `total_blocks` blocks of `block_size` tokens.

        A request waits at most `load_timeout_s` for blocks from tiers (host memory, disk, store), then it computes
        them. `on_allocate` is called with each block that will get new content, before anything is written to the
        block. `windows`: attention windows of further groups of layers, see WindowTables, with at most
        `max_step_tokens` new tokens of a request in one step.
        """
        assert tiers is None or prefix_cache, "tiers are only used by the prefix cache"
        assert not windows or (tiers is None and pulls is None), "only one group of layers can be copied"
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.queried_tokens = 0  # tokens looked up in the prefix cache at admission
        self.hit_tokens = 0  # tokens found there
        self.tiers = tiers
        self.pulls = pulls
        self._clock = clock or SystemClock()
        self._load_timeout_s = load_timeout_s
        self._layout = layout
        self._prefix = PrefixIndex()
        self.residency = ResidencySampler(total_blocks, self._clock)
        self._pool = BlockPool(total_blocks, self._forget_evicted_block, self.residency, on_allocate)
        self._windows = WindowTables(windows, block_size, max_step_tokens, self._pool) if windows else None
        self._num_tables = 1 + len(windows)  # of a request
        self._block_tables: dict[str, list[int]] = {}
        self._holders: dict[str, int] = {}  # holder number in the pool, by request
        self._holder_numbers = itertools.count(1)
        self._num_indexed: dict[str, int] = {}  # number of leading blocks in the prefix index, by request
        self._fetches: dict[
            str, tuple[TierFetch, float]
        ] = {}  # running fetch from the tiers and its deadline, by request
        self._active_pulls: dict[str, Pull] = {}  # running pull from another engine, by request
        self.kept = KeptBlocks(self._pool, self._release_blocks)
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
        assert request.id not in self._block_tables
        shared = self._prefix.find_longest_prefix(self._shareable_hashes(request))
        if self.pulls is not None and request.source is not None:  # a pull must not write into a shared block
            block_step = max(1, self.pulls.peer_block_tokens(request) // self.block_size)
            shared = shared[: len(shared) // block_step * block_step]
        known = request.num_known + (request.source is not None)  # the peer may send the next token with its blocks
        needed, later, reused = self.num_blocks_for(known), 0, shared
        in_windows: WindowAdmission | None = None
        if self._windows is not None:
            hashes = request.block_hashes[: len(shared)]
            shared = shared[: self._windows.longest_prefix(hashes)]
            in_windows = self._windows.plan_admission(hashes[: len(shared)], known)
            reused, needed = shared + in_windows.all_shared, needed + in_windows.num_new
            later = in_windows.num_later  # without these, it would stall in its prompt
        needed -= len(shared)
        idle = sum(1 for block in reused if self._pool.num_holders(block) == 0)
        if needed + later + reserved_blocks * self._num_tables > self._pool.num_available - idle:
            return False
        holder = self._holders[request.id] = next(self._holder_numbers)
        for block in shared:
            self._pool.add_holder(block, holder)
        if self._windows is not None and in_windows is not None:
            self._windows.admit(request, in_windows, holder)
            needed -= in_windows.num_new
        self._block_tables[request.id] = shared + [self._pool.allocate_block(holder) for _ in range(needed)]
        self._num_indexed[request.id] = len(shared)
        request.num_computed = request.num_planned = request.num_cached = len(shared) * self.block_size
        if not request.preemptions:  # after a preemption the request would hit its own blocks
            self.queried_tokens += request.num_known
            self.hit_tokens += request.num_cached
        self._load_missing_prefix(request)
        return True

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
        self.copies.add_saves((table[i], hashes[i]) for i in range(indexed, full))
        if self._windows is not None:
            self._windows.index_blocks(request, indexed, hashes)
        self._num_indexed[request.id] = full

    def free_request(self, request: Request) -> None:
        """Release the blocks of the request.

        The last block is released first, so that the beginning of a prefix is evicted after its end.
        """
        table, holder = self._block_tables.pop(request.id), self._holders.pop(request.id)
        del self._num_indexed[request.id]
        if (pull := self._active_pulls.pop(request.id, None)) is not None:
            assert self.pulls is not None
            self.pulls.cancel(pull)
            self.kept.quarantine(pull, table, holder)
        else:
            self._cancel_fetch(request)
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

        The first call returns all blocks.
        """
        return self._prefix.take_changes()

    def parent_hashes(self) -> dict[bytes, bytes]:
        return self._prefix.parent_hashes()

    def _release_blocks(self, blocks: Sequence[int], holder: int = 0) -> None:
        for block in reversed(blocks):
            self._pool.release_block(block, holder, keep_content=block in self._prefix)

    # -- prefixes from tiers and from other engines -----------------------------------------------------------------

    def is_loading(self, request: Request) -> bool:
        return request.id in self._fetches or request.id in self._active_pulls

    def keep_source_lease_alive(self, request: Request) -> None:
        """Keep renewing the lease on the blocks that a peer holds for a request that waits for admission.

        If this engine does not pull blocks from peers, remove the peer from the request instead.
        """
        if self.pulls is None:
            request.source = None
        elif request.source is not None:
            self.pulls.keep_lease_alive(request)

    def drop_unadmitted_request(self, request: Request) -> None:
        """Release the peer's lease of a request that ended before it was admitted."""
        if self.pulls is not None:
            self.pulls.drop_lease(request)

    def update_loaded_prefix(self, request: Request) -> None:
        """Mark the blocks of the request's prefix that have arrived from a tier or a peer as computed.

        Other requests may share these blocks immediately, because the step plan that is being built copies them before
        it computes anything.
        """
        if (pull := self._active_pulls.get(request.id)) is not None:
            self._take_pulled_tokens(request, pull)
            return
        self._take_fetched_blocks(request)
        if request.id in self._fetches and self._clock.now() >= self._fetches[request.id][1]:
            self._cancel_fetch(request)  # the rest is computed

    def _take_pulled_tokens(self, request: Request, pull: Pull) -> None:
        assert self.pulls is not None
        num_available, ended = self.pulls.poll_available_tokens(pull)
        if ended:
            del self._active_pulls[request.id]
            request.prefill_result, request.prefill_result_len, request.pulled = (
                pull.prefill_result,
                pull.covered_tokens,
                pull.summary,
            )
        # At least one token must be computed for its logits: the last token, or the one that the peer sampled after it.
        num_available = min(
            num_available, pull.covered_tokens, request.num_known - (request.usable_prefill_result is None)
        )
        if num_available > request.num_computed:
            self.pulls.record_hit_tokens(num_available - request.num_computed)
            request.num_computed = request.num_planned = num_available
            self.index_full_blocks(request)
        if request.prefill_result is not None:
            request.num_cached = min(request.prefill_result.cached, request.num_computed)

    def _take_fetched_blocks(self, request: Request) -> None:
        assert self.tiers is not None
        arrivals, ended = self.tiers.take_fetched(self._fetches[request.id][0])
        table = self._block_tables[request.id]
        for at, arrival in enumerate(arrivals, request.num_computed // self.block_size):
            self._prefix.insert(arrival.block_hash, self._parent_hash(request, at), table[at])
            self.tiers.record_hit(arrival.tier, self.block_size)
            self.copies.add_load(BlockCopy(table[at], arrival.block_hash, arrival.buffer))
        request.num_computed += len(arrivals) * self.block_size
        request.num_planned = request.num_cached = request.num_computed
        self._num_indexed[request.id] = request.num_computed // self.block_size
        if ended:
            del self._fetches[request.id]

    def _cancel_fetch(self, request: Request) -> None:
        if (fetch := self._fetches.pop(request.id, None)) is not None:
            assert self.tiers is not None
            self.tiers.cancel_fetch(fetch[0])

    def _load_missing_prefix(self, request: Request) -> None:
        """Start to load the part of a newly admitted request's prefix that is not in the cache.

        The blocks come from the request's peer (a pull) or from the tiers (a fetch).
        """
        if self.pulls is not None and request.source is not None:
            if (pull := self.pulls.start(request, self._block_tables[request.id])) is not None:
                self._active_pulls[request.id] = pull
                self.copies.drop(self._block_tables[request.id][request.num_cached // self.block_size :])
        elif self.tiers is not None:
            missing = self._shareable_hashes(request)[request.num_cached // self.block_size :]
            if missing and (count := self.tiers.lookup(missing)):
                deadline = self._clock.now() + self._load_timeout_s
                self._fetches[request.id] = self.tiers.start_fetch(missing[:count]), deadline

    def num_reclaimable_blocks(self, request: Request) -> int:
        """Return how many blocks would become available immediately if this request were freed."""
        if request.id in self._active_pulls:
            return 0
        return self._pool.num_exclusive_blocks(self._holders[request.id])

    def check_invariants(self) -> None:
        """Assert that the number of holders of each block is correct.

        It must equal the number of block tables that contain the block, plus how often the block is kept otherwise.
        """
        self._pool.check_invariants()
        assert (
            self._fetches.keys() <= self._block_tables.keys() and self._active_pulls.keys() <= self._block_tables.keys()
        )
        held = Counter(block for table in self._block_tables.values() for block in table) + self.kept.count_holders()
        if self._windows is not None:
            held.update(self._windows.held_blocks())
        assert all(self._pool.num_holders(block) == held[block] for block in range(self._pool.total))
        assert self._pool.num_free + self._pool.num_idle + len(held) == self._pool.total
        for name, table in self._block_tables.items():
            alone = sum(1 for block in table if self._pool.num_holders(block) == 1)
            if self._windows is not None:
                alone += sum(1 for block in self._windows.held_by(name) if self._pool.num_holders(block) == 1)
            assert self._pool.num_exclusive_blocks(self._holders[name]) == alone

    def _shareable_hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of the request's leading blocks that may be taken from a cache.

        The block of the last known token is not included, because the engine must compute that token for its logits.
        """
        if not self._can_share_blocks(request) or request.params.prompt_logprobs is not None:
            return []  # prompt logprobs need logits, which cached blocks do not have
        full = (request.num_known - 1) // self.block_size  # the last token is always computed, for its logits
        return self._block_hashes(request, full)

    def _can_share_blocks(self, request: Request) -> bool:
        """Return whether other requests may share the blocks of this request.

        Without a prefix cache, only the n choices of one request share blocks.
        """
        return self.prefix_cache or request.params.n > 1

    def _parent_hash(self, request: Request, index: int) -> bytes:
        return request.block_hashes[index - 1] if index else b""  # the first block has no parent

    def _block_hashes(self, request: Request, count: int) -> list[bytes]:
        hashes = request.block_hashes
        if len(hashes) < count:
            salt = request.salt if self.prefix_cache else f"{request.salt}/{request.submission_id}"
            parent = hashes[-1] if hashes else root_hash(self._layout, salt)
            for i in range(len(hashes), count):
                parent = block_hash(parent, request.tokens[i * self.block_size : (i + 1) * self.block_size])
                hashes.append(parent)
        return hashes[:count]
