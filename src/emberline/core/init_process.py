"""end_on_sigterm_as_init: lets SIGTERM end a process that is process 1 of a container."""

from __future__ import annotations

import os
import signal

INIT_PID = 1
SIGTERM_STATUS = 128 + signal.SIGTERM  # the exit status that a shell reports for it


def end_on_sigterm_as_init() -> None:
    """Make SIGTERM end this process if it is process 1, until the caller installs its own handler.

    The kernel discards signals without a handler for process 1. Without this, a container that is stopped while its
    model loads would run until SIGKILL. When process 1 ends, the kernel ends all other processes of the container."""
    if os.getpid() == INIT_PID:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(SIGTERM_STATUS))
