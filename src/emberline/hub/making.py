"""made: a directory that is there whole or not at all. locked: one process makes it, the others wait and find it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def made(target: Path) -> Iterator[Path]:
    """A directory beside `target` that becomes it, if all goes well. For whoever holds a lock: what is found there, a
    process left that was killed."""
    work = target.with_name(f".{target.name}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """`file` is there as long as somebody holds it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with file.open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is(file, handle):  # whoever held it has taken it away
                continue
            try:
                yield
            finally:
                file.unlink()
            return


def _is(file: Path, handle: IO[str]) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(handle.fileno()))
    except FileNotFoundError:
        return False
