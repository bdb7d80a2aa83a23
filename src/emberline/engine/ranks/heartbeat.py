"""HeartbeatThread: shows the leader that this rank's process runs, and how much it has computed.

This module does not import torch, because the heartbeat begins before that import."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from emberline.engine.ranks.group_memory import HEARTBEAT, PROGRESS, GroupMemory

HEARTBEAT_INTERVAL_S = 0.2
LOST_PEER_STATUS = 3  # exit status of a rank that lost its connection to another


class HeartbeatThread:
    """A thread that increments a counter in shared memory while the process runs and is not stopped."""

    def __init__(self, memory: GroupMemory, rank: int) -> None:
        self.progress_counter: Callable[[], int] = lambda: 0  # set once kernels can be imported
        self._memory, self._rank = memory, rank
        self._supervisor_timeout_s = float("inf")
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def end_with_supervisor(self, leader: int, timeout_s: float) -> None:
        """End this process if its supervisor, the process that started it, is stopped for `timeout_s`.

        This is for ranks on other nodes than the leader. There the supervisor shows that it runs by incrementing the
        counter of the rank `leader` in this node's shared memory."""
        self._leader, self._supervisor_timeout_s = leader, timeout_s

    def _beat(self) -> None:
        beats, supervisor_beats, silent_s = 0, 0, 0.0
        while True:
            beats += 1
            self._memory.set(self._rank, PROGRESS, self.progress_counter())
            self._memory.set(self._rank, HEARTBEAT, beats)
            if self._supervisor_timeout_s != float("inf"):
                before, supervisor_beats = supervisor_beats, self._memory.get(self._leader, HEARTBEAT)
                silent_s = silent_s + HEARTBEAT_INTERVAL_S if supervisor_beats == before else 0.0
                if silent_s > self._supervisor_timeout_s:
                    os._exit(LOST_PEER_STATUS)
            time.sleep(HEARTBEAT_INTERVAL_S)
