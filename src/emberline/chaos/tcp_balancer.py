"""TCPBalancer: distributes connections over several servers in turn, as a plain TCP load balancer does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from emberline.chaos.fault_proxy import READ_BYTES, FaultProxy


@dataclass(slots=True, eq=False)
class TCPBalancer(FaultProxy):
    servers: Sequence[tuple[str, int]] = ()
    next_server: int = 0

    async def _connect_to_server(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the next server; if it refuses the connection, to the one after it, and so on."""
        first, self.next_server = self.next_server, (self.next_server + 1) % len(self.servers)
        for i in range(len(self.servers)):
            try:
                host, port = self.servers[(first + i) % len(self.servers)]
                return await asyncio.open_connection(host, port, limit=READ_BYTES)
            except OSError:
                continue
        raise ConnectionRefusedError("no server accepts connections")
