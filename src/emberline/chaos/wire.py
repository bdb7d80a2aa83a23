"""FaultProxy: a TCP proxy between two processes that injects faults.

It can cut, pause, slow down and corrupt connections, and passes all traffic through a filter."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

READ = 1 << 16
RESET = struct.pack("ii", 1, 0)  # with a linger time of 0, closing sends a TCP reset
WAIT = 5.0


@dataclass(slots=True, eq=False)
class Line:
    """One proxied connection."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    mark: int | None = None  # mark of the request that it carries
    tail: bytes = b""  # last bytes received from the server, for patterns that span two reads

    def drop(self) -> None:
        for writer in (self.near, self.far):
            if (sock := writer.get_extra_info("socket")) is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()


Ear = Callable[[Line, bool, bytes], bytes]  # (connection, whether the data goes to the server, data) -> forwarded data


def unheard(line: Line, out: bool, data: bytes) -> bytes:
    return data


@dataclass(slots=True, eq=False)
class Wire:
    host: str
    port: int  # 0: any free port
    target: tuple[str, int]
    ear: Ear = unheard
    rate: float = float("inf")  # in each direction of each connection
    spoil: int = 0  # reads of server data in which one byte is still to be changed
    spoiled: int = 0
    lines: set[Line] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _refusing: bool = False
    _listens: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> Wire:
        """Accept connections; do nothing if it already does."""
        if not self._listens:
            self._listens = True
            self._open.set()
            self._server = await asyncio.start_server(self._taken, self.host, self.port, limit=READ)
            self.port = self._server.sockets[0].getsockname()[1]
        return self

    def stop(self) -> None:
        """Stop listening and reset all connections."""
        if self._server is not None:
            self._server.close()
            self._server, self._listens = None, False
        self.drop()

    def drop(self) -> None:
        for connection in list(self.lines):
            connection.drop()

    def cut(self) -> None:
        self._refusing = True
        self.drop()

    def hold(self) -> None:
        """Forward nothing, without closing connections."""
        self._open.clear()

    def mend(self) -> None:
        self._refusing, self.rate, self.spoil = False, float("inf"), 0
        self._open.set()

    async def _taken(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._carry(reader, near)
        finally:
            self._tasks.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            if self._refusing:
                raise ConnectionError("cut")
            async with asyncio.timeout(WAIT):
                server_reader, server_writer = await asyncio.open_connection(*self.target, limit=READ)
        except (OSError, TimeoutError):
            near.transport.abort()
            return
        connection = Line(near, server_writer)
        self.lines.add(connection)
        pumps = [asyncio.create_task(self._pump(connection, reader, server_writer, True)),
                asyncio.create_task(self._pump(connection, server_reader, near, False))]  # fmt: skip
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self.lines.discard(connection)
            for writer in (near, server_writer):
                writer.close()

    async def _pump(self, line: Line, source: asyncio.StreamReader, sink: asyncio.StreamWriter, out: bool) -> None:
        try:
            while data := await source.read(READ):
                if self.rate < float("inf"):
                    await asyncio.sleep(len(data) / self.rate)
                await self._open.wait()
                data = self.ear(line, out, data)
                if self.spoil and not out:
                    data = self._spoiled(data)
                sink.write(data)
                await sink.drain()
        except OSError:
            line.drop()

    def _spoiled(self, data: bytes) -> bytes:
        middle = len(data) // 2
        self.spoil -= 1
        self.spoiled += 1
        return data[:middle] + bytes((data[middle] ^ 0x10,)) + data[middle + 1 :]
