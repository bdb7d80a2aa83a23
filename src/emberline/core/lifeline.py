"""A child process that must not outlive its parent: the parent keeps the other end of the child's stdin open and never
writes to it, so the end of that file means that the parent has ended, however it did (kill -9 included)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """End this process as soon as its stdin does. On Linux the kernel does it, even while no thread can run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_exit_at_end_of_stdin, name="lifeline", daemon=True).start()


def _exit_at_end_of_stdin() -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:  # stdin is closed or unreadable: it says nothing about the parent
        return
    os._exit(1)
