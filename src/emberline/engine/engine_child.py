"""EngineChild: an engine process, and this side's end of the socket to it.

This module needs only the standard library, so that a server can start the process before its own imports.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import NamedTuple

STDERR_FD = 2  # not sys.stderr, which may have been replaced by an object that is not a file
ENGINE_COMMAND = (sys.executable, "-m", "emberline.engine.process")


class EngineChild(NamedTuple):
    process: subprocess.Popen[bytes]
    connection: socket.socket  # the process ends when this is closed

    @staticmethod
    def spawn(command: tuple[str, ...] | None = None) -> EngineChild:
        """Start an engine process. It imports what every engine needs, and waits for its models.

        `command`: None for ENGINE_COMMAND."""
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            try:
                return EngineChild(
                    subprocess.Popen([*(command or ENGINE_COMMAND), str(fd)], pass_fds=[fd], stdout=STDERR_FD), ours
                )
            except OSError:
                ours.close()
                raise

    def end(self) -> None:
        """Kill the process, unless it has ended already, and close the socket."""
        self.connection.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
