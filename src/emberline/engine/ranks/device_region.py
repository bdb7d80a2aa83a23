"""DeviceGroupRegion: the KV blocks of an engine whose ranks have GPUs, for the exchange with other engines.

A transfer moves pieces: some layers of some blocks. Each rank copies its part of a piece between its cache and a slot,
a buffer in main memory that all ranks share:

    gather    ranks: cache to slot |--> leader: slot to the bytes to be sent
    scatter   leader: received bytes to slot |--> ranks: slot to cache

The leader sends its requests to the other ranks in the ring of plans, which keeps their order among the steps. So the
copies of a rank wait for the steps that were started before. The caller of `gather` and `scatter` is a thread of a
transport, which waits until all ranks have copied."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError
from emberline.engine import memory
from emberline.engine.gpu.boot import make_region
from emberline.engine.gpu.region import DeviceRegion
from emberline.engine.ranks.device_rank_model import DeviceRankModel
from emberline.engine.ranks.group_memory import GroupMemory
from emberline.engine.ranks.host_buffers import HostBuffers
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.leader import FollowerGroup
from emberline.engine.ranks.piece_codec import (
    FAILED,
    PieceRequest,
    RankPieceRequest,
    encode_piece_request,
    header_bytes,
    view_words,
)
from emberline.engine.ranks.shared_caches import allocate_unused_layers, list_block_shards
from emberline.kernels.comm.communicator import RankLost
from emberline.kv.block_shard import BlockShard
from emberline.kv.tiers.base import buffer_bytes_for
from emberline.kv.transfer.errors import TransferTimeout
from emberline.kv.transfer.group_region import STEP_TIMEOUT_S, DividedRegion, RankPiece
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.region import BlockIds, HostRegion, Region
from emberline.kv.transfer.staging import split_by_layers, take_slot
from emberline.models.config import ModelConfig

POLL_S = 0.00005
RANKS_ENDED = "KV blocks cannot be copied, because the ranks have ended"


def slot_bytes_for(layout: KVLayout) -> int:
    """Return how many bytes of a piece fit into a slot. `layout`: of blocks with the parts of all ranks."""
    return memory.transfer_slot_bytes(layout.layer_bytes // layout.tokens)


def allocate_transfer_slots(
    config: EngineConfig, memory_of_group: GroupMemory, ranks: Layout, whole: KVLayout
) -> HostBuffers | None:
    """Add slots to the group's memory and return them; None: the engine exchanges no blocks with other engines.

    `whole`: the layout of blocks with the parts of all ranks."""
    if config.transfer is None:
        return None
    size = buffer_bytes_for(header_bytes(ranks.num_ranks) + slot_bytes_for(whole))
    return HostBuffers.allocate(memory_of_group, size, 2 * memory.TRANSFER_SLOTS)


def make_group_region(
    group: FollowerGroup, model: ModelConfig, rank_model: DeviceRankModel, slots: HostBuffers
) -> DeviceGroupRegion:
    """Return a region with the blocks of all ranks.

    `model`: config of the undivided model. `rank_model`: the leader's part of it."""
    runner, groups = rank_model.runner, rank_model.planned.groups
    whole = rank_model.describe_whole_blocks(model, runner.model.fingerprint)
    parts = list_block_shards(group.layout, model, groups)
    unused = allocate_unused_layers(groups, whole, runner.num_blocks)
    leader_region = make_region(runner, rank_model.planned.device)
    if unused is None:
        return DeviceGroupRegion(whole, parts, leader_region, group, slots)
    return DeviceGroupRegion(whole, [*parts, unused[0]], leader_region, group, slots, unused[1])


@dataclass(slots=True)
class TransferSlot:
    number: int
    is_lost: bool = False  # True: its transfer has failed, and a rank may still write to it


