"""Region: the blocks of a KV cache, in host or GPU memory, with the operations that transfers need.

Each block has a generation number. The owner of the cache calls `bump_generation` before it writes new content to a
block. If a reader sees the same generation before and after its copy, the content did not change during the copy.

On the wire, a piece is ordered by layer, then keys before values, then by block, each in the sender's layout. In host
memory, large or adjacent blocks are sent and received in place. Small scattered blocks are copied through a staging
buffer, which is faster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.piece import TransferPiece

BlockIds = NDArray[np.int64]
Generations = NDArray[np.uint64]
BufferLike = bytes | bytearray | memoryview  # or another object that memoryview accepts
MIN_IN_PLACE_BYTES = 32 << 10  # average contiguous bytes from which a piece is sent in place


class Region(ABC):
    def __init__(self, layout: KVLayout, num_blocks: int, generations: Generations | None = None) -> None:
        """Create a region. `generations` is an array in shared memory, if other processes need to read it."""
        self.layout = layout
        self.blocks = num_blocks
        self.generations = np.zeros(num_blocks, np.uint64) if generations is None else generations
        assert len(self.generations) == num_blocks

    def bump_generation(self, block: int, group: int = 0) -> None:
        """Increase the generation number of a block, because it is about to get new content.

        `group`: the number of the group of layers that the content belongs to.
        """
        self.generations[block] += 1

    def current_generations(self, blocks: BlockIds) -> Generations:
        return self.generations[blocks]

    def is_unchanged(self, blocks: BlockIds, generations: Generations) -> bool:
        """Return whether each block still has the given generation number."""
        return self.generations[blocks].tobytes() == generations.tobytes()

    @abstractmethod
    def wait_for_started_work(self) -> None:
        """Make later `scatter` calls wait for work that was already started on this cache, such as a step."""

    def in_place_views(self, piece: TransferPiece, blocks: BlockIds) -> list[memoryview] | None:
        """Return the memory of the piece, or None if it should be copied with `gather` and `scatter` instead."""
        return None

    @abstractmethod
    def gather(self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, out: memoryview) -> None:
        """Copy a piece of these blocks to `out`, in the order in which a sender with layout `wire_layout` sends it."""

    @abstractmethod
    def scatter(self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, data: memoryview) -> None:
        """Copy a received piece into these blocks. `data` is in the order of a sender with layout `wire_layout`.

        The copy is complete when the call returns.
        """

    def element_indices(
        self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, kv_index: int
    ) -> tuple[int, BlockIds]:
        """Return how to address the bytes of a piece in one layer: bytes per element, and element indices.

        A layer's keys (`kv_index` 0) or values (1) are treated as an array of equal elements. The indices select the
        elements of the piece, in the order in which a sender with layout `wire_layout` sends them.
        """
        own_tokens, wire_tokens = self.layout.tokens, wire_layout.tokens
        if own_tokens == wire_tokens:
            return self.layout.plane_bytes, blocks[piece.first_block : piece.end_block]
        count, width = self.layout.count_token_strips(kv_index)
        run_tokens = min(own_tokens, wire_tokens)  # tokens of a strip that are adjacent in both layouts
        first = np.arange(piece.first_block * wire_tokens, piece.end_block * wire_tokens, run_tokens).reshape(
            -1, 1, wire_tokens // run_tokens
        )
        block, token = np.divmod(first, own_tokens)
        strip = np.arange(count).reshape(1, -1, 1)
        index = (blocks[block] * count + strip) * (own_tokens // run_tokens) + token // run_tokens
        return run_tokens * width, index.ravel()


class HostRegion(Region):
    """A region whose blocks are in host memory."""

    def __init__(
        self, layout: KVLayout, key_and_value_buffers: Sequence[BufferLike], generations: Generations | None = None
    ) -> None:
        """Create a region in existing memory.

        `key_and_value_buffers` are the buffers of the keys and of the values. Each holds, for every layer, all blocks
        of that layer.
        """
        assert len(key_and_value_buffers) == layout.parts
        flat = [memoryview(part).cast("B") for part in key_and_value_buffers]
        layer_bytes = len(flat[0]) // layout.layers
        assert all(len(part) == layer_bytes * layout.layers for part in flat) and layer_bytes % layout.plane_bytes == 0
        super().__init__(layout, layer_bytes // layout.plane_bytes, generations)
        self.parts = flat
        self._planes = [[part[layer_bytes * i : layer_bytes * (i + 1)] for part in flat] for i in range(layout.layers)]

    def wait_for_started_work(self) -> None:
        """Do nothing, because on a CPU a step has ended before the next one is planned."""

    def piece_views(self, piece: TransferPiece, blocks: BlockIds) -> list[memoryview]:
        """Return the memory of the piece, in wire order."""
        return self._range_views(piece, contiguous_ranges(blocks[piece.first_block : piece.end_block]))

    def in_place_views(self, piece: TransferPiece, blocks: BlockIds) -> list[memoryview] | None:
        ranges = contiguous_ranges(blocks[piece.first_block : piece.end_block])
        scattered = self.layout.plane_bytes * (piece.end_block - piece.first_block) < MIN_IN_PLACE_BYTES * len(ranges)
        return None if scattered else self._range_views(piece, ranges)

    def gather(self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, out: memoryview) -> None:
        for plane, row, size, index in self._iter_plane_elements(piece, blocks, wire_layout, out):
            # mode="clip" avoids a buffered copy; no index is out of range.
            np.take(np.frombuffer(plane, f"V{size}"), index, out=row, mode="clip")

    def scatter(self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, data: memoryview) -> None:
        for plane, row, size, index in self._iter_plane_elements(piece, blocks, wire_layout, data):
            np.frombuffer(plane, f"V{size}")[index] = row

    def _iter_plane_elements(
        self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, data: memoryview
    ) -> Iterator[tuple[memoryview, NDArray[np.void], int, BlockIds]]:
        """Yield where each part of `data` lies in this region, for the keys and the values of each layer.

        Each item has the memory of the keys or values, the matching part of `data`, the bytes per element, and the
        indices of the elements in that memory.
        """
        indices = [self.element_indices(piece, blocks, wire_layout, part) for part in range(self.layout.parts)]
        length = len(data) // ((piece.end_layer - piece.first_layer) * self.layout.parts)
        for i, plane in enumerate(self._iter_piece_planes(piece)):
            size, index = indices[i % len(indices)]
            yield plane, np.frombuffer(data[i * length : (i + 1) * length], f"V{size}"), size, index

    def _range_views(self, piece: TransferPiece, ranges: list[tuple[int, int]]) -> list[memoryview]:
        size = self.layout.plane_bytes
        return [plane[size * a : size * b] for plane in self._iter_piece_planes(piece) for a, b in ranges]

    def _iter_piece_planes(self, piece: TransferPiece) -> Iterator[memoryview]:
        for planes in self._planes[piece.first_layer : piece.end_layer]:
            yield from planes


class StagingBuffer:
    """A buffer that one thread reuses, because the first use of new memory pages costs as much as the copy."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def reserve(self, num_bytes: int) -> memoryview:
        if len(self._memory) < num_bytes:
            self._memory = memoryview(bytearray(num_bytes))
        return self._memory[:num_bytes]


