"""RankKVManagers: the KV caches of ranks that attend to different requests, behind the interface of one KVManager.

With data-parallel attention, each rank has a cache of its own, with blocks and slots for states that are numbered from
0 on every rank. A request has all its blocks on one rank, its DP rank, from its admission until it is freed. All ranks
share the tiers: a block that one rank has saved can be loaded by the others. Transfers between engines do not work with
such caches yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from emberline.core.events import BlockSample
from emberline.core.plan import BlockCopy
from emberline.core.request import Request
from emberline.kv.manager import KVManager
from emberline.kv.prefix import PrefixChanges
from emberline.kv.retained_blocks import RetainedBlocks


class RankKVManagers:
    pulls = None

    def __init__(self, managers: Sequence[KVManager]) -> None:
        """`managers`: one manager for each rank. They must have the same tiers, and no pulls."""
        self.tiers = managers[0].tiers
        assert all(manager.tiers is self.tiers and manager.pulls is None for manager in managers)
        self._managers = tuple(managers)
        self._dp_ranks: dict[str, int] = {}  # rank, by request
        self._num_requests = [0] * len(managers)  # by rank
        self._parents: dict[bytes, dict[int, bytes]] = {}  # by hash of a tracked block: hash of its parent, by rank
        self.block_size = managers[0].block_size
        self.prefix_cache = managers[0].prefix_cache
        self.has_windows = managers[0].has_windows
        self.copies = RankCopies(self._managers)
        self.retained: RetainedBlocks = managers[0].retained  # none are kept without transfers
        self.residency = RankResidency(self._managers)

    # -- requests ------------------------------------------------------------------------------------------------------

    def dp_rank_of(self, request: Request) -> int:
        """Return the rank that has the blocks of an admitted request."""
        return self._dp_ranks[request.id]

    def manager_of(self, request: Request) -> KVManager:
        return self._managers[self._dp_ranks[request.id]]

    def admit(self, request: Request, reserved_blocks: int = 0) -> bool:
        """Choose a rank for the request, allocate blocks for all its known tokens there, and return True.

        Return False if no rank has room. A rank must keep `reserved_blocks` blocks available, or one for each of its
        requests if that is less. The rank with the fewest tokens to keep or compute is tried first: the tokens of its
        requests, plus those tokens of this request that its prefix cache lacks. Of equal ranks, the one with the most
        free blocks is tried first, so that the prefix caches of all ranks are used."""
        for dp_rank in sorted(range(len(self._managers)), key=lambda dp_rank: self._rate_dp_rank(dp_rank, request)):
            if self._managers[dp_rank].admit(request, min(reserved_blocks, self._num_requests[dp_rank])):
                self._dp_ranks[request.id] = dp_rank
                self._num_requests[dp_rank] += 1
                return True
        return False

    def _rate_dp_rank(self, dp_rank: int, request: Request) -> tuple[int, int]:
        manager = self._managers[dp_rank]
        used = manager.num_blocks - manager.num_free_blocks - manager.num_cached_blocks
        tokens = used * self.block_size + request.num_known - manager.count_prefix_tokens(request)
        return tokens, -manager.num_free_blocks

    def extend_block_table(self, request: Request, num_tokens: int, reserved_blocks: int = 0) -> bool:
        dp_rank = self._dp_ranks[request.id]
        reserved = min(reserved_blocks, self._num_requests[dp_rank])
        return self._managers[dp_rank].extend_block_table(request, num_tokens, reserved)

    def free_request(self, request: Request) -> None:
        dp_rank = self._dp_ranks.pop(request.id)
        self._num_requests[dp_rank] -= 1
        self._managers[dp_rank].free_request(request)

    def block_table(self, request: Request) -> Sequence[int]:
        return self.manager_of(request).block_table(request)

    def window_tables(self, request: Request) -> Sequence[Sequence[int]]:
        return self.manager_of(request).window_tables(request)

    def index_full_blocks(self, request: Request) -> None:
        self.manager_of(request).index_full_blocks(request)

    def num_reclaimable_blocks(self, request: Request) -> int:
        return self.manager_of(request).num_reclaimable_blocks(request)

    def is_loading(self, request: Request) -> bool:
        return self.manager_of(request).is_loading(request)

    def update_loaded_prefix(self, request: Request) -> bool:
        return self.manager_of(request).update_loaded_prefix(request)

    def keep_source_lease_alive(self, request: Request) -> None:
        """Remove the peer from the request, because blocks cannot be copied from other engines."""
        request.source = None

    def drop_unadmitted_request(self, request: Request) -> None:
        """Do nothing, because without transfers a request has no lease."""

    # -- all ranks -----------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return sum(manager.num_blocks for manager in self._managers)

    @property
    def num_free_blocks(self) -> int:
        return sum(manager.num_free_blocks for manager in self._managers)

    @property
    def num_cached_blocks(self) -> int:
        return sum(manager.num_cached_blocks for manager in self._managers)

    @property
    def queried_tokens(self) -> int:
        return sum(manager.queried_tokens for manager in self._managers)

    @queried_tokens.setter
    def queried_tokens(self, count: int) -> None:
        self._managers[0].queried_tokens += count - self.queried_tokens

    @property
    def hit_tokens(self) -> int:
        return sum(manager.hit_tokens for manager in self._managers)

    @hit_tokens.setter
    def hit_tokens(self, count: int) -> None:
        self._managers[0].hit_tokens += count - self.hit_tokens

    def check_invariants(self) -> None:
        for dp_rank, manager in enumerate(self._managers):
            manager.check_invariants()
            assert self._num_requests[dp_rank] == sum(each == dp_rank for each in self._dp_ranks.values())

    # -- cached prefixes, for the router -------------------------------------------------------------------------------

    def track_prefix_changes(self) -> None:
        self._parents = {}
        for manager in self._managers:
            manager.track_prefix_changes()

    @property
    def is_tracking_prefixes(self) -> bool:
        return self._managers[0].is_tracking_prefixes

    def take_prefix_changes(self) -> PrefixChanges | None:
        """Return the prefix blocks that were added and removed since the last call, or None if nothing changed.

        A block that several ranks have is removed when the last of them has removed it."""
        changes = [(rank, found) for rank, each in enumerate(self._managers) if (found := each.take_prefix_changes())]
        if not changes:
            return None
        changed: dict[bytes, None] = {}  # in the order of the changes
        for rank, (_, stored, removed) in changes:
            for digest, parent in stored:
                self._parents.setdefault(digest, {})[rank] = parent
            for digest in removed:  # maybe added and removed since the last call
                self._parents.setdefault(digest, {}).pop(rank, None)
            changed |= dict.fromkeys([digest for digest, _ in stored] + removed)
        # A parent is marked, which makes it longer, if a rank has no states after the block.
        added = [(digest, min(parents.values(), key=len)) for digest in changed if (parents := self._parents[digest])]
        gone = [digest for digest in changed if not self._parents[digest]]
        for digest in gone:
            del self._parents[digest]
        return any(is_whole for _, (is_whole, _, _) in changes), added, gone


AnyKVManager = KVManager | RankKVManagers


class RankCopies:
    """The copies of KV blocks to and from host memory that the next step plan must make, of all ranks."""

    def __init__(self, managers: Sequence[KVManager]) -> None:
        self._by_rank = [manager.copies for manager in managers]

    @property
    def has_saves(self) -> bool:
        return any(copies.has_saves for copies in self._by_rank)

    def take_saves(self) -> list[BlockCopy]:
        """Return copies to host memory, each with its rank. If several ranks have the same block, one copy is made."""
        return [
            replace(each, dp_rank=rank) for rank, copies in enumerate(self._by_rank) for each in copies.take_saves()
        ]

    def take_loads(self) -> list[BlockCopy]:
        """Return copies from host buffers into cache blocks, each with its rank."""
        return [
            replace(each, dp_rank=rank) for rank, copies in enumerate(self._by_rank) for each in copies.take_loads()
        ]

    def finish(self, saves: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """Release the host buffers of copies that a step plan made. The copies must be complete."""
        self._by_rank[0].finish(saves, loads)  # all have the same tiers


class RankResidency:
    """The samples of all ranks' ResidencySamplers: how long blocks keep their content."""

    def __init__(self, managers: Sequence[KVManager]) -> None:
        self._managers = managers

    def take_samples(self) -> list[BlockSample]:
        """Return the samples recorded since the last call."""
        return [sample for manager in self._managers for sample in manager.residency.take_samples()]
