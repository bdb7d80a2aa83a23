"""make_private: a file that only its owner may read, for databases of requests, replies and keys."""

from __future__ import annotations

import os
from pathlib import Path

OTHERS = 0o077  # mode bits of the group and of everyone


def make_private(path: Path) -> None:
    """Create the file (mode 0600) and its directory (0700) where they are missing; take others' rights away from a file
    that is there, and from what SQLite keeps beside it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    for each in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        try:
            mode = each.stat().st_mode
            if mode & OTHERS:
                each.chmod(mode & 0o700)
        except (FileNotFoundError, PermissionError):
            continue  # another process closed it, or owns it
