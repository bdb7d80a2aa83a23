"""KVManager: gives requests their blocks, shares equal prefixes between them, and takes the blocks back."""

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

if TYPE_CHECKING:  # numpy comes with it: a GPU's start does not wait for that
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
        """`load_timeout`: seconds that a request waits for tiers. `on_take`: hears of each block that is to hold
        something new, before anybody writes to it."""
        assert tiers is None or prefix_cache, "nobody would ask them for anything"
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.queries = 0  # tokens looked up at admissions
        self.hits = 0  # of these, found
        self.tiers = tiers
        self.pulls = pulls
        self._clock = clock or SystemClock()
        self._load_timeout = load_timeout
        self._layout = layout
        self._prefix = PrefixIndex()
        self.residency = Residency(total_blocks, self._clock)
        self._pool = BlockPool(total_blocks, self._prefix.forget, self.residency, on_take)
        self._tables: dict[str, list[int]] = {}
        self._holders: dict[str, int] = {}  # by request, its number in the pool
        self._numbers = itertools.count(1)
        self._indexed: dict[str, int] = {}  # how many of a request's leading blocks are in the index
        self._fetches: dict[str, tuple[Fetch, float]] = {}  # prefixes on their way from a lower tier, and until when
        self._pulling: dict[str, Pull] = {}  # prefixes on their way from another engine
        self._quarantine: list[tuple[Pull, list[int]]] = []  # tables whose request is gone, but not who writes there
        self._pinned: Counter[int] = Counter()  # blocks that others may read, how often
        self._unsaved: list[tuple[int, bytes]] = []  # blocks filled since the last plan; it is the last that has them
        self._loads: list[Copy] = []  # what has come since

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
        """Blocks for all that is known of a request, or nothing. Sets `computed` and `cached` to the shared prefix."""
        assert request.id not in self._tables
        shared = self._prefix.longest(self._shareable(request))
        if self.pulls is not None and request.source is not None:  # nothing is pulled into blocks that others share
            grain = max(1, self.pulls.grain(request) // self.block_size)
            shared = shared[: len(shared) // grain * grain]
        known = request.known + (request.source is not None)  # its blocks may come with a token
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
        if not request.preemptions:  # later, its own blocks are found again
            self.queries += request.known
            self.hits += request.cached
        self._find_rest(request)
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Makes room for the request's first `tokens` tokens, if the pool has it."""
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
        """Blocks that are now full of computed tokens become known to others."""
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
        """Takes the request's blocks back; last block first, so that prefixes outlive what follows them."""
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

    # -- what it holds, for others to know -------------------------------------------------------------------------

    def watch(self) -> None:
        """From now on there is news."""
        self._prefix.watch()

    @property
    def watched(self) -> bool:
        return self._prefix.watched

    def news(self) -> News | None:
        """Of blocks that can be shared, since the last time; at first all there are. None: there is none."""
        return self._prefix.news()

    def holdings(self) -> dict[bytes, bytes]:
        return self._prefix.holdings()

    # -- blocks that outlive their request --------------------------------------------------------------------------

    def pin(self, blocks: Sequence[int]) -> None:
        """Holds blocks of a request as they are, until they are unpinned as often."""
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
        """Takes blocks back to which nobody writes any more."""
        over = [table for pull, table in self._quarantine if pull.ended]
        self._quarantine = [(pull, table) for pull, table in self._quarantine if not pull.ended]
        for table in over:
            self._release(table)

    @property
    def num_quarantined(self) -> int:
        """Blocks that are nobody's yet."""
        return sum(len(table) for _, table in self._quarantine)

    def _release(self, blocks: Sequence[int], holder: int = 0) -> None:
        for block in reversed(blocks):
            self._pool.release(block, holder, keep=block in self._prefix)

    # -- prefixes from elsewhere ------------------------------------------------------------------------------------

    def is_loading(self, request: Request) -> bool:
        return request.id in self._fetches or request.id in self._pulling

    def expect(self, request: Request) -> None:
        """A new request: whoever has its prefix is to keep it."""
        if self.pulls is None:
            request.source = None
        elif request.source is not None:
            self.pulls.expect(request)

    def forget(self, request: Request) -> None:
        """One that has ended without ever having been admitted."""
        if self.pulls is not None:
            self.pulls.forget(request)

    def load(self, request: Request) -> None:
        """What has come of its prefix since the last time. It counts as computed at once, for others too: what has not
        been copied yet will be by the plan that is being made, before any work."""
        if (pull := self._pulling.get(request.id)) is not None:
            self._take(request, pull)
            return
        self._loads += self._fetched(request)
        if request.id in self._fetches and self._clock.now() >= self._fetches[request.id][1]:
            self._stop_fetching(request)  # whatever has not come yet is computed

    def _take(self, request: Request, pull: Pull) -> None:
        assert self.pulls is not None
        here, ended = self.pulls.take(pull)
        if ended:
            del self._pulling[request.id]
            request.note, request.note_len, request.pulled = pull.note, pull.covered, pull.told
        # Something is left to compute, for its logits: the last token, or the one that is known to come after it.
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
        """For the next plan, whatever else it does: later, these blocks may hold something else."""
        if self.tiers is None:
            return []
        unsaved, self._unsaved = self._unsaved, []
        buffers = [(block, digest, self.tiers.reserve(digest)) for block, digest in unsaved]
        return [Copy(block, digest, buffer) for block, digest, buffer in buffers if buffer is not None]

    def loads(self) -> list[Copy]:
        """For the next plan too."""
        loads, self._loads = self._loads, []
        return loads

    def copied(self, saves: Sequence[Copy], loads: Sequence[Copy]) -> None:
        """A plan's copies have been made."""
        if self.tiers is not None:
            for copy in saves:
                self.tiers.saved(copy.digest)
            for copy in loads:
                self.tiers.loaded(copy.digest)

    def _find_rest(self, request: Request) -> None:
        """Of a request that was just admitted: what the cache does not have may be elsewhere."""
        if self.pulls is not None and request.source is not None:
            if (pull := self.pulls.start(request, self._tables[request.id])) is not None:
                self._pulling[request.id] = pull
                self._part_from(self._tables[request.id][request.cached // self.block_size :])
        elif self.tiers is not None:
            missing = self._shareable(request)[request.cached // self.block_size :]
            if missing and (count := self.tiers.lookup(missing)):
                until = self._clock.now() + self._load_timeout
                self._fetches[request.id] = self.tiers.fetch(missing[:count]), until

    def _part_from(self, blocks: Sequence[int]) -> None:
        """They are written to beside the steps now: who had them before has no copies to make in the next plan."""
        theirs = set(blocks)
        self._unsaved = [unsaved for unsaved in self._unsaved if unsaved[0] not in theirs]
        self.copied((), [copy for copy in self._loads if copy.block in theirs])
        self._loads = [copy for copy in self._loads if copy.block not in theirs]

    def private_blocks(self, request: Request) -> int:
        """How many blocks freeing this request would give back at once."""
        if request.id in self._pulling:
            return 0
        return self._pool.num_alone(self._holders[request.id])

    def check(self) -> None:
        """Conservation: every block is free, idle or used, and held exactly as often as tables, those in quarantine
        too, and pins list it."""
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
        """Of its blocks, those that need not be computed if they are found."""
        if not self._shares(request) or request.params.prompt_logprobs is not None:
            return []  # and what comes from the cache has no logits
        full = (request.known - 1) // self.block_size  # the last token is always computed: it has the logits
        return self._hashes(request, full)

    def _shares(self, request: Request) -> bool:
        """Whether anybody can want the same blocks: without a prefix cache, the n completions of one submission."""
        return self.prefix_cache or request.params.n > 1

    def _parent(self, request: Request, at: int) -> bytes:
        return request.hashes[at - 1] if at else b""  # before the first there is nothing to be held

    def _hashes(self, request: Request, full: int) -> list[bytes]:
        hashes = request.hashes
        if len(hashes) < full:
            salt = request.salt if self.prefix_cache else f"{request.salt}/{request.parent}"
            parent = hashes[-1] if hashes else root_hash(self._layout, salt)
            for i in range(len(hashes), full):
                parent = block_hash(parent, request.tokens[i * self.block_size : (i + 1) * self.block_size])
                hashes.append(parent)
        return hashes[:full]