class DeviceGroupRegion(DividedRegion):
    def __init__(
        self,
        layout: KVLayout,
        parts: Sequence[BlockShard],
        leader_region: DeviceRegion,
        group: FollowerGroup,
        slots: HostBuffers,
        unused: HostRegion | None = None,
    ) -> None:
        """`layout`: of blocks with the parts of all ranks. `parts`: the part of a block that each rank has.

        `leader_region`: the leader's cache. `slots`: buffers that all ranks share, half of them for each direction.
        `unused`: memory for the part of a block that no layer uses (`allocate_unused_layers`); that part is then the
        last one in `parts`."""
        super().__init__(layout, leader_region.blocks, parts)
        self._group, self._slots, self._num_ranks = group, slots, group.layout.num_ranks
        self._local_regions: dict[int, Region] = {
            group.layout.leader: leader_region
        }  # by part: the memory that this process copies
        if unused is not None:
            self._local_regions[self._num_ranks] = unused
        self._leader_region, self._slot_bytes = leader_region, slot_bytes_for(layout)
        self._numbers, self._publish_lock = itertools.count(1), threading.Lock()
        self._out_slots, self._in_slots = SimpleQueue[TransferSlot](), SimpleQueue[TransferSlot]()
        for number in range(slots.area.count):
            (self._out_slots if number % 2 else self._in_slots).put(TransferSlot(number))

    def wait_for_started_work(self) -> None:
        """Make later writes to KV blocks wait for all steps that were launched before this call.

        This call itself does not wait."""
        self._leader_region.wait_for_started_work()

    def gather(self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, out: memoryview) -> None:
        for some, data in self._split_by_layers(piece, wire_layout, out):
            rank_pieces = list(self._divide(some, blocks, wire_layout, data, includes_copies=False))
            with self._take_slot(self._out_slots) as slot:
                buffers = self._allocate_buffers(slot, rank_pieces)
                self._copy_pieces(slot, rank_pieces, buffers, blocks, wire_layout, is_scatter=False)
                for rank_piece, buffer in zip(rank_pieces, buffers, strict=True):
                    rank_piece.wire[:] = np.frombuffer(buffer, np.uint8).reshape(rank_piece.wire.shape)

    def scatter(self, piece: TransferPiece, blocks: BlockIds, wire_layout: KVLayout, data: memoryview) -> None:
        for some, received in self._split_by_layers(piece, wire_layout, data):
            rank_pieces = list(self._divide(some, blocks, wire_layout, received, includes_copies=True))
            with self._take_slot(self._in_slots) as slot:
                buffers = self._allocate_buffers(slot, rank_pieces)
                for rank_piece, buffer in zip(rank_pieces, buffers, strict=True):
                    np.frombuffer(buffer, np.uint8).reshape(rank_piece.wire.shape)[:] = rank_piece.wire
                self._copy_pieces(slot, rank_pieces, buffers, blocks, wire_layout, is_scatter=True)

    def _split_by_layers(
        self, piece: TransferPiece, wire_layout: KVLayout, data: memoryview
    ) -> Iterator[tuple[TransferPiece, memoryview]]:
        """Yield parts of a piece that fit into a slot, each with its bytes."""
        layer_bytes = piece.num_bytes(wire_layout) // (piece.end_layer - piece.first_layer)
        return split_by_layers(piece, layer_bytes, self._slot_bytes, data)

    def _allocate_buffers(self, slot: TransferSlot, rank_pieces: Sequence[RankPiece]) -> list[memoryview]:
        """Return the memory for each part in a slot. Parts with the same bytes, of several ranks, share memory."""
        data = self._slots.find(slot.number)[header_bytes(self._num_ranks) :]
        buffers: dict[tuple[int, tuple[int, ...]], memoryview] = {}
        end = 0
        for rank_piece in rank_pieces:
            if (key := (rank_piece.wire.ctypes.data, rank_piece.wire.shape)) not in buffers:
                buffers[key] = data[end : end + rank_piece.wire.size]
                end += rank_piece.wire.size
        return [buffers[rank_piece.wire.ctypes.data, rank_piece.wire.shape] for rank_piece in rank_pieces]

    def _copy_pieces(
        self,
        slot: TransferSlot,
        rank_pieces: Sequence[RankPiece],
        buffers: Sequence[memoryview],
        blocks: BlockIds,
        wire_layout: KVLayout,
        *,
        is_scatter: bool,
    ) -> None:
        """Let all ranks copy their parts between their caches and the slot, and wait until they have."""
        request = PieceRequest(0, slot.number, is_scatter, wire_layout.tokens, blocks.astype(np.int64).tobytes(), [])
        base = np.frombuffer(self._slots.find(slot.number), np.uint8).ctypes.data + header_bytes(self._num_ranks)
        for rank_piece, buffer in zip(rank_pieces, buffers, strict=True):
            if rank_piece.index not in self._local_regions:
                begin, piece = np.frombuffer(buffer, np.uint8).ctypes.data - base, rank_piece.piece
                spans = (piece.first_layer, piece.end_layer), (piece.first_block, piece.end_block)
                request.parts.append(RankPieceRequest(rank_piece.index, *spans, begin, begin + len(buffer)))
        self._publish(request)
        try:
            for rank_piece, buffer in zip(rank_pieces, buffers, strict=True):
                if (local_region := self._local_regions.get(rank_piece.index)) is not None:
                    copy = local_region.scatter if is_scatter else local_region.gather
                    copy(rank_piece.piece, blocks, wire_layout, buffer)
        finally:
            self._wait_for_ranks(slot, request)

    def _publish(self, request: PieceRequest) -> None:
        if request.parts:
            with self._publish_lock:
                request.number = next(self._numbers)
                try:
                    self._group.publish_beside_steps(encode_piece_request(request))
                except (EmberlineError, RankLost) as error:
                    raise TransferTimeout(f"{RANKS_ENDED}: {error}") from error

    def _wait_for_ranks(self, slot: TransferSlot, request: PieceRequest) -> None:
        words = view_words(self._slots.find(slot.number), self._num_ranks)
        deadline, waiting = time.monotonic() + STEP_TIMEOUT_S, {part.rank for part in request.parts}
        slot.is_lost = True
        while waiting := {rank for rank in waiting if int(words[rank]) & ~FAILED != request.number}:
            try:
                self._group.check()
            except EmberlineError as error:
                raise TransferTimeout(f"{RANKS_ENDED}: {error}") from error
            if time.monotonic() > deadline:
                late = self._group.layout.describe(min(waiting))
                raise TransferTimeout(f"{late} did not copy its part of KV blocks within {STEP_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        slot.is_lost = False
        for part in request.parts:
            if int(words[part.rank]) & FAILED:
                raise TransferTimeout(f"{self._group.layout.describe(part.rank)} cannot copy its part of KV blocks")

    @staticmethod
    def _take_slot(slots: SimpleQueue[TransferSlot]) -> AbstractContextManager[TransferSlot]:
        return take_slot(slots, "buffer", STEP_TIMEOUT_S, lambda slot: not slot.is_lost)
