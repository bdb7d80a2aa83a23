"""Mooncake's Transfer Engine: the receiver reads the sender's registered memory, by RDMA where there is some, else by
its TCP. Leases travel over our own connection, and so does what makes a read count: after the last byte, the sender
vouches that lease and generations still stood.

The engine cannot be told to stop, and gives up on a silent peer only after half a minute. So it never writes to a
cache: each read has a room of its own, and who waits no longer leaves the room to the engine.

The engine authenticates no peer: a process that reaches its ports may read and overwrite the registered memory, which
is the whole cache. Its listeners are therefore confined to one address, and blocks carry a checksum from when they are
published, so that a receiver notices a write of somebody else (see docs/cluster.md).
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

AHEAD = 2  # rooms that may be full at once for one fetch
ROOM = 4 << 20  # bytes of a room, unless a piece needs more
MOST_ROOMS = 32
QUARANTINE = 60.0  # seconds that a room of a failed read is left alone: twice as long as the engine waits for anybody
Place = tuple[int, int]  # an address and a length


class Rooms:
    """Registered memory that pieces arrive in. A room is idle, with a read, or left to the engine."""

    def __init__(self, register: Callable[[memoryview], None], most: int = MOST_ROOMS) -> None:
        self._register = register
        self._most = most
        self._lock = threading.Lock()
        self._idle: list[memoryview] = []
        self._ill: list[tuple[float, memoryview]] = []  # since when
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
                raise PeerUnreachable("too many reads of this engine were given up lately")
            self._count += 1
        try:
            room = memoryview(mmap.mmap(-1, -(-max(size, ROOM) // mmap.PAGESIZE) * mmap.PAGESIZE))
            self._register(room)
        except (OSError, PeerUnreachable):  # no memory now, or none that may be locked: there is no such room
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
    """The engine of this process: one for all senders and receivers in it."""

    def __init__(self, host: str = LOOPBACK, protocol: str = "tcp", port: int = 0) -> None:
        """Raises PeerUnreachable if it cannot be had. `probe` first: a broken wheel may take the process along.
        `host`: the IPv4 address that its listeners are confined to. `port`: the first of its two; 0: any."""
        try:
            self._engine = new_engine(port)
            with confined_to(host):
                started = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        except (MooncakeMissing, ListenerExposed) as error:
            raise PeerUnreachable(error.message, hint=error.hint) from error
        if started != 0:
            where = f"{host}:{port} and {port + 1}" if port else host
            raise PeerUnreachable(f"Mooncake does not start with {protocol} at {where}", hint="run emberline doctor")
        self.host = host
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self.rooms = Rooms(self.register)
        self._kept: dict[int, memoryview] = {}  # by address, as long as the engine may reach it

    def register(self, view: memoryview) -> None:
        if self._engine.register_memory(_address(view), len(view)) != 0:
            raise PeerUnreachable(
                f"Mooncake cannot register {len(view)} bytes", hint="raise the limit of locked memory"
            )
        self._kept[_address(view)] = view

    def forget(self, view: memoryview) -> None:
        """Nobody can read it any more."""
        if self._engine.unregister_memory(_address(view)) == 0:
            del self._kept[_address(view)]

    def read(self, session: str, room: memoryview, places: Sequence[Place]) -> bool:
        """Bytes at these addresses and of these lengths, one after the other into the room. May take half a minute."""
        at, targets = _address(room), []
        for _, length in places:
            targets.append(at)
            at += length
        addresses, lengths = [address for address, _ in places], [length for _, length in places]
        try:
            return self._engine.batch_transfer_sync_read(session, targets, addresses, lengths) == 0
        except Exception:
            log.exception("Mooncake failed to read")
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
        told = {"session": self._engine.session, "bases": [*map(_address, region.parts)], "blocks": region.blocks}
        channel.tell(Kind.OKAY, transfer, told, time.monotonic() + self._patience)


def serve_mooncake(sender: Sender, engine: Mooncake, port: int = 0, *, patience: float = PATIENCE) -> MooncakeServer:
    """Serve leases at the engine's address. The endpoint names it, and a receiver learns there where the memory is."""
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
            told = self._told(channel, Kind.ATTACH, {}, deadline)
        try:
            self._session, self._blocks = str(told["session"]), int(told["blocks"])
            self._bases = [int(base) for base in told["bases"]]
        except (KeyError, TypeError, ValueError) as error:
            raise BadTransfer(f"the sender does not say where its memory is: {error!r}") from error
        if len(self._bases) != self._peer.layout.parts or self._blocks < 1:
            raise BadTransfer("the sender's memory is not as its layout says")

    def fetch(self, fetch: Fetch) -> None:
        layout = self._peer.layout
        jobs = [(piece.size(layout), self._places(piece, fetch.blocks)) for piece in fetch.pieces]
        reader = Reader(self._engine, self._session, jobs)
        try:
            with fetch.progress.stopping(reader.wake):
                for piece in fetch.pieces:
                    with self._taken(reader, fetch) as room:
                        data = room[: piece.size(layout)]
                        self._vouched(fetch, piece, data)
                        fetch.scatter(piece, data)
                    fetch.landed(piece)
        finally:
            reader.leave()

    @contextmanager
    def _taken(self, reader: Reader, fetch: Fetch) -> Iterator[memoryview]:
        try:
            room = reader.take(min(fetch.deadline - time.monotonic(), self._habits.patience))
        except Empty:
            fetch.progress.check()
            if fetch.deadline <= time.monotonic():
                raise TransferTimeout("the sender's memory could not be read in time") from None
            raise PeerLost(f"{self._peer.name} was silent for {self._habits.patience:g} s") from None
        if room is None:
            raise PeerLost(f"{self._peer.name} does not let its memory be read")
        try:
            yield room
        finally:
            reader.give(room)

    def _vouched(self, fetch: Fetch, piece: Piece, data: memoryview) -> None:
        """The sender's word, given after the read, that these were the bytes it had published."""
        asked = {"id": fetch.ticket.id, "piece": astuple(piece), "checked": self._habits.checked}
        told = self._ask(Kind.VOUCH, asked, fetch.deadline)
        if told.get("mark") != generation_mark(fetch.generations[piece.first : piece.last]):
            raise Corrupted("a piece of another generation arrived")
        if self._habits.checked and told.get("crc") != self._habits.crc(data, 0):
            raise Corrupted(f"{piece} arrived with a wrong checksum")

    def _places(self, piece: Piece, blocks: Ids) -> list[Place]:
        """Addresses and lengths over there, in the order of the wire."""
        ids, size = blocks[piece.first : piece.last], self._peer.layout.plane_bytes
        if ids.min() < 0 or ids.max() >= self._blocks:
            raise BadTransfer("the ticket names blocks that the sender does not have")
        found, each = runs(ids), size * self._blocks
        layers = range(piece.top, piece.bottom)
        starts = (base + layer * each for layer in layers for base in self._bases)
        return [(start + size * a, size * (b - a)) for start in starts for a, b in found]


