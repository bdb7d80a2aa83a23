"""free_port: a TCP port for a process that is about to be started."""

from __future__ import annotations

import errno
import random
import socket
from contextlib import ExitStack

# Outgoing connections get ports from 32,768 on, so none of them can take the port before the new process binds it.
PORT_RANGE = range(20_000, 30_000)

# Random, so that processes that search at the same time find different ports.
_next_index = random.SystemRandom().randrange(len(PORT_RANGE))


def free_port(*hosts: str) -> int:
    """Return a port that is free at all of these local addresses (default: 127.0.0.1).

    Raises OSError if no port is free."""
    global _next_index
    for _ in PORT_RANGE:
        port, _next_index = PORT_RANGE[_next_index % len(PORT_RANGE)], _next_index + 1
        with ExitStack() as probes:
            try:
                for host in hosts or ("127.0.0.1",):
                    probes.enter_context(socket.socket()).bind((host, port))
                return port
            except OSError as e:
                if e.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
    raise OSError(f"no port is free from {PORT_RANGE.start} to {PORT_RANGE.stop - 1}")
