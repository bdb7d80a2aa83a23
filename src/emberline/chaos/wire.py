"""Wire: a TCP link between two processes that believe to be connected directly. It can be cut, held up, slowed down and
spoiled, and says what passes to whoever listens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

READ = 1 << 16
RESET = struct.pack("ii", 1, 0)  # linger for no time: the other side sees a reset, not a polite end
WAIT = 5.0  # seconds for the far end to take a connection


@dataclass(slots=True, eq=False)
class Line:
    """One connection."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    mark: int | None = None  # of the request it carries
    tail: bytes = b""  # the end of what was heard last, from the far end

    def drop(self) -> None:
        for writer in (self.near, self.far):
            if (sock := writer.get_extra_info("socket")) is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()


Ear = Callable[[Line, bool, bytes], bytes]  # the line, whether it goes to the far end, what; gives what is passed on


def unheard(line: Line, out: bool, data: bytes) -> bytes:
    return data


@dataclass(slots=True, eq=False)
class Wire:
    host: str
    port: int  # 0: any
    target: tuple[str, int]
    ear: Ear = unheard
    rate: float = float("inf")  # bytes a second, in each direction of each line
    spoil: int = 0  # bytes still to be changed, on their way back
    spoiled: int = 0
    lines: set[Line] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _refusing: bool = False
    _listens: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> Wire:
        """Takes connections; does nothing if it does already."""
        if not self._listens:
            self._listens = True
            self._open.set()
            self._server = await asyncio.start_server(self._taken, self.host, self.port, limit=READ)
            self.port = self._server.sockets[0].getsockname()[1]
        return self

    def stop(self) -> None:
        """As if nobody had ever listened here."""
        if self._server is not None:
            self._server.close()
            self._server, self._listens = None, False
        self.drop()

    def drop(self) -> None:
        for line in list(self.lines):
            line.drop()

    def cut(self) -> None:
        self._refusing = True
        self.drop()

    def hold(self) -> None:
        """Nothing passes, and nobody is told."""
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
                back, far = await asyncio.open_connection(*self.target, limit=READ)
        except (OSError, TimeoutError):
            near.transport.abort()
            return
        line = Line(near, far)
        self.lines.add(line)
        ways = [asyncio.create_task(self._pump(line, reader, far, True)),
                asyncio.create_task(self._pump(line, back, near, False))]  # fmt: skip
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self.lines.discard(line)
            for writer in (near, far):
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
        at = len(data) // 2
        self.spoil -= 1
        self.spoiled += 1
        return data[:at] + bytes((data[at] ^ 0x10,)) + data[at + 1 :]
