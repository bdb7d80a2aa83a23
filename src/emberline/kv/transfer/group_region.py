"""DividedRegion: the KV blocks of an engine on several ranks, each of which has a part of every block.

Blocks are whole on the wire, as if one rank had computed them. So engines can exchange blocks even if they divide the
model differently: each engine divides whole blocks among its own ranks. The parts of a GroupRegion are in memory that
this process has mapped.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from emberline.kv.block_shard import BlockShard
from emberline.kv.transfer.errors import TransferTimeout
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.region import BlockIds, HostRegion, Region

STEP_TIMEOUT_S = 150.0  # for steps that run when blocks arrive; the engine ends stalled steps sooner
Elements = NDArray[np.void]


class StepCounter:
    """Counts the steps that ranks have started and finished. One thread counts, and any thread may wait."""

    def __init__(self) -> None:
        self.num_started = 0
        self._num_finished = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def start_step(self) -> None:
        self.num_started += 1

    def finish_step(self) -> None:
        with self._changed:
            self._num_finished += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End all present and later waits, because the ranks have ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait_until_finished(self, num_steps: int, timeout_s: float) -> bool:
        """Wait until this many steps are finished. Return False if the timeout or `close` ends the wait before that."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_finished >= num_steps or self._is_closed, timeout_s)
            return self._num_finished >= num_steps


@dataclass(frozen=True, slots=True)
class RankPiece:
    """The part of a transfer piece that one rank has."""

    index: int  # of the rank
    piece: TransferPiece  # the part, with the layers numbered as in the rank's own blocks
    wire: NDArray[np.uint8]  # view of the part in the bytes of the whole piece: [layer, keys or values, block, byte]


class DividedRegion(Region):
    def __init__(self, layout: KVLayout, num_blocks: int, parts: Sequence[BlockShard]) -> None:
        """`layout`: the layout of whole blocks. `parts`: the part of a block that each rank has.

        Together, the parts cover whole blocks."""
        super().__init__(layout, num_blocks)
        self._parts = parts
        self._num_groups = len(parts[0].layers)
        self._block_groups = np.zeros(self.blocks, np.int8)  # the group of layers that each block belongs to

    def bump_generation(self, block: int, group: int = 0) -> None:
        super().bump_generation(block, group)
        self._block_groups[block] = group

    @abstractmethod
    def wait_for_started_work(self) -> None: ...

    def _divide(
        self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, data: memoryview, *, includes_copies: bool
    ) -> Iterator[RankPiece]:
        """Yield each rank's part of the piece. `data`: bytes of the piece, in the order of a sender with `wire_layout`.

        `includes_copies`: also yield a part if an earlier rank has the same layers and heads."""
        head_bytes, num_blocks = wire_layout.tokens * wire_layout.width, piece.end_block - piece.first_block
        whole = np.frombuffer(data, np.uint8).reshape(-1, self.layout.parts, num_blocks, self.layout.heads * head_bytes)
        for group, share in self._split_by_group(piece, blocks):
            rows = slice(share.first_block - piece.first_block, share.end_block - piece.first_block)
            for number, part in enumerate(self._parts):
                own = part.layers[group]
                first, end = max(piece.first_layer, own.start), min(piece.end_layer, own.stop)
                if first >= end or not (part.is_first or includes_copies):
                    continue
                columns = slice(part.heads.start * head_bytes, part.heads.stop * head_bytes)
                wire = whole[first - piece.first_layer : end - piece.first_layer, :, rows, columns]
                own_piece = replace(share, first_layer=first - own.start, end_layer=end - own.start)
                yield RankPiece(number, own_piece, wire)

    def _split_by_group(self, piece: TransferPiece, blocks: BlockIds) -> Iterator[tuple[int, TransferPiece]]:
        """Split the piece so that all blocks of a part belong to one group of layers. Yield each group and part.

        Engines whose models have several groups exchange blocks only if they have equal block sizes.
        """
        if self._num_groups == 1:
            yield 0, piece
            return
        groups = self._block_groups[blocks[piece.first_block : piece.end_block]]
        cuts = (np.flatnonzero(np.diff(groups)) + 1).tolist()
        for begin, end in pairwise([0, *cuts, len(groups)]):
            first_block, end_block = piece.first_block + begin, piece.first_block + end
            yield int(groups[begin]), replace(piece, first_block=first_block, end_block=end_block)


class GroupRegion(DividedRegion):
    def __init__(
        self, layout: KVLayout, parts: Sequence[tuple[BlockShard, HostRegion]], steps: StepCounter | None = None
    ) -> None:
        """`layout`: the layout of whole blocks. `parts`: the part of a block that each rank has, and the rank's memory.

        Together, the parts cover whole blocks. `steps` counts the ranks' steps; None: no rank is computing.
        """
        super().__init__(layout, parts[0][1].blocks, [part for part, _ in parts])
        self._memories = [memory for _, memory in parts]
        assert all(memory.blocks == self.blocks for memory in self._memories)
        self._steps = steps or StepCounter()
        self._awaited_steps = 0

    def wait_for_started_work(self) -> None:
        """Make later `scatter` calls wait for the steps that the ranks have started.

        With several stages, steps are running while the next one is planned. One of them may still write to the blocks
        of a request that was aborted meanwhile.
        """
        self._awaited_steps = self._steps.num_started

    def gather(self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, out: memoryview) -> None:
        for wire, memory, index in self._iter_parts(piece, blocks, wire_layout, out, includes_copies=False):
            wire[:] = memory[index]

    def scatter(self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, data: memoryview) -> None:
        if not self._steps.wait_until_finished(self._awaited_steps, STEP_TIMEOUT_S):
            message = f"a step did not end within {STEP_TIMEOUT_S:g} s, or the ranks have ended"
            raise TransferTimeout(f"received KV blocks cannot be written: {message}")
        for wire, memory, index in self._iter_parts(piece, blocks, wire_layout, data, includes_copies=True):
            memory[index] = wire

    def _iter_parts(
        self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, data: memoryview, *, includes_copies: bool
    ) -> Iterator[tuple[Elements, Elements, BlockIds]]:
        """Yield the keys and the values of each rank's part of the piece, as elements that can be copied.

        Each item has the elements in `data`, all elements in the rank's memory, and the indexes of the part's elements
        in that memory. `includes_copies`: also yield a part if an earlier rank has the same layers and heads."""
        for each in self._divide(piece, blocks, wire_layout, data, includes_copies=includes_copies):
            memory, own_layers = self._memories[each.index], range(each.piece.first_layer, each.piece.end_layer)
            for kv_index in range(self.layout.parts):
                size, index = memory.element_indices(each.piece, blocks, wire_layout, kv_index)
                wire = each.wire[:, kv_index].view(f"V{size}")
                elements = np.frombuffer(memory.parts[kv_index], f"V{size}")
                layer_size = len(elements) // memory.layout.layers
                first_elements = np.array(own_layers).reshape(-1, 1, 1) * layer_size
                yield wire, elements, first_elements + index.reshape(wire.shape[1:])
