"""A ring of plans in shared memory, with one writer and several readers.

A plan is written once. Each reader gets a notice of it through a pipe, which wakes the reader and orders the memory
accesses of both processes. A plan is overwritten only after all readers have read it.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Mapping

from emberline.engine.ranks.group_memory import PLAN_BYTES, READ_POSITION, GroupMemory
from emberline.kernels.comm.rank_lost import RankLost

ALIGN_BYTES = 4096  # of a piece in the ring, so that all notices of a full ring fit into a pipe
MAX_PIECE_BYTES = PLAN_BYTES // 4  # longer plans are written in pieces
FULL_RING_POLL_S = 0.0002
NOTICE = struct.Struct("<QII")  # position after the piece, length of the piece, 1 if it is the plan's last one


class PlanWriter:
    def __init__(
        self,
        memory: GroupMemory,
        notice_fds: Mapping[int, int],
        *,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`notice_fds`: by rank, the write end of its pipe. `timeout_s`: how long to wait for the slowest reader.

        `check`: called while the ring is full; raises an error if a reader has ended."""
        self._memory, self._notice_fds, self._timeout_s, self._check = memory, dict(notice_fds), timeout_s, check
        self.position = 0  # bytes written since the start; READ_POSITION of a reader that has read everything

    def publish(self, plan: bytes) -> None:
        """Write a plan for all readers. Raises an error if a reader ended, or reads nothing for too long."""
        for begin in range(0, len(plan), MAX_PIECE_BYTES):
            self._write_piece(plan[begin : begin + MAX_PIECE_BYTES], begin + MAX_PIECE_BYTES >= len(plan))

    def _write_piece(self, piece: bytes, is_last: bool) -> None:
        begin = self.position
        if (offset := begin % PLAN_BYTES) + len(piece) > PLAN_BYTES:
            begin, offset = begin + PLAN_BYTES - offset, 0
        end = begin + _round_up(len(piece))
        self._wait_for_room(end)
        self._memory.plans[offset : offset + len(piece)] = piece
        self.position = end
        notice = NOTICE.pack(end, len(piece), is_last)
        for rank, fd in self._notice_fds.items():
            try:
                os.write(fd, notice)
            except BrokenPipeError as error:
                raise RankLost(f"rank {rank} has closed its pipe and cannot receive plans") from error

    def _wait_for_room(self, end: int) -> None:
        deadline = None
        while (slowest := min(self._notice_fds, key=self._read_position, default=None)) is not None:
            if end - self._read_position(slowest) <= PLAN_BYTES:
                return
            deadline = deadline or time.monotonic() + self._timeout_s
            if time.monotonic() > deadline:
                raise RankLost(f"rank {slowest} has read no plan for {self._timeout_s:g} s")
            self._check()
            time.sleep(FULL_RING_POLL_S)

    def _read_position(self, rank: int) -> int:
        return self._memory.get(rank, READ_POSITION)

    def close(self) -> None:
        """Let every reader's `receive` return None."""
        for fd in self._notice_fds.values():
            os.close(fd)
        self._notice_fds.clear()


class PlanReader:
    def __init__(self, memory: GroupMemory, rank: int, notice_fd: int) -> None:
        self._memory, self._rank, self._notice_fd = memory, rank, notice_fd

    def receive(self) -> bytes | None:
        """Wait for the next plan and return it; None: the writer has ended."""
        pieces: list[bytes] = []
        while notice := os.read(self._notice_fd, NOTICE.size):  # a write this short to a pipe is never split
            end, length, is_last = NOTICE.unpack(notice)
            offset = (end - _round_up(length)) % PLAN_BYTES
            pieces.append(bytes(self._memory.plans[offset : offset + length]))
            self._memory.set(self._rank, READ_POSITION, end)
            if is_last:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return None


def _round_up(length: int) -> int:
    return -(-length // ALIGN_BYTES) * ALIGN_BYTES
