"""RankTransfers: copies a rank's parts of the KV blocks that the leader exchanges with other engines.

Steps may run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from emberline.engine import memory
from emberline.engine.gpu.device import Device, DeviceEvent
from emberline.engine.gpu.region import DeviceRegion
from emberline.engine.ranks.host_buffers import HostBuffers
from emberline.engine.ranks.piece_codec import (
    FAILED,
    PieceRequest,
    RankPieceRequest,
    decode_piece_request,
    header_bytes,
    view_words,
)
from emberline.kv.transfer.errors import TransferError


class RankTransfers:
    def __init__(
        self,
        region: DeviceRegion,
        device: Device,
        rank: int,
        num_ranks: int,
        slots: HostBuffers,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`region`: the rank's cache. `slots`: buffers that the ranks share: see DeviceGroupRegion.

        `on_error`: called if the device fails."""
        self._region, self._stream, self._rank, self._num_ranks = region, device.step_stream, rank, num_ranks
        self._slots, self._on_error = slots, on_error
        self._pool = ThreadPoolExecutor(2 * memory.TRANSFER_SLOTS, "transfers")

    def start(self, message: bytes) -> None:
        """Start the copies that the leader requests. They wait for all steps that were launched before this call."""
        request = decode_piece_request(message)
        if parts := [part for part in request.parts if part.rank == self._rank]:
            self._pool.submit(self._copy, request, parts, self._stream.record_event())

    def close(self) -> None:
        self._pool.shutdown()

    def _copy(self, request: PieceRequest, parts: Sequence[RankPieceRequest], started: DeviceEvent) -> None:
        slot, result = self._slots.find(request.slot), request.number
        try:
            started.wait()
            wire, data = replace(self._region.layout, tokens=request.wire_tokens), slot[header_bytes(self._num_ranks) :]
            copy = self._region.scatter if request.is_scatter else self._region.gather
            for part in parts:
                copy(part.piece, request.block_ids, wire, data[part.begin : part.end])
        except TransferError:
            result |= FAILED
        except BaseException as error:
            self._on_error(error)
            return
        view_words(slot, self._num_ranks)[self._rank] = result
