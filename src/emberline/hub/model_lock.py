"""Locks that show which models are in use: a server holds a shared lock on the directory of each model it serves."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


def hold_model(directory: Path) -> ExitStack:
    """Mark the model in this directory as used, until the result is closed or the process ends."""
    held = ExitStack()
    with contextlib.suppress(OSError):  # such as a file system without locks
        held.enter_context(_locked_folder(directory, fcntl.LOCK_SH))
    return held


def locked_for_removal(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Lock the directory for a process that removes it. Raises BlockingIOError if a process holds it."""
    return _locked_folder(directory, fcntl.LOCK_EX)


@contextmanager
def _locked_folder(directory: Path, kind: int) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
