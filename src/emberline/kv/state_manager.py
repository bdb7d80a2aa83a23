"""StateKVManager: a KVManager for models with recurrent layers, whose requests have a slot for states beside blocks.

A cached prefix can be used up to the last block for which both the blocks and a snapshot of the states exist. Snapshots
are made
- where a prompt leaves the prefix that it shares with earlier ones, so that later requests with the same system prompt
  start there,
- at the last block boundary of a prompt, for the other choices of the request and for prompts that continue it,
- at each block boundary of the output, where the newest replaces the one before, for the next turn of a chat.

Tiers keep the pages of snapshots (StatePages) that no later one replaces. A prefix is loaded from them only up to a
block whose snapshot is in a slot or in a tier. Another engine gets the states at the last block boundary before the end
of the prompt, in blocks that follow those of the prompt in its ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from emberline.core.clock import Clock
from emberline.core.plan import STATE_GROUP, StateWork, WorkItem
from emberline.core.request import Request
from emberline.kv.drafted_rows import DraftedRows
from emberline.kv.manager import KVManager
from emberline.kv.prefix import PrefixChanges
from emberline.kv.state_pages import StatePages
from emberline.kv.state_slots import StateSlots
from emberline.kv.tiers.stack import TierStack
from emberline.tokens.blockhash import mark_without_states

if TYPE_CHECKING:  # imports numpy, which would delay the start of a GPU engine
    from emberline.kv.pulls import PullManager

MIN_SAVED_TOKENS = 64  # a snapshot within a prompt splits a step in two, which costs more than computing fewer tokens
# Number of block boundaries at the end of a prompt at which a tier is asked for a snapshot that it may not have. Each
# costs a call over the network. Snapshots that a tier surely has are found at all other boundaries too.
MAX_GUESSED_BOUNDARIES = 8


class StateKVManager(KVManager):
    def __init__(
        self,
        states: StateSlots,
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
        pages_per_slot: int = 0,
    ) -> None:
        """`pages_per_slot`: number of blocks that the states of a slot fill. It is needed for `tiers` and `pulls`."""
        assert pages_per_slot or (tiers is None and pulls is None), "the runner cannot copy states to blocks"
        super().__init__(
            total_blocks,
            block_size,
            layout,
            prefix_cache=prefix_cache,
            clock=clock,
            load_timeout_s=load_timeout_s,
            tiers=tiers,
            pulls=pulls,
            on_allocate=on_allocate,
        )
        self._needs_whole_prefix = True
        self.states = states
        self._drafted_rows = DraftedRows()
        self._pages = StatePages(total_blocks, pages_per_slot)
        if tiers is not None:
            states.on_keep = self._save_snapshot
        self._boundaries: dict[str, list[int]] = {}  # by request: where its prompt gets snapshots, the next one last
        # A search for a snapshot in tiers (hash of the whole prefix, cached and available blocks), and what it found.
        self._last_search: tuple[tuple[bytes, int, int] | None, int] = (None, 0)
        # By request: blocks that receive states from another engine, and blocks with states for other engines.
        self._arriving: dict[str, list[int]] = {}
        self._leaving: dict[str, list[int]] = {}
        self._blocks_with_states: set[int] = set()  # blocks that had states, and no keys and values since

    def admit(self, request: Request, reserved_blocks: int = 0) -> bool:
        if not self.states.can_admit or not super().admit(request, reserved_blocks):
            return False
        self._plan_boundaries(request)
        return True

    def _plan_boundaries(self, request: Request) -> None:
        """Choose where chunks of the request's known tokens end, so that snapshots can be made there."""
        chosen: list[int] = []
        if self._can_share_blocks(request):
            full = (request.num_known - 1) // self.block_size
            shared = len(self._prefix.find_longest_prefix(self._block_hashes(request, full)))
            for boundary in (shared * self.block_size, full * self.block_size):
                if boundary - max(chosen, default=request.num_computed) >= MIN_SAVED_TOKENS:
                    chosen.append(boundary)
        if request.id in self._leaving and (boundary := self._handoff_blocks(request) * self.block_size) not in chosen:
            chosen = sorted([*chosen, boundary])
        self._boundaries[request.id] = [boundary for boundary in chosen[::-1] if boundary > request.num_computed]
        request.chunk_end = self._boundaries[request.id][-1] if self._boundaries[request.id] else 0

    def plan_states(self, request: Request, item: WorkItem) -> StateWork:
        """Return the slots that a step reads and writes for a request with states.

        The states advance over the known tokens of the step, not over a draft."""
        num_tokens = item.start + len(item.tokens) - item.num_draft
        draft_slot, accepted = self._drafted_rows.plan_step(item)
        # Accepted drafts may pass a boundary. Otherwise the step has to end there, as not all kernels can stop within.
        saved, known_end = num_tokens // self.block_size * self.block_size if accepted else num_tokens, None
        if item.max_shift:  # a step that is planned ahead may reach the next boundary, and then it makes the snapshot
            saved, known_end = (item.start // self.block_size + 1) * self.block_size, partial(_known_end, item)
        slot, source, target = self.states.slot_of(request.id), self.states.take_load(request.id), None
        boundaries = self._boundaries[request.id]
        is_boundary = saved % self.block_size == 0 and item.start - accepted < saved <= num_tokens + item.max_shift
        if is_boundary and self._can_share_blocks(request):
            in_prompt = bool(boundaries) and saved == boundaries[-1]
            if in_prompt or saved > request.submitted_len:
                # A step that is planned ahead of results computes a token that is not known yet.
                digest = self._find_digest(request, saved) if saved <= len(request.tokens) else None
                target = self.states.plan_snapshot(
                    request.id, digest, saved, replaces=not in_prompt, known_end=known_end
                )
        while boundaries and boundaries[-1] <= num_tokens:
            boundaries.pop()
        request.chunk_end = boundaries[-1] if boundaries else 0
        return StateWork(slot, source, target, save_end=saved, num_accepted=accepted, draft_slot=draft_slot)

    def plan_moves(self, request: Request, start: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the blocks from which a step at position `start` loads states, and those to which it copies states.

        The request's peer has sent the states that are loaded. The copies are for other engines."""
        if arrived := self._arriving.pop(request.id, ()):
            self.retained.unpin(arrived)  # only plans after this one can overwrite them
        leaving = self._leaving.get(request.id, ())
        return arrived, leaving if start == self._handoff_blocks(request) * self.block_size else ()

    def take_cleared_blocks(self, request: Request, start: int) -> Sequence[int]:
        """Return the request's blocks from position `start` on that held states before and must be filled with zeros.

        Earlier blocks need no zeros, because they were loaded or pulled as a whole. From now on, all blocks of the
        request count as blocks of keys and values."""
        if not self._blocks_with_states:
            return ()
        table, first = self._block_tables[request.id], start // self.block_size
        cleared = [block for block in table[first:] if block in self._blocks_with_states]
        self._blocks_with_states.difference_update(table)
        return cleared

    def _allocate_for_states(self) -> list[int]:
        blocks = self.retained.allocate(self._pages.per_slot)
        self._blocks_with_states.update(blocks)
        return blocks

    def index_full_blocks(self, request: Request) -> None:
        super().index_full_blocks(request)
        self.states.commit_snapshot(request.id, request.num_computed, partial(self._find_digest, request))

    def _find_digest(self, request: Request, num_tokens: int) -> bytes:
        return self._block_hashes(request, num_tokens // self.block_size)[-1]

    def free_request(self, request: Request) -> None:
        pull = self._active_pulls.get(request.id)
        super().free_request(request)
        self.states.free(request.id)
        self._drafted_rows.free(request.id)
        arriving = self._arriving.pop(request.id, [])
        if pull is None:
            self.retained.unpin(arriving)
        else:
            self.retained.unpin_after(pull, arriving)
        self.retained.unpin(self._leaving.pop(request.id, []))
        self._boundaries.pop(request.id, None)
        request.chunk_end = 0

    def check_invariants(self) -> None:
        super().check_invariants()
        self.states.check_invariants()
        assert self._arriving.keys() | self._leaving.keys() <= self._block_tables.keys()

    def _shareable_hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of the leading blocks that the request need not compute.

        The states after the last of these blocks exist: as a snapshot in a slot or in a tier, or at the request's peer,
        which sends them. A block in which the last known token lies is never included."""
        hashes = super()._shareable_hashes(request)
        num_cached = len(self._prefix.find_longest_prefix(hashes))
        usable = self.states.longest_prefix(hashes[:num_cached])
        if self.pulls is not None and request.source is not None:
            usable = max(usable, self._num_pulled_blocks(request))
        elif self._tier_loads is not None:
            available = self._tier_loads.count_available(request, hashes, num_cached)
            search = hashes[-1] if hashes else b"", usable, available
            if self._last_search[0] != search:  # a waiting request is tried in every step, and a search takes long
                self._last_search = search, self._find_stored_snapshot(hashes, usable, available)
            usable = self._last_search[1]
        return hashes[:usable]

    def _forget_evicted_block(self, block: int) -> None:
        digest = self._prefix.hash_of(block)
        super()._forget_evicted_block(block)
        self.states.forget_prefix(digest)

    # -- cached prefixes, for the router ---------------------------------------------------------------------------

    def track_prefix_changes(self) -> None:
        super().track_prefix_changes()
        self.states.track_changes()

    def take_prefix_changes(self) -> PrefixChanges | None:
        """Return the prefix blocks that were added and removed since the last call, or None if nothing changed.

        Blocks without a snapshot are marked (`mark_without_states`). A block whose snapshot was made or dropped is
        listed as added again."""
        changed = {digest: self._prefix.parent_of(digest) for digest in self.states.take_changes()}
        is_whole, stored, removed = super().take_prefix_changes() or (False, [], [])
        if not is_whole:
            changed.update(stored)
            stored = [(digest, parent) for digest, parent in changed.items() if parent is not None]
        if not (is_whole or stored or removed):
            return None
        has_states = self.states.has_snapshot
        return is_whole, [(h, p if has_states(h) else mark_without_states(p)) for h, p in stored], removed

    # -- tiers ---------------------------------------------------------------------------------------------------------

    def _save_snapshot(self, digest: bytes, slot: int) -> None:
        pages = zip(self._pages.page_numbers(slot), self._pages.hashes(digest), strict=True)
        self.copies.add_saves((page, page_hash, 0) for page, page_hash in pages)

    def _find_stored_snapshot(self, hashes: Sequence[bytes], cached: int, available: int) -> int:
        """Return how many leading blocks, up to one with a snapshot, a request can use after a load from tiers.

        The first `available` blocks are in the cache or in tiers, and the first `cached` can be used without a load.
        Return `cached` if no load is possible, or if it would save too little."""
        assert self._tier_loads is not None
        for count in range(available, cached, -1):
            if (count - cached) * self.block_size < MIN_SAVED_TOKENS:
                break
            digest, guess = hashes[count - 1], count > len(hashes) - MAX_GUESSED_BOUNDARIES
            if self.states.has_snapshot(digest) or self._tier_loads.has_snapshot(digest, self._pages, guess=guess):
                return count
        return cached

    def _load_missing_prefix(self, request: Request, hashes: Sequence[bytes], num_shared: int, num_wanted: int) -> None:
        cached, wanted = self.states.longest_prefix(hashes[:num_shared]), len(hashes)
        request.num_computed = request.num_planned = request.num_cached = cached * self.block_size
        if request.publish and self._num_moving_blocks(request):
            self._leaving[request.id] = self._allocate_for_states()
        if self.pulls is not None and request.source is not None:
            is_pulling = self._start_pull(request, num_shared)
            self.states.admit(request.id, hashes[cached - 1] if cached and not is_pulling else None)
        elif wanted == cached:
            self.states.admit(request.id, hashes[cached - 1] if cached else None)
        else:
            assert self._tier_loads is not None
            in_slot = self.states.has_snapshot(hashes[-1])
            self.states.admit(request.id, hashes[-1] if in_slot else None)
            positions = [(0, index) for index in range(num_shared, wanted)]
            if not in_slot:  # the states first: without them, the blocks need not be loaded
                self.states.begin_load(request.id, hashes[-1])
                positions[:0] = [(STATE_GROUP - page, wanted - 1) for page in range(self._pages.per_slot)]
            self._tier_loads.start(request, hashes, positions, wanted)

    def _index_loaded_block(self, request: Request, group: int, index: int) -> int:
        if group <= STATE_GROUP:
            return self._pages.page_numbers(self.states.loading_slot(request.id))[STATE_GROUP - group]
        return super()._index_loaded_block(request, group, index)

    def update_loaded_prefix(self, request: Request) -> bool:
        if not super().update_loaded_prefix(request):
            return False
        if not self.is_loading(request):
            self.states.commit_load(request.id)
            self._plan_boundaries(request)
        return True

    # -- other engines -------------------------------------------------------------------------------------------------

    def _handoff_blocks(self, request: Request) -> int:
        """Return the number of leading blocks after which the request's states are sent to other engines.

        At least one submitted token follows these blocks, so that its logits can be computed from the states."""
        return (request.submitted_len - 1) // self.block_size

    def _num_pulled_blocks(self, request: Request) -> int:
        """Return how many blocks the request's peer sends; 0 if there is no room for the states that follow them."""
        assert self.pulls is not None
        return (self.pulls.covered_tokens(request) - 1) // self.block_size if self._num_moving_blocks(request) else 0

    def _num_moving_blocks(self, request: Request) -> int:
        """Return how many blocks the request needs for states that its peer sends or that other engines will read.

        Return 0 if the cache is too small for these blocks and the request's own blocks together."""
        is_published = request.publish and self._handoff_blocks(request) > 0
        moves = (self.pulls is not None and request.source is not None) + is_published
        needed = moves * self._pages.per_slot
        return needed if needed + self.num_blocks_for(request.num_known + 1) <= self.num_blocks else 0

    def _start_pull(self, request: Request, num_shared: int) -> bool:
        """Start to copy missing blocks and the states from the request's peer, if it has more blocks than the cache.

        Return False if nothing is copied."""
        assert self.pulls is not None
        pulled = self._num_pulled_blocks(request)
        if pulled * self.block_size <= request.num_cached:
            self.pulls.drop_lease(request)
            request.source = None
            return False
        first, arriving = min(num_shared, pulled), self._allocate_for_states()
        targets = self._block_tables[request.id][:pulled] + arriving
        if (pull := self.pulls.start(request, targets, (first, pulled * self.block_size))) is None:
            self.retained.unpin(arriving)
            return False
        self._active_pulls[request.id], self._arriving[request.id] = pull, arriving
        self.copies.drop(targets[first:])
        return True

    def publishable_blocks(self, request: Request, first_index: int) -> list[int]:
        """Return the computed blocks from `first_index` on that other engines need: of the prompt, then of states."""
        last = self._handoff_blocks(request)
        blocks = self._block_tables[request.id][first_index : min(last, request.num_computed // self.block_size)]
        if first_index <= last and request.num_computed > last * self.block_size:
            blocks += self._leaving.get(request.id, [])
        return blocks


def _known_end(item: WorkItem) -> tuple[int, bool]:
    """Return the position that the states reach in the step of a work item, and whether it is final.

    If it is not final, the states may reach a later position, because a running step may accept drafted tokens."""
    return item.start + len(item.tokens) - item.num_draft, not item.max_shift
