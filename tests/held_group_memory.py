"""Which memory of groups of ranks this process still holds."""

from __future__ import annotations

import gc
import time
from pathlib import Path


def find_group_memory() -> list[str]:
    """Return where this process holds memory of groups of ranks: mappings, and file descriptors."""
    gc.collect()
    links = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [each for each in (*Path("/proc/self/maps").read_text().splitlines(), *links) if "emberline-ranks" in each]


def wait_until_group_memory_is_freed(num_before: int) -> None:
    """Wait until this process holds no more such memory than before: threads of closed engines may still be ending."""
    ends = time.monotonic() + 10
    while len(held := find_group_memory()) > num_before:
        assert time.monotonic() < ends, held
        time.sleep(0.02)
