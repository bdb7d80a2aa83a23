"""KVManager: allocates blocks to requests, shares equal prefixes between them, and frees the blocks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from emberline.core.clock import Clock, SystemClock
from emberline.core.plan import Copy
from emberline.core.request import Request
from emberline.kv.pool import BlockPool
from emberline.kv.prefix import News, PrefixIndex
from emberline.kv.residency import Residency
from emberline.kv.tiers.stack import Fetch, TierStack
from emberline.tokens.blockhash import block_hash, root_hash

if TYPE_CHECKING:  # imports numpy, which would delay the start of a GPU engine
    from emberline.kv.pulls import Pull, Pulls


class KVManager:
    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        layout: str,
        *,
        prefix_cache: bool = True,
        clock: Clock | None = None,
        load_timeout: float = 5.0,
        tiers: TierStack | None = None,
        pulls: Pulls | None = None,
        on_take: Callable[[int], None] = lambda block: None,
    ) -> None:
        """Manage `total_blocks` blocks of `block_size` tokens.

        `load_timeout_s`: how long a request waits for blocks from tiers before it computes them. `on_allocate` is
        called with each block that will get new content, before anything is written to it.
        """
        assert tiers is None or prefix_cache, "tiers are only used by the prefix cache"
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.queries = 0  # tokens looked up in the prefix cache at admission
        self.hits = 0  # tokens found there
        self.tiers = tiers
        self.pulls = pulls
        self._clock = clock or SystemClock()
        self._load_timeout = load_timeout
        self._layout = layout
        self._prefix = PrefixIndex()
        self.residency = Residency(total_blocks, self._clock)
        self._pool = BlockPool(total_blocks, self._prefix.forget, self.residency, on_take)
        self._tables: dict[str, list[int]] = {}
        self._holders: dict[str, int] = {}  # holder number in the pool, by request
        self._numbers = itertools.count(1)
        self._indexed: dict[str, int] = {}  # number of leading blocks in the prefix index, by request
        self._fetches: dict[str, tuple[Fetch, float]] = {}  # running fetch from the tiers and its deadline, by request
        self._pulling: dict[str, Pull] = {}  # running pull from another engine, by request
        # Block tables of freed requests whose pull may still write to them.
        self._quarantine: list[tuple[Pull, list[int]]] = []
        self._pinned: Counter[int] = Counter()  # pins of each block that outlives its request
        # Blocks (and hashes) filled since the last plan. The next plan must save them: later plans may reuse the block.
        self._unsaved: list[tuple[int, bytes]] = []
        self._loads: list[Copy] = []  # blocks fetched from tiers since the last plan

    @property
    def total(self) -> int:
        return self._pool.total

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        return self._pool.num_idle

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def table(self, request: Request) -> Sequence[int]:
        return self._tables[request.id]

    def admit(self, request: Request, reserve: int = 0) -> bool:
        """Allocate blocks for all known tokens of a request, or return False if they and `reserve` do not fit.

        Sets the request's `computed` and `cached` to the length of the prefix it shares.
        """
        assert request.id not in self._tables
        shared = self._prefix.longest(self._shareable(request))
        if self.pulls is not None and request.source is not None:  # a pull must not write into a shared block
            grain = max(1, self.pulls.grain(request) // self.block_size)
            shared = shared[: len(shared) // grain * grain]
        known = request.known + (request.source is not None)  # the peer may send the next token with its blocks
        wanted = self.blocks_for(known) - len(shared)
        idle = sum(1 for block in shared if self._pool.holders(block) == 0)
        if wanted + reserve > self._pool.available - idle:
            return False
        holder = self._holders[request.id] = next(self._numbers)
        for block in shared:
            self._pool.hold(block, holder)
        self._tables[request.id] = shared + [self._pool.take(holder) for _ in range(wanted)]
        self._indexed[request.id] = len(shared)
        request.computed = request.planned = request.cached = len(shared) * self.block_size
        if not request.preemptions:  # after a preemption the request would hit its own blocks
            self.queries += request.known
            self.hits += request.cached
        self._find_rest(request)
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Extend the block table to `tokens` tokens; return False if the pool has too few blocks."""
        table = self._tables[request.id]
        if tokens <= len(table) * self.block_size:
            return True
        wanted = self.blocks_for(tokens) - len(table)
        if wanted > self._pool.available:
            return False
        holder = self._holders[request.id]
        table.extend(self._pool.take(holder) for _ in range(wanted))
        return True

    def commit(self, request: Request) -> None:
        """Add the blocks that are now full of computed tokens to the prefix index."""
        full, indexed = request.computed // self.block_size, self._indexed[request.id]
        if full <= indexed or not self._shares(request):
            return
        hashes, table = self._hashes(request, full), self._tables[request.id]
        for i in range(indexed, full):
            self._prefix.insert(hashes[i], self._parent(request, i), table[i])
            if self.tiers is not None:
                self._unsaved.append((table[i], hashes[i]))
        self._indexed[request.id] = full

    def free(self, request: Request) -> None:
        """Release the request's blocks, last block first, so that a prefix is evicted after what follows it."""
        table, holder = self._tables.pop(request.id), self._holders.pop(request.id)
        del self._indexed[request.id]
        if (pull := self._pulling.pop(request.id, None)) is not None:
            assert self.pulls is not None
            self.pulls.cancel(pull)
            self._quarantine.append((pull, table))
            for block in table:
                self._pool.disown(block, holder)
        else:
            self._stop_fetching(request)
            self._release(table, holder)
        self._pool.forget(holder)

    # -- cached prefixes, for the router ---------------------------------------------------------------------------

    def watch(self) -> None:
        """Start recording changes of the prefix index for `take_prefix_changes`."""
        self._prefix.watch()

    @property
    def watched(self) -> bool:
        return self._prefix.watched

    def news(self) -> News | None:
        """Return the blocks added and removed since the last call (at first all), or None if unchanged."""
        return self._prefix.news()

    def holdings(self) -> dict[bytes, bytes]:
        return self._prefix.holdings()

    # -- blocks that outlive their request --------------------------------------------------------------------------

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep blocks of a request unchanged until they have been unpinned as often."""
        self._pinned.update(blocks)
        for block in blocks:
            self._pool.hold(block)

    def unpin(self, blocks: Sequence[int]) -> None:
        assert all(self._pinned[block] for block in blocks)
        self._pinned.subtract(blocks)
        self._pinned = +self._pinned
        self._release(blocks)

    @property
    def has_pinned(self) -> bool:
        return bool(self._pinned)

    def clear_quarantine(self) -> None:
        """Release the blocks of freed requests whose pull has ended."""
        released = [table for pull, table in self._quarantine if pull.ended]
        self._quarantine = [(pull, table) for pull, table in self._quarantine if not pull.ended]
        for table in released:
            self._release(table)

    @property
    def num_quarantined(self) -> int:
        """Number of blocks of freed requests that a pull may still write to."""
        return sum(len(table) for _, table in self._quarantine)

    def _release(self, blocks: Sequence[int], holder: int = 0) -> None:
        for block in reversed(blocks):
            self._pool.release(block, holder, keep=block in self._prefix)

    # -- prefixes from tiers and from other engines -----------------------------------------------------------------

    def is_loading(self, request: Request) -> bool:
        return request.id in self._fetches or request.id in self._pulling

    def expect(self, request: Request) -> None:
        """Keep the lease on a new request's prefix at its peer alive; without pulls, ignore the peer."""
        if self.pulls is None:
            request.source = None
        elif request.source is not None:
            self.pulls.expect(request)

    def forget(self, request: Request) -> None:
        """Drop the state of a request that ended before it was admitted."""
        if self.pulls is not None:
            self.pulls.forget(request)

    def load(self, request: Request) -> None:
        """Count the blocks of the request's prefix that arrived since the last call as computed.

        Other requests may share them at once: the plan that is being made copies them before it computes anything.
        """
        if (pull := self._pulling.get(request.id)) is not None:
            self._take(request, pull)
            return
        self._loads += self._fetched(request)
        if request.id in self._fetches and self._clock.now() >= self._fetches[request.id][1]:
            self._stop_fetching(request)  # the rest is computed

    def _take(self, request: Request, pull: Pull) -> None:
        assert self.pulls is not None
        here, ended = self.pulls.take(pull)
        if ended:
            del self._pulling[request.id]
            request.note, request.note_len, request.pulled = pull.note, pull.covered, pull.told
        # At least one token must be computed for its logits: the last token, or the one that the peer sampled after it.
        here = min(here, pull.covered, request.known - (request.told is None))
        if here > request.computed:
            self.pulls.count(here - request.computed)
            request.computed = request.planned = here
            self.commit(request)
        if request.note is not None:
            request.cached = min(request.note.cached, request.computed)

    def _fetched(self, request: Request) -> list[Copy]:
        assert self.tiers is not None
        arrivals, ended = self.tiers.take(self._fetches[request.id][0])
        table, copies = self._tables[request.id], []
        for at, arrival in enumerate(arrivals, request.computed // self.block_size):
            self._prefix.insert(arrival.digest, self._parent(request, at), table[at])
            self.tiers.count(arrival.tier, self.block_size)
            copies.append(Copy(table[at], arrival.digest, arrival.buffer))
        request.computed += len(copies) * self.block_size
        request.planned = request.cached = request.computed
        self._indexed[request.id] = request.computed // self.block_size
        if ended:
            del self._fetches[request.id]
        return copies

    def _stop_fetching(self, request: Request) -> None:
        if (fetch := self._fetches.pop(request.id, None)) is not None:
            assert self.tiers is not None
            self.tiers.cancel(fetch[0])

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved)

    def saves(self) -> list[Copy]:
        """Return the copies to tiers that the next plan must make; later plans may overwrite these blocks."""
        if self.tiers is None:
            return []
        unsaved, self._unsaved = self._unsaved, []
        buffers = [(block, digest, self.tiers.reserve(digest)) for block, digest in unsaved]
        return [Copy(block, digest, buffer) for block, digest, buffer in buffers if buffer is not None]

    def loads(self) -> list[Copy]:
        """Return the copies from host buffers into blocks that the next plan must make."""
        loads, self._loads = self._loads, []
        return loads

    def copied(self, saves: Sequence[Copy], loads: Sequence[Copy]) -> None:
        """Release the buffers of a plan's copies after they have been made."""
        if self.tiers is not None:
            for copy in saves:
                self.tiers.saved(copy.digest)
            for copy in loads:
                self.tiers.loaded(copy.digest)

    def _find_rest(self, request: Request) -> None:
        """Start a pull or a fetch for the part of a newly admitted request's prefix that is not in the cache."""
        if self.pulls is not None and request.source is not None:
            if (pull := self.pulls.start(request, self._tables[request.id])) is not None:
                self._pulling[request.id] = pull
                self._part_from(self._tables[request.id][request.cached // self.block_size :])
        elif self.tiers is not None:
            missing = self._shareable(request)[request.cached // self.block_size :]
            if missing and (count := self.tiers.lookup(missing)):
                deadline = self._clock.now() + self._load_timeout
                self._fetches[request.id] = self.tiers.fetch(missing[:count]), deadline

    def _part_from(self, blocks: Sequence[int]) -> None:
        """Drop the pending copies of these blocks' earlier content: a pull writes to them while steps run."""
        dropped = set(blocks)
        self._unsaved = [unsaved for unsaved in self._unsaved if unsaved[0] not in dropped]
        self.copied((), [copy for copy in self._loads if copy.block in dropped])
        self._loads = [copy for copy in self._loads if copy.block not in dropped]

    def private_blocks(self, request: Request) -> int:
        """Return how many blocks become available at once when this request is freed."""
        if request.id in self._pulling:
            return 0
        return self._pool.num_alone(self._holders[request.id])

    def check(self) -> None:
        """Assert that each block has as many holders as block tables (quarantined ones too) and pins list it."""
        self._pool.check()
        assert self._fetches.keys() <= self._tables.keys() and self._pulling.keys() <= self._tables.keys()
        tables = [*self._tables.values(), *(table for _, table in self._quarantine)]
        held = Counter(block for table in tables for block in table) + self._pinned
        assert all(self._pool.holders(block) == held[block] for block in range(self._pool.total))
        assert self._pool.num_free + self._pool.num_idle + len(held) == self._pool.total
        for name, table in self._tables.items():
            alone = sum(1 for block in table if self._pool.holders(block) == 1)
            assert self._pool.num_alone(self._holders[name]) == alone

    def _shareable(self, request: Request) -> list[bytes]:
        """Return the hashes of the blocks that the request need not compute if they are found."""
        if not self._shares(request) or request.params.prompt_logprobs is not None:
            return []  # prompt logprobs need logits, which cached blocks do not have
        full = (request.known - 1) // self.block_size  # the last token is always computed, for its logits
        return self._hashes(request, full)

    def _shares(self, request: Request) -> bool:
        """Return whether other requests can share these blocks.

        Without a prefix cache, only the n choices of one request share blocks.
        """
        return self.prefix_cache or request.params.n > 1

    def _parent(self, request: Request, at: int) -> bytes:
        return request.hashes[at - 1] if at else b""  # the first block has no parent

    def _hashes(self, request: Request, full: int) -> list[bytes]:
        hashes = request.hashes
        if len(hashes) < full:
            salt = request.salt if self.prefix_cache else f"{request.salt}/{request.parent}"
            parent = hashes[-1] if hashes else root_hash(self._layout, salt)
            for i in range(len(hashes), full):
                parent = block_hash(parent, request.tokens[i * self.block_size : (i + 1) * self.block_size])
                hashes.append(parent)
        return hashes[:full]
