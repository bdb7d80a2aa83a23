"""StagedPieces: pieces of KV blocks that a sender copies to slots of a memory area, from which receivers read them.

This is for caches that a receiver cannot read directly: those of several ranks, each of which has a part of every
block, and those in GPU memory. A receiver asks for a piece, reads it from its slot, and confirms the read:

    sender    stage: cache to slot              |--> confirm: the piece was in the slot until now
    receiver                      slot to buffer --|

A read cannot be cancelled, and the sender does not see when it ends. So a slot may be given to another piece while a
receiver that gave up still reads it. That receiver gets bytes of both pieces, but no confirmation of them.
"""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from emberline.kv.transfer.errors import BadTransfer, TransferTimeout
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.piece import MAX_PIECE_BYTES, TransferPiece
from emberline.kv.transfer.sender import Sender

NUM_SLOTS = 8  # a pull uses one at a time
MAX_READ_S = 60.0  # a slot whose piece was not confirmed after this time may be reused: twice the timeout of Mooncake
SLOT_POLL_S = 0.02  # of a thread that waits for a slot whose lease may expire


@dataclass(slots=True)
class StagedPiece:
    number: int
    ticket_id: str
    piece: TransferPiece
    data: memoryview
    crc: int  # of the data when they were copied; 0: not computed
    staged_at: float  # monotonic clock
    is_confirmed: bool = False


class StagedPieces:
    def __init__(self, sender: Sender, clock: Callable[[], float] = time.monotonic) -> None:
        self._sender, self._clock = sender, clock
        self._slot_bytes = max_slot_bytes(sender.region.layout)
        self.memory = memoryview(mmap.mmap(-1, NUM_SLOTS * self._slot_bytes))  # takes memory when slots are first used
        self._changed = threading.Condition()
        self._free_slots = list(range(NUM_SLOTS))
        self._staged: dict[int, StagedPiece] = {}  # by slot
        self._numbers = itertools.count(1)

    def stage(self, ticket_id: str, piece: TransferPiece, timeout_s: float, *, uses_checksum: bool) -> StagedPiece:
        """Copy a piece of published blocks into a slot, and renew the lease.

        Raises TransferTimeout if no slot becomes free in time, and the errors of `Sender.check_readable`.
        """
        lease, layout = self._sender.check_readable(ticket_id, piece), self._sender.region.layout
        if (size := piece.num_bytes(layout)) > self._slot_bytes:
            raise BadTransfer(f"the piece {piece} has {size} bytes; the limit is {self._slot_bytes}")
        self._sender.renew_lease(ticket_id)
        slot = self._take_slot(timeout_s)
        try:
            data = self.memory[slot * self._slot_bytes :][:size]
            self._sender.region.gather(piece, lease.blocks, layout, data)
            crc = self._sender.crc(data, 0) if uses_checksum else 0
        except BaseException:
            with self._changed:
                self._free_slots.append(slot)
                self._changed.notify()
            raise
        with self._changed:
            staged = StagedPiece(next(self._numbers), ticket_id, piece, data, crc, self._clock())
            self._staged[slot] = staged
        return staged

    def confirm_read(self, number: int, ticket_id: str, piece: TransferPiece) -> StagedPiece:
        """Return the staged piece, whose slot may be reused from now on.

        A receiver may repeat the call if it got no reply. Raises TransferTimeout if the slot was already reused.
        """
        with self._changed:
            for staged in self._staged.values():
                if (staged.number, staged.ticket_id, staged.piece) == (number, ticket_id, piece):
                    staged.is_confirmed = True
                    self._changed.notify()
                    return staged
        raise TransferTimeout(f"the read of {piece} was not confirmed within {MAX_READ_S:g} s, and its slot was reused")

    def _take_slot(self, timeout_s: float) -> int:
        deadline = self._clock() + timeout_s
        with self._changed:
            while True:
                over = next((slot for slot, staged in self._staged.items() if self._is_over(staged)), None)
                if over is not None:  # before free ones, whose memory is less likely to be in a cache
                    del self._staged[over]
                    return over
                if self._free_slots:
                    return self._free_slots.pop()
                if (remaining := deadline - self._clock()) <= 0:
                    raise TransferTimeout(f"none of {NUM_SLOTS} slots for KV blocks became free within {timeout_s:g} s")
                self._changed.wait(min(remaining, SLOT_POLL_S))

    def _is_over(self, staged: StagedPiece) -> bool:
        """Return whether a slot may be reused: its read was confirmed or is overdue, or its lease has ended."""
        is_late = self._clock() - staged.staged_at > MAX_READ_S
        return staged.is_confirmed or is_late or not self._sender.is_leased(staged.ticket_id)


def max_slot_bytes(layout: KVLayout) -> int:
    """Return the bytes of the largest piece that receivers ask for, rounded up to whole pages."""
    return -(-max(MAX_PIECE_BYTES, layout.layer_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
