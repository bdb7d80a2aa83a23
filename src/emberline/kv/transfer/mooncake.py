"""The Mooncake transport: the receiver reads the sender's registered memory by RDMA or TCP.

Messages about leases use a connection of our own. A read counts only after the sender has confirmed over it, after the
last byte, that the lease is valid and the generations are unchanged.

A read of the engine cannot be cancelled, and gives up on a silent peer only after 30 s. So the engine never writes to a
cache: each read has its own buffer, and a caller that stops waiting leaves the buffer to the engine.

The engine authenticates no peer: a process that reaches its ports may read and overwrite the registered memory, which
is the whole cache. Its listeners are therefore confined to one address, and tickets carry checksums of the blocks, so
that a receiver notices a foreign write (see docs/cluster.md).
"""

from __future__ import annotations

import logging
import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from queue import Empty, SimpleQueue

import numpy as np

from emberline.kv.confine import LOOPBACK, ListenerExposed, confined_to
from emberline.kv.mooncake import MooncakeMissing, new_engine
from emberline.kv.transfer.base import Fetch
from emberline.kv.transfer.channel import PATIENCE, Channel, Kind
from emberline.kv.transfer.errors import (
    BadTransfer,
    Corrupted,
    PeerLost,
    PeerUnreachable,
    TransferTimeout,
)
from emberline.kv.transfer.layout import Layout
from emberline.kv.transfer.link import Dial, Habits, StreamLink
from emberline.kv.transfer.piece import Piece
from emberline.kv.transfer.region import HostRegion, Ids, runs
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.server import Server, generation_mark
from emberline.kv.transfer.tcp import dialling, listening
from emberline.kv.transfer.ticket import Peer

log = logging.getLogger("emberline.transfer")

AHEAD = 2  # buffers that one fetch may fill before the caller takes them
ROOM = 4 << 20
MOST_ROOMS = 32
QUARANTINE = 60.0  # the buffer of a failed read is not reused for this time: twice the engine's own timeout
Place = tuple[int, int]  # address and length