def copy_piece(
    piece: TransferPiece,
    source: Region,
    source_blocks: BlockIds,
    target: Region,
    target_blocks: BlockIds,
    staging: StagingBuffer,
) -> None:
    """Copy a piece from one region to another. numpy releases the GIL during the copy."""
    wire = source.layout
    target_views = target.in_place_views(piece, target_blocks) if wire.tokens == target.layout.tokens else None
    source_views = source.in_place_views(piece, source_blocks) if target_views else None
    if target_views and source_views:
        _copy_views(source_views, target_views)
    else:
        buffer = staging.reserve(piece.num_bytes(wire))
        source.gather(piece, source_blocks, wire, buffer)
        target.scatter(piece, target_blocks, wire, buffer)


def contiguous_ranges(blocks: BlockIds) -> list[tuple[int, int]]:
    """Return the ranges [start, end) of consecutive block numbers."""
    cuts = ((blocks[1:] - blocks[:-1] != 1).nonzero()[0] + 1).tolist()
    return [(int(blocks[a]), int(blocks[b - 1]) + 1) for a, b in pairwise([0, *cuts, len(blocks)])]


def _copy_views(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """Copy the bytes of the source views to the target views. The views may have different lengths."""
    sources, targets = iter(source), iter(target)
    have = want = memoryview(b"")
    while True:
        have = have or next(sources, have)
        want = want or next(targets, want)
        size = min(len(have), len(want))
        if not size:
            assert not have and not want
            return
        np.copyto(np.frombuffer(want[:size], np.uint8), np.frombuffer(have[:size], np.uint8))
        have, want = have[size:], want[size:]
