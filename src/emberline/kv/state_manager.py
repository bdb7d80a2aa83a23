"""StateKVManager: a KVManager for models with recurrent layers, whose requests have a slot for states beside blocks.

A cached prefix can be used up to the last block for which both the blocks and a snapshot of the states exist. Snapshots
are made
- where a prompt leaves the prefix that it shares with earlier ones, so that later requests with the same system prompt
  start there,
- at the last block boundary of a prompt, for the other choices of the request and for prompts that continue it,
- at each block boundary of the output, where the newest replaces the one before, for the next turn of a chat.
"""

from __future__ import annotations

from functools import partial

from emberline.core.clock import Clock
from emberline.core.plan import StateWork, WorkItem
from emberline.core.request import Request
from emberline.kv.drafted_rows import DraftedRows
from emberline.kv.manager import KVManager
from emberline.kv.state_slots import StateSlots

MIN_SAVED_TOKENS = 64  # a snapshot within a prompt splits a step in two, which costs more than computing fewer tokens


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
    ) -> None:
        super().__init__(total_blocks, block_size, layout, prefix_cache=prefix_cache, clock=clock)
        self.states = states
        self._drafted_rows = DraftedRows()
        self._boundaries: dict[str, list[int]] = {}  # by request: where its prompt gets snapshots, the next one last

    def admit(self, request: Request, reserved_blocks: int = 0) -> bool:
        if not self.states.can_admit or not super().admit(request, reserved_blocks):
            return False
        cached = request.num_cached // self.block_size
        self.states.admit(request.id, request.block_hashes[cached - 1] if cached else None)
        self._plan_boundaries(request)
        return True

    def _plan_boundaries(self, request: Request) -> None:
        """Choose where chunks of the request's known tokens end, so that snapshots can be made there."""
        chosen: list[int] = []
        if self._can_share_blocks(request):
            full = (request.num_known - 1) // self.block_size
            shared = len(self._prefix.find_longest_prefix(self._block_hashes(request, full)))
            for boundary in (shared * self.block_size, full * self.block_size):
                if boundary - max(chosen, default=request.num_cached) >= MIN_SAVED_TOKENS:
                    chosen.append(boundary)
        self._boundaries[request.id] = chosen[::-1]
        request.chunk_end = chosen[0] if chosen else 0

    def plan_states(self, request: Request, item: WorkItem) -> StateWork:
        """Return where the states of a request are in a step. They advance over its known tokens, not over a draft."""
        num_tokens = item.start + len(item.tokens) - item.num_draft
        place, accepted = self._drafted_rows.plan_step(item)
        # Accepted drafts may pass a boundary. Otherwise the step has to end there, as not all kernels can stop within.
        saved = num_tokens // self.block_size * self.block_size if accepted else num_tokens
        slot, source, target = self.states.slot_of(request.id), self.states.take_load(request.id), None
        boundaries = self._boundaries[request.id]
        is_boundary = saved % self.block_size == 0 and saved > item.start - accepted and self._can_share_blocks(request)
        if is_boundary and not item.max_shift:  # else the position is not known yet
            in_prompt = bool(boundaries) and saved == boundaries[-1]
            if in_prompt or saved > request.submitted_len:
                # A step that is planned ahead of results computes a token that is not known yet.
                digest = self._find_digest(request, saved) if saved <= len(request.tokens) else None
                target = self.states.plan_snapshot(request.id, digest, saved, replaces=not in_prompt)
        while boundaries and boundaries[-1] <= num_tokens:
            boundaries.pop()
        request.chunk_end = boundaries[-1] if boundaries else 0
        return StateWork(slot, source, target, save_end=saved, num_accepted=accepted, draft_place=place)

    def index_full_blocks(self, request: Request) -> None:
        super().index_full_blocks(request)
        self.states.commit_snapshot(request.id, request.num_computed, partial(self._find_digest, request))

    def _find_digest(self, request: Request, num_tokens: int) -> bytes:
        return self._block_hashes(request, num_tokens // self.block_size)[-1]

    def free_request(self, request: Request) -> None:
        super().free_request(request)
        self.states.free(request.id)
        self._drafted_rows.free(request.id)
        del self._boundaries[request.id]
        request.chunk_end = 0

    def check_invariants(self) -> None:
        super().check_invariants()
        self.states.check_invariants()

    def _shareable_hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of the leading blocks that are in the cache, up to the last one with a snapshot."""
        hashes = super()._shareable_hashes(request)
        return hashes[: self.states.longest_prefix(hashes[: len(self._prefix.find_longest_prefix(hashes))])]

    def _forget_evicted_block(self, block: int) -> None:
        digest = self._prefix.hash_of(block)
        super()._forget_evicted_block(block)
        self.states.forget_prefix(digest)
