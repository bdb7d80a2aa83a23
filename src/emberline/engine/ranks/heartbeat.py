"""HeartbeatThread: shows the leader that this rank's process runs, and how much it has computed.

This module does not import torch, because the heartbeat begins before that import."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from emberline.engine.ranks.group_memory import HEARTBEAT, PROGRESS, GroupMemory

HEARTBEAT_INTERVAL_S = 0.2


class HeartbeatThread:
    """A thread that increments a counter in shared memory while the process runs and is not stopped."""

    def __init__(self, memory: GroupMemory, rank: int) -> None:
        self.progress_counter: Callable[[], int] = lambda: 0  # set once kernels can be imported
        self._memory, self._rank = memory, rank
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        beats = 0
        while True:
            beats += 1
            self._memory.set(self._rank, PROGRESS, self.progress_counter())
            self._memory.set(self._rank, HEARTBEAT, beats)
            time.sleep(HEARTBEAT_INTERVAL_S)
