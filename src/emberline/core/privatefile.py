"""make_private: restrict a file to its owner, for databases of requests, replies and keys."""

from __future__ import annotations

import os
from pathlib import Path

GROUP_AND_OTHERS_MODE = 0o077  # mode bits of the group and of all other users


def make_private(path: Path) -> None:
    """Create the file (mode 0600) and its directory (mode 0700), or remove other users' access to them.

    The files that SQLite keeps beside a database are restricted too."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    for each in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        try:
            mode = each.stat().st_mode
            if mode & GROUP_AND_OTHERS_MODE:
                each.chmod(mode & 0o700)
        except (FileNotFoundError, PermissionError):
            continue  # another process removed it, or another user owns it
