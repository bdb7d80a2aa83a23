"""FaultProxy: a TCP proxy that can reset, pause, slow down and corrupt the connections between two processes.

A filter function, which the proxy's owner provides, sees all data and may change it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

READ_BYTES = 1 << 16
LINGER_RESET = struct.pack("ii", 1, 0)  # with a linger time of 0, closing sends a TCP reset
CONNECT_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class ProxiedConnection:
    """One proxied connection."""

    client_writer: asyncio.StreamWriter
    server_writer: asyncio.StreamWriter
    mark: int | None = None  # mark of the request that it carries
    tail: bytes = b""  # last bytes received from the server, for patterns that span two reads

    def reset(self) -> None:
        for writer in (self.client_writer, self.server_writer):
            if (sock := writer.get_extra_info("socket")) is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
            writer.transport.abort()


TrafficFilter = Callable[
    [ProxiedConnection, bool, bytes], bytes
]  # (connection, whether the data goes to the server, data) -> forwarded data


def pass_unchanged(connection: ProxiedConnection, is_to_server: bool, data: bytes) -> bytes:
    return data


@dataclass(slots=True, eq=False)
class FaultProxy:
    host: str
    port: int  # 0: any free port
    target: tuple[str, int]
    traffic_filter: TrafficFilter = pass_unchanged
    bytes_per_s: float = float("inf")  # in each direction of each connection
    bytes_to_corrupt: int = 0  # reads of server data in which one byte is still to be changed
    corrupted_bytes: int = 0
    connections: set[ProxiedConnection] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _may_forward: asyncio.Event = field(default_factory=asyncio.Event)
    _is_refusing: bool = False
    _is_listening: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> FaultProxy:
        """Start listening, unless the proxy is listening already."""
        if not self._is_listening:
            self._is_listening = True
            self._may_forward.set()
            self._server = await asyncio.start_server(self._accept_connection, self.host, self.port, limit=READ_BYTES)
            self.port = self._server.sockets[0].getsockname()[1]
        return self

    def stop(self) -> None:
        """Stop listening and reset all connections."""
        if self._server is not None:
            self._server.close()
            self._server, self._is_listening = None, False
        self.reset_connections()

    def reset_connections(self) -> None:
        for connection in list(self.connections):
            connection.reset()

    def refuse_connections(self) -> None:
        self._is_refusing = True
        self.reset_connections()

    def pause_forwarding(self) -> None:
        """Stop forwarding data, but keep the connections open."""
        self._may_forward.clear()

    def end_faults(self) -> None:
        self._is_refusing, self.bytes_per_s, self.bytes_to_corrupt = False, float("inf"), 0
        self._may_forward.set()

    async def _accept_connection(
        self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._forward_connection(client_reader, client_writer)
        finally:
            self._tasks.discard(task)

    async def _forward_connection(
        self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter
    ) -> None:
        try:
            if self._is_refusing:
                raise ConnectionError("cut")
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                server_reader, server_writer = await self._connect_to_server()
        except (OSError, TimeoutError):
            client_writer.transport.abort()
            return
        connection = ProxiedConnection(client_writer, server_writer)
        self.connections.add(connection)
        pumps = [asyncio.create_task(self._copy_stream(connection, client_reader, server_writer, True)),
                asyncio.create_task(self._copy_stream(connection, server_reader, client_writer, False))]  # fmt: skip
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self.connections.discard(connection)
            for writer in (client_writer, server_writer):
                writer.close()

    async def _connect_to_server(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.target, limit=READ_BYTES)

    async def _copy_stream(
        self,
        connection: ProxiedConnection,
        source: asyncio.StreamReader,
        destination: asyncio.StreamWriter,
        is_to_server: bool,
    ) -> None:
        try:
            while data := await source.read(READ_BYTES):
                if self.bytes_per_s < float("inf"):
                    await asyncio.sleep(len(data) / self.bytes_per_s)
                await self._may_forward.wait()
                data = self.traffic_filter(connection, is_to_server, data)
                if self.bytes_to_corrupt and not is_to_server:
                    data = self._corrupt_one_byte(data)
                destination.write(data)
                await destination.drain()
        except OSError:
            connection.reset()

    def _corrupt_one_byte(self, data: bytes) -> bytes:
        middle = len(data) // 2
        self.bytes_to_corrupt -= 1
        self.corrupted_bytes += 1
        return data[:middle] + bytes((data[middle] ^ 0x10,)) + data[middle + 1 :]
