"""free_port: a TCP port for a process that is about to be started."""

from __future__ import annotations

import errno
import random
import socket
from contextlib import ExitStack

# Systems give connections ports from 32,768 on, or later: until it is used, none of those takes it.
PORTS = range(20_000, 30_000)

_next = random.SystemRandom().randrange(len(PORTS))  # each process begins elsewhere, and gives none twice in a row


def free_port(*hosts: str) -> int:
    """That nobody has at any of these addresses of this machine; 127.0.0.1 if none is given."""
    global _next
    for _ in PORTS:
        port, _next = PORTS[_next % len(PORTS)], _next + 1
        with ExitStack() as probes:
            try:
                for host in hosts or ("127.0.0.1",):
                    probes.enter_context(socket.socket()).bind((host, port))
                return port
            except OSError as e:
                if e.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
    raise OSError("no port is free")
