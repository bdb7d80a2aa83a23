"""Creates directories atomically: a directory appears complete or not at all, and by one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `target` at the end, or removed after an error.

    The caller must hold a `file_lock` for `target`. A temporary directory that exists already is removed, because only
    a killed process can have left it.
    """
    work = target.with_name(f".{target.name}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def file_lock(file: Path) -> Iterator[None]:
    """Hold an exclusive lock on `file` against other processes. The file is deleted on release."""
    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with file.open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_same_file(file, handle):  # the previous holder deleted the file that we locked
                continue
            try:
                yield
            finally:
                file.unlink()
            return


def _is_same_file(file: Path, handle: IO[str]) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(handle.fileno()))
    except FileNotFoundError:
        return False
