"""TierLoads: the loads of requests' prefixes from tiers (host memory, disk, store) into blocks of the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emberline.core.clock import Clock
from emberline.core.plan import STATE_GROUP
from emberline.core.request import Request
from emberline.kv.state_pages import StatePages
from emberline.kv.tiers.stack import FetchedBlock, TierFetch, TierStack
from emberline.kv.window_tables import WindowTables
from emberline.tokens.blockhash import group_block_hash, state_page_hash

# A group of layers, and an index in the group's block table. The group STATE_GROUP - i stands for page i of the states
# after the block at this index.
BlockTablePosition = tuple[int, int]


@dataclass(slots=True)
class TierLoad:
    fetch: TierFetch
    positions: Sequence[BlockTablePosition]  # of the blocks, in the order of the fetch
    prefix_blocks: int  # leading blocks that count as computed when all blocks have arrived
    deadline: float
    num_arrived: int = 0

    @property
    def num_missing(self) -> int:
        return len(self.positions) - self.num_arrived


class TierLoads:
    def __init__(self, tiers: TierStack, block_size: int, clock: Clock, timeout_s: float) -> None:
        """A load that takes longer than `timeout_s` is cancelled, and the missing blocks are computed."""
        self._tiers = tiers
        self._block_size = block_size
        self._clock = clock
        self._timeout_s = timeout_s
        self._loads: dict[str, TierLoad] = {}  # by request
        # Last lookup of `count_available_in_windows`: its inputs except the tiers, its result, whether it was reused.
        self._last_lookup: tuple[tuple[object, ...], int, bool] = (), 0, False

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def count_available(self, request: Request, hashes: Sequence[bytes], num_cached: int) -> int:
        """Return how many leading blocks of a prefix are cached or worth loading. The first `num_cached` are cached."""
        limit = len(hashes)
        if request.load_limit is not None:
            blocks, deadline = request.load_limit
            limit = min(limit, blocks) if self._clock.now() < deadline else 0
        return min(limit, num_cached + self._tiers.lookup(hashes[num_cached:limit]))

    def count_available_in_windows(
        self, request: Request, hashes: Sequence[bytes], num_shared: int, cached: int, windows: WindowTables
    ) -> int:
        """Return how many leading blocks of a prefix a request can use once the blocks worth loading are loaded.

        For that, each group of layers needs the blocks within its window. `num_shared`: blocks that the first group has
        in the cache. `cached`: leading blocks that can be used without loading. For a request that waits for memory,
        this is called in every step, so the tiers are asked again only if these numbers have changed."""
        limit = request.load_limit
        is_late = limit is not None and self._clock.now() >= limit[1]
        key = request.id, len(hashes), num_shared, cached, limit, is_late
        if is_reused := self._last_lookup[0] == key:
            count = self._last_lookup[1]
        else:
            available = self.count_available(request, hashes, num_shared)
            count = max(cached, windows.longest_prefix(hashes[:available], self.is_stored))
        self._last_lookup = key, count, is_reused
        return count

    def drop_reused_lookup(self) -> bool:
        """Forget the last result of `count_available_in_windows`, so that the next call asks the tiers again.

        Return whether the last call returned the result of an earlier one, without asking the tiers."""
        is_reused = self._last_lookup[2]
        self._last_lookup = (), 0, False
        return is_reused

    def is_stored(self, block_hash: bytes) -> bool:
        return self._tiers.lookup([block_hash]) > 0

    def has_snapshot(self, digest: bytes, pages: StatePages, *, guess: bool) -> bool:
        """Return whether all pages of a snapshot are worth loading or, without `guess`, certainly held by tiers."""
        if not self._tiers.lookup([state_page_hash(digest, 0)], guess=guess):  # the usual case, and much cheaper
            return False
        return self._tiers.lookup(pages.hashes(digest), guess=guess) == pages.per_slot

    def start(
        self, request: Request, hashes: Sequence[bytes], positions: Sequence[BlockTablePosition], prefix_blocks: int
    ) -> None:
        """Start to load blocks from tiers into the blocks of a request.

        `positions`: group of layers and index of each block to load. `hashes`: the hashes of the request's leading
        blocks, from which the hashes in other groups and of pages of states are computed. `prefix_blocks`: leading
        blocks that count as computed when all blocks have arrived."""
        limit = request.load_limit
        deadline = self._clock.now() + self._timeout_s if limit is None else limit[1]
        fetch = self._tiers.start_fetch([_hash_at(hashes, position) for position in positions])
        self._loads[request.id] = TierLoad(fetch, positions, prefix_blocks, deadline)

    def take_arrivals(self, request: Request) -> tuple[TierLoad, list[tuple[BlockTablePosition, FetchedBlock]]]:
        """Return the request's load, and the blocks that arrived since the last call, each with its position.

        A load that has ended, or whose deadline has passed, is removed."""
        load = self._loads[request.id]
        arrivals, ended = self._tiers.take_fetched(load.fetch)
        arrived = list(zip(load.positions[load.num_arrived :], arrivals, strict=False))
        load.num_arrived += len(arrivals)
        for (group, _), arrival in arrived:
            self._tiers.record_hit(arrival.tier, 0 if group else self._block_size)
        if ended:
            del self._loads[request.id]
        elif self._clock.now() >= load.deadline:
            self.cancel(request)
        return load, arrived

    def cancel(self, request: Request) -> None:
        """Cancel the load of a request, if it has one."""
        if (load := self._loads.pop(request.id, None)) is not None:
            self._tiers.cancel_fetch(load.fetch)

    def request_ids(self) -> set[str]:
        return set(self._loads)


def _hash_at(hashes: Sequence[bytes], position: BlockTablePosition) -> bytes:
    group, index = position
    if group <= STATE_GROUP:
        return state_page_hash(hashes[index], STATE_GROUP - group)
    return group_block_hash(hashes[index], group)
