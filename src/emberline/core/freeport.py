"""free_port: a TCP port for a process that is about to be started."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

# Systems give connections ports from 32,768 on, or later: until it is used, none of those takes it.
PORTS = range(20_000, 30_000)


def free_port(*hosts: str) -> int:
    """Where nobody listens, at each of these addresses of this machine; at 127.0.0.1 if none is given."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        try:
            with ExitStack() as stack:
                for host in hosts or ("127.0.0.1",):
                    stack.enter_context(socket.create_server((host, port)))
                return port
        except OSError:
            continue
    raise OSError("no port is free")
