"""end_with_parent: makes a child process end when its parent process ends.

The parent keeps the other end of the child's stdin open and never writes to it, so end-of-file means that the parent
has ended, even by kill -9."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make this process end when its parent ends or closes this process's stdin.

    On Linux the kernel also kills the process when its parent ends, even while no Python thread can run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_exit_at_end_of_stdin, name="lifeline", daemon=True).start()


def _exit_at_end_of_stdin() -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:  # stdin was closed or unreadable from the start: that is no sign of the parent's end
        return
    os._exit(1)
