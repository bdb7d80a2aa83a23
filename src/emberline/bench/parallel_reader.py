"""A process of `emberline bench parallel` that reads plans and prints the median CPU time of a plan.

python -m emberline.bench.parallel_reader NUM_RANKS RANK MEMORY_FD NOTICE_FD"""

from __future__ import annotations

import gc
import sys

from emberline.bench.parallel import read_plans
from emberline.engine.ranks.group_memory import GroupMemory
from emberline.engine.ranks.plan_ring import PlanReader


def main() -> int:
    num_ranks, rank, memory_fd, notice_fd = map(int, sys.argv[1:])
    gc.freeze()  # as in a rank's process
    print(read_plans(PlanReader(GroupMemory(memory_fd, num_ranks), rank, notice_fd)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
