"""KVIndex: which workers hold the KV blocks of a prompt, according to the workers' KV events.

The index is used for workers whose batches of events it has received without a gap. For all other workers, the router
infers the cached prompts from the requests that it has sent to them (`router/prefixmap.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from emberline.core.blockbatch import BlockBatch
from emberline.router.kvfeed import WorkerKVBlocks
from emberline.router.prefix_block_map import BlockPosition, PrefixBlockMap
from emberline.router.prefixmap import PromptPrefix


class KVIndexState(Enum):
    EXACT = "exact"  # every batch of the worker was applied
    DEGRADED = "degraded"  # a batch is missing, or the connection is down
    FALLBACK = "fallback"  # the worker sends no batches, or more blocks than the index can hold


class KVIndex:
    def __init__(self, max_blocks: int, max_prefixes: int) -> None:
        """`max_blocks` limits the blocks in the index, summed over all workers.

        If the events that a worker reports would exceed this limit, the worker is removed from the index."""
        self._max_blocks = max_blocks
        self._feeds: dict[str, WorkerKVBlocks] = {}
        self._too_large: set[str] = set()
        self.prefix_blocks = PrefixBlockMap(max_prefixes)

    def __len__(self) -> int:
        return sum(len(feed.held_blocks) for feed in self._feeds.values())

    def state(self, worker_id: str) -> KVIndexState:
        feed = self._feeds.get(worker_id)
        if feed is None:
            return KVIndexState.FALLBACK
        return KVIndexState.EXACT if feed.is_exact else KVIndexState.DEGRADED

    def count_blocks(self, worker_id: str) -> int:
        """Return the number of KV blocks that the worker holds, or 0 if the index is not exact for this worker."""
        feed = self._feeds.get(worker_id)
        return len(feed.held_blocks) if feed is not None and feed.is_exact else 0

    def build_status_fields(self, worker_id: str) -> dict[str, Any]:
        return {
            "kv_index": self.state(worker_id).value,
            "kv_blocks": self.count_blocks(worker_id),
            "kv_seq": self.last_applied_batch(worker_id)[1],
        }

    def parent_by_held_block(self, worker_id: str) -> dict[bytes, bytes]:
        feed = self._feeds.get(worker_id)
        return feed.held_blocks if feed is not None else {}

    def last_applied_batch(self, worker_id: str) -> tuple[str, int]:
        """Return the incarnation (id of one run) of the worker's engine, and the number of its last applied batch.

        Return ("", 0) if the worker has to send a snapshot of all its blocks first."""
        feed = self._feeds.get(worker_id)
        return (feed.incarnation, feed.seq) if feed is not None and feed.is_complete else ("", 0)

    def apply_batch(self, worker_id: str, batch: BlockBatch) -> KVIndexState:
        if worker_id not in self._too_large:
            self._feeds.setdefault(worker_id, WorkerKVBlocks()).apply_batch(batch)
            if len(self) > self._max_blocks:
                del self._feeds[worker_id]
                self._too_large.add(worker_id)
        return self.state(worker_id)

    def has_capacity_for(self, worker_id: str) -> bool:
        """Whether the worker's blocks fit in the index. If they do not, the worker was removed from it."""
        return worker_id not in self._too_large

    def mark_disconnected(self, worker_id: str) -> None:
        """Record that the connection on which the worker sends its KV events is down."""
        if (feed := self._feeds.get(worker_id)) is not None:
            feed.mark_disconnected()

    def remove_worker(self, worker_id: str) -> None:
        self._feeds.pop(worker_id, None)
        self._too_large.discard(worker_id)

    def record_prompt_end(self, prefixes: Sequence[PromptPrefix], last_block: BlockPosition) -> None:
        """Record the last KV block of a prompt, as the worker that computed the prompt has reported it."""
        if prefixes:
            self.prefix_blocks.record_prefix(prefixes[-1], last_block)

    def record_cached_prompt(self, worker_id: str, prefixes: Sequence[PromptPrefix], last_block: BlockPosition) -> None:
        """Record in which KV block each prefix of a prompt ends.

        Nothing is recorded if the worker does not hold the prompt's last block."""
        held = self.parent_by_held_block(worker_id)
        if prefixes and last_block.digest in held:
            size = prefixes[-1].length
            self.prefix_blocks.record_prefixes_of_prompt(
                prefixes, size, last_block, lambda digest: held.get(digest) or self._parent_block_of(digest)
            )

    def cached_bytes_by_worker(
        self, prefixes: Sequence[PromptPrefix], inferred_bytes_by_worker: Mapping[str, int]
    ) -> dict[str, int]:
        """Return how many bytes of this prompt each worker has cached, by worker id, the largest number first.

        `inferred_bytes_by_worker` has the same form, but is inferred from earlier requests (`router/prefixmap.py`). It
        is used for workers that are not indexed exactly, and for prefixes whose last block no worker has reported yet.
        """
        positions = [
            (point.length, position)
            for point in reversed(prefixes)
            if (position := self.prefix_blocks.get(point)) is not None
        ]
        lengths = {length for length, _ in positions}
        cached_bytes: dict[str, int] = {}
        for worker, feed in self._feeds.items():
            if feed.is_exact:
                cached_bytes[worker] = next(
                    (
                        length * usable // position.block_count
                        for length, position in positions
                        if (usable := feed.count_usable_blocks(position))
                    ),
                    0,
                )
        for worker, length in inferred_bytes_by_worker.items():
            if worker not in cached_bytes or length not in lengths:
                cached_bytes[worker] = max(cached_bytes.get(worker, 0), length)
        order = {worker: i for i, worker in enumerate(inferred_bytes_by_worker)}
        ranked = sorted(cached_bytes.items(), key=lambda item: (-item[1], order.get(item[0], len(order))))
        return {worker: length for worker, length in ranked if length}

    def _parent_block_of(self, block_hash: bytes) -> bytes | None:
        return next(
            (feed.held_blocks[block_hash] for feed in self._feeds.values() if block_hash in feed.held_blocks), None
        )