class Reader:
    """Reads one piece after the other, one ahead of who takes them, in a thread that may outlive the wait for it. Then
    it gives the rooms back by itself."""

    def __init__(self, engine: Mooncake, session: str, jobs: Sequence[tuple[int, list[Place]]]) -> None:
        self._engine, self._session = engine, session
        self._found: SimpleQueue[memoryview | None] = SimpleQueue()
        self._may = threading.Semaphore(AHEAD)
        self._lock = threading.Lock()
        self._left = False
        self._woken = False
        threading.Thread(target=self._work, args=(jobs,), name="mooncake-read", daemon=True).start()

    def take(self, seconds: float) -> memoryview | None:
        """The next piece; None: it cannot be read. Empty: not within that time, or woken."""
        found = self._found.get(timeout=max(0.0, seconds))
        if not self._woken:
            return found
        if found is not None:
            self.give(found)
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
                if (room := self._found.get_nowait()) is not None:
                    self._engine.rooms.give(room, well=True)

    def _work(self, jobs: Sequence[tuple[int, list[Place]]]) -> None:
        for size, places in jobs:
            self._may.acquire()
            if self._left or (room := self._read(size, places)) is None:
                break
            with self._lock:
                if not self._left:
                    self._found.put(room)
                    continue
            self._engine.rooms.give(room, well=True)
        self._found.put(None)

    def _read(self, size: int, places: list[Place]) -> memoryview | None:
        try:
            room = self._engine.rooms.take(size)
        except PeerUnreachable as error:
            log.warning("%s", error)
            return None
        if self._engine.read(self._session, room, places):
            return room
        self._engine.rooms.give(room, well=False)
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
