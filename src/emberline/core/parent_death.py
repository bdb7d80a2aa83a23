"""end_with_parent: for a child process that must not outlive its parent.

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
    """End this process when its stdin is closed.

    On Linux the kernel ends the process, which works even while no Python thread can run."""
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
