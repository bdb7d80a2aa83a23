"""The entry point of a rank's process. What it does is in rank_loop.py.

python -m emberline.engine.ranks.process NUM_RANKS RANK CONTROL_FD MEMORY_FD NOTICE_FD"""

from __future__ import annotations

import gc
import signal
import sys

from emberline.core.parent_death import end_with_parent
from emberline.engine.ranks.group_memory import GroupMemory
from emberline.engine.ranks.heartbeat import HeartbeatThread
from emberline.engine.torch_import import has_gpu_driver, prepare_torch_import


def main() -> int:
    gc.disable()  # until the model is loaded, as in the engine process
    for each in (signal.SIGINT, signal.SIGTERM):  # a terminal signals all processes; the leader ends this one
        signal.signal(each, signal.SIG_IGN)
    end_with_parent()
    num_ranks, rank, control_fd, memory_fd, notice_fd = map(int, sys.argv[1:])
    memory = GroupMemory(memory_fd, num_ranks)
    heartbeat = HeartbeatThread(memory, rank)
    if not has_gpu_driver():
        prepare_torch_import()
    from emberline.engine.preload import skip_unused_torch_imports

    skip_unused_torch_imports()
    from emberline.engine.ranks.rank_loop import run_rank_process

    return run_rank_process(memory, heartbeat, control_fd, notice_fd)


if __name__ == "__main__":
    sys.exit(main())