class Rooms:
    """A pool of registered buffers that pieces are read into. A buffer is idle, in use, or in quarantine."""

    def __init__(self, register: Callable[[memoryview], None], most: int = MOST_ROOMS) -> None:
        self._register = register
        self._most = most
        self._lock = threading.Lock()
        self._idle: list[memoryview] = []
        self._ill: list[tuple[float, memoryview]] = []  # time of the failed read, buffer
        self._count = 0

    def take(self, size: int) -> memoryview:
        with self._lock:
            now = time.monotonic()
            self._idle += [room for since, room in self._ill if now - since > QUARANTINE]
            self._ill = [entry for entry in self._ill if now - entry[0] <= QUARANTINE]
            found = next((i for i, room in enumerate(self._idle) if len(room) >= size), None)
            if found is not None:
                return self._idle.pop(found)
            if self._count >= self._most:
                raise PeerUnreachable(f"all {self._most} buffers for Mooncake are in use or held by failed reads")
            self._count += 1
        try:
            room = memoryview(mmap.mmap(-1, -(-max(size, ROOM) // mmap.PAGESIZE) * mmap.PAGESIZE))
            self._register(room)
        except (OSError, PeerUnreachable):  # out of memory, or of memory that may be locked
            with self._lock:
                self._count -= 1
            raise
        return room

    def give(self, room: memoryview, *, well: bool) -> None:
        with self._lock:
            if well:
                self._idle.append(room)
            else:
                self._ill.append((time.monotonic(), room))


class Mooncake:
    """Mooncake's Transfer Engine in this process, shared by all its senders and receivers."""

    def __init__(self, host: str = LOOPBACK, protocol: str = "tcp", port: int = 0) -> None:
        """Start the engine. Call `probe` before: an unsuitable Mooncake wheel may crash the process.

        `host`: IPv4 address that its listeners are confined to. `port`: first of its two ports; 0: any free ones.
        Raises PeerUnreachable if the engine does not start.
        """
        try:
            self._engine = new_engine(port)
            with confined_to(host):
                started = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        except (MooncakeMissing, ListenerExposed) as error:
            raise PeerUnreachable(error.message, hint=error.hint) from error
        if started != 0:
            address = f"{host}:{port} and {port + 1}" if port else host
            raise PeerUnreachable(f"Mooncake does not start with {protocol} at {address}", hint="run emberline doctor")
        self.host = host
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self.rooms = Rooms(self.register)
        self._kept: dict[int, memoryview] = {}  # by address; keeps the memory alive while the engine may access it

    def register(self, view: memoryview) -> None:
        if self._engine.register_memory(_address(view), len(view)) != 0:
            raise PeerUnreachable(
                f"Mooncake cannot register {len(view)} bytes of memory",
                hint="raise the limit of locked memory (ulimit -l)",
            )
        self._kept[_address(view)] = view

    def forget(self, view: memoryview) -> None:
        """Withdraw the memory from the engine, so that peers can no longer access it."""
        if self._engine.unregister_memory(_address(view)) == 0:
            del self._kept[_address(view)]

    def read(self, session: str, room: memoryview, places: Sequence[Place]) -> bool:
        """Read these ranges of the peer's memory into the buffer, one after the other. May take 30 s."""
        position, targets = _address(room), []
        for _, length in places:
            targets.append(position)
            position += length
        addresses, lengths = [address for address, _ in places], [length for _, length in places]
        try:
            return self._engine.batch_transfer_sync_read(session, targets, addresses, lengths) == 0
        except Exception:
            log.exception("Mooncake read failed: peer=%s", session)
            return False


class MooncakeServer(Server):
    def __init__(self, sender: Sender, engine: Mooncake, listener: socket.socket, patience: float) -> None:
        assert isinstance(sender.region, HostRegion)
        self._engine, self._region = engine, sender.region
        for part in self._region.parts:
            engine.register(part)
        super().__init__(sender, listener, patience=patience)

    def stop(self) -> None:
        super().stop()
        for part in self._region.parts:
            self._engine.forget(part)

    def _attach(self, channel: Channel, transfer: int) -> None:
        region = self._region
        body = {"session": self._engine.session, "bases": [*map(_address, region.parts)], "blocks": region.blocks}
        channel.tell(Kind.OKAY, transfer, body, time.monotonic() + self._patience)


def serve_mooncake(sender: Sender, engine: Mooncake, port: int = 0, *, patience: float = PATIENCE) -> MooncakeServer:
    """Serve leases at the engine's host. A receiver asks at this endpoint for the addresses of the memory."""
    listener = listening(engine.host, port)
    sender.endpoints["mooncake"] = f"{engine.host}:{listener.getsockname()[1]}"
    return MooncakeServer(sender, engine, listener, patience)


class MooncakeLink(StreamLink):
    def __init__(
        self, peer: Peer, layout: Layout, dial: Dial, habits: Habits, engine: Mooncake, deadline: float
    ) -> None:
        self._engine = engine
        super().__init__(peer, layout, dial, habits, deadline)

    def _prepare(self, deadline: float) -> None:
        with self._channel(deadline) as channel:
            reply = self._told(channel, Kind.ATTACH, {}, deadline)
        try:
            self._session, self._blocks = str(reply["session"]), int(reply["blocks"])
            self._bases = [int(base) for base in reply["bases"]]
        except (KeyError, TypeError, ValueError) as error:
            raise BadTransfer(f"the sender's description of its memory is malformed: {error!r}") from error
        if len(self._bases) != self._peer.layout.parts or self._blocks < 1:
            raise BadTransfer("the sender's description of its memory does not match its KV layout")

    def fetch(self, fetch: Fetch) -> None:
        layout = self._peer.layout
        reads = [(piece.size(layout), self._places(piece, fetch.blocks)) for piece in fetch.pieces]
        reader = Reader(self._engine, self._session, reads)
        try:
            with fetch.progress.stopping(reader.wake):
                for piece in fetch.pieces:
                    with self._taken(reader, fetch) as buffer:
                        data = buffer[: piece.size(layout)]
                        self._vouched(fetch, piece, data)
                        fetch.scatter(piece, data)
                    fetch.landed(piece)
        finally:
            reader.leave()

    @contextmanager
    def _taken(self, reader: Reader, fetch: Fetch) -> Iterator[memoryview]:
        try:
            buffer = reader.take(min(fetch.deadline - time.monotonic(), self._habits.patience))
        except Empty:
            fetch.progress.check()
            if fetch.deadline <= time.monotonic():
                raise TransferTimeout("the deadline passed before the sender's memory was read") from None
            raise PeerLost(f"KV peer {self._peer.name} sent nothing for {self._habits.patience:g} s") from None
        if buffer is None:
            raise PeerLost(f"Mooncake cannot read the memory of KV peer {self._peer.name}")
        try:
            yield buffer
        finally:
            reader.give(buffer)

    def _vouched(self, fetch: Fetch, piece: Piece, data: memoryview) -> None:
        """Have the sender confirm, after the read, that the blocks still have the published content."""
        request = {"id": fetch.ticket.id, "piece": astuple(piece), "checked": self._habits.checked}
        reply = self._ask(Kind.VOUCH, request, fetch.deadline)
        if reply.get("mark") != generation_mark(fetch.generations[piece.first : piece.last]):
            raise Corrupted(f"{piece} arrived with another generation than the ticket's")
        if self._habits.checked and reply.get("crc") != self._habits.crc(data, 0):
            raise Corrupted(f"{piece} arrived with a wrong checksum")

    def _places(self, piece: Piece, blocks: Ids) -> list[Place]:
        """Return the ranges of the sender's memory that make up the piece, in wire order."""
        ids, size = blocks[piece.first : piece.last], self._peer.layout.plane_bytes
        if ids.min() < 0 or ids.max() >= self._blocks:
            raise BadTransfer(f"the KV ticket names blocks outside the sender's {self._blocks}")
        ranges, layer_bytes = runs(ids), size * self._blocks
        layers = range(piece.top, piece.bottom)
        starts = (base + layer * layer_bytes for layer in layers for base in self._bases)
        return [(start + size * a, size * (b - a)) for start in starts for a, b in ranges]


class Reader:
    """A thread that reads the pieces of a fetch in order, up to MAX_READ_AHEAD before they are taken.

    The thread may run longer than the caller waits; it then releases its buffers itself.
    """

    def __init__(self, engine: Mooncake, session: str, jobs: Sequence[tuple[int, list[Place]]]) -> None:
        self._engine, self._session = engine, session
        self._found: SimpleQueue[memoryview | None] = SimpleQueue()
        self._may = threading.Semaphore(AHEAD)
        self._lock = threading.Lock()
        self._left = False
        self._woken = False
        threading.Thread(target=self._work, args=(jobs,), name="mooncake-read", daemon=True).start()

    def take(self, seconds: float) -> memoryview | None:
        """Return the buffer with the next piece, or None if the read failed.

        Raises queue.Empty after the timeout, or if interrupted.
        """
        buffer = self._found.get(timeout=max(0.0, seconds))
        if not self._woken:
            return buffer
        if buffer is not None:
            self.give(buffer)
        raise Empty

    def give(self, room: memoryview) -> None:
        self._engine.rooms.give(room, well=True)
        self._may.release()

    def wake(self) -> None:
        self._woken = True
        self._found.put(None)

    def leave(self) -> None:
        with self._lock:
            self._left = True
        self._may.release()
        with suppress(Empty):
            while True:
                if (buffer := self._found.get_nowait()) is not None:
                    self._engine.rooms.give(buffer, well=True)

    def _work(self, jobs: Sequence[tuple[int, list[Place]]]) -> None:
        for size, places in jobs:
            self._may.acquire()
            if self._left or (buffer := self._read(size, places)) is None:
                break
            with self._lock:
                if not self._left:
                    self._found.put(buffer)
                    continue
            self._engine.rooms.give(buffer, well=True)
        self._found.put(None)

    def _read(self, size: int, places: list[Place]) -> memoryview | None:
        try:
            buffer = self._engine.rooms.take(size)
        except PeerUnreachable as error:
            log.warning("Mooncake read not started: reason=%s", error)
            return None
        if self._engine.read(self._session, buffer, places):
            return buffer
        self._engine.rooms.give(buffer, well=False)
        return None


class MooncakeTransport:
    kind = "mooncake"

    def __init__(self, layout: Layout, engine: Mooncake, habits: Habits | None = None) -> None:
        self._layout = layout
        self._engine = engine
        self._habits = habits or Habits(streams=1)

    def connect(self, peer: Peer, deadline: float) -> MooncakeLink:
        dial = dialling(peer.endpoints["mooncake"])
        return MooncakeLink(peer, self._layout, dial, self._habits, self._engine, deadline)


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data
