"""The Mooncake transport: the receiver reads the sender's memory by RDMA or TCP.

The memory is the sender's cache or, if that cannot be read as a whole, slots to which the sender copies pieces
(`staged_pieces.py`). Messages about leases use a connection of our own. Data counts as received only after the sender
has confirmed, after the last byte, that the lease is valid and that the blocks were not overwritten.

A read of Mooncake's engine cannot be cancelled, and it waits up to 30 s for a peer that does not answer. So the engine
never writes to a KV cache. Each read has its own buffer, and a caller that stops waiting leaves the buffer to the
engine.

The engine authenticates no peer. A process that reaches its ports may read and overwrite the registered memory, which
may be the whole cache. Its listeners are therefore restricted to one address, and tickets contain checksums of the
blocks, so that a receiver notices a write by a stranger (see docs/cluster.md).
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from emberline.kv.codec import address_of
from emberline.kv.confine import LOOPBACK, ListenerExposed, restrict_new_listeners
from emberline.kv.mooncake import MooncakeMissing, new_engine
from emberline.kv.transfer.base import PieceFetch
from emberline.kv.transfer.channel import MessageKind
from emberline.kv.transfer.errors import (
    BadTransfer,
    PeerLost,
    PeerUnreachable,
    TransferCorrupted,
    TransferError,
    TransferTimeout,
)
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.link import Connector, LinkOptions, StreamLink
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.region import BlockIds, contiguous_ranges
from emberline.kv.transfer.server import compute_generations_crc
from emberline.kv.transfer.tcp import make_tcp_connector
from emberline.kv.transfer.ticket import Peer

log = logging.getLogger("emberline.transfer")

MAX_READ_AHEAD = 2  # buffers that one fetch may fill before the caller takes them
MIN_BUFFER_BYTES = 4 << 20
MAX_BUFFERS = 32
QUARANTINE_S = 60.0  # the buffer of a failed read is not reused for this time: twice the engine's own timeout
MemoryRange = tuple[int, int]  # address and length


class RegisteredBuffers:
    """A pool of buffers that are registered with Mooncake's engine, into which pieces are read.

    A buffer is idle, in use, or not usable for a while because its read failed and may still be running.
    """

    def __init__(self, register: Callable[[memoryview], None], max_buffers: int = MAX_BUFFERS) -> None:
        self._register = register
        self._max_buffers = max_buffers
        self._lock = threading.Lock()
        self._idle: list[memoryview] = []
        self._quarantined: list[tuple[float, memoryview]] = []  # time of the failed read, buffer
        self._count = 0

    def acquire_buffer(self, num_bytes: int) -> memoryview:
        with self._lock:
            now = time.monotonic()
            self._idle += [buffer for since, buffer in self._quarantined if now - since > QUARANTINE_S]
            self._quarantined = [entry for entry in self._quarantined if now - entry[0] <= QUARANTINE_S]
            found = next((i for i, buffer in enumerate(self._idle) if len(buffer) >= num_bytes), None)
            if found is not None:
                return self._idle.pop(found)
            if self._count >= self._max_buffers:
                raise PeerUnreachable(
                    f"all {self._max_buffers} buffers for Mooncake reads are in use or blocked by failed reads"
                )
            self._count += 1
        try:
            buffer = memoryview(mmap.mmap(-1, -(-max(num_bytes, MIN_BUFFER_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE))
            self._register(buffer)
        except (OSError, PeerUnreachable):  # out of memory, or of memory that may be locked
            with self._lock:
                self._count -= 1
            raise
        return buffer

    def release_buffer(self, buffer: memoryview, *, reusable: bool) -> None:
        with self._lock:
            if reusable:
                self._idle.append(buffer)
            else:
                self._quarantined.append((time.monotonic(), buffer))


class MooncakeEngine:
    """Mooncake's Transfer Engine in this process. All senders and receivers of the process share it."""

    def __init__(self, host: str = LOOPBACK, protocol: str = "tcp", port: int = 0) -> None:
        """Start the engine.

        Call `check_mooncake_usable` first, because an unsuitable Mooncake wheel may crash the process. The engine is
        reachable only at the IPv4 address `host`, at `port` and the next port; with 0, at any free ports. Raises
        PeerUnreachable if the engine does not start.
        """
        try:
            self._engine = new_engine(port)
            with restrict_new_listeners(host):
                started = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        except (MooncakeMissing, ListenerExposed) as error:
            raise PeerUnreachable(error.message, hint=error.hint) from error
        if started != 0:
            address = f"{host}:{port} and {port + 1}" if port else host
            raise PeerUnreachable(
                f"Mooncake's engine does not start with protocol {protocol} at {address}", hint="run emberline doctor"
            )
        self.host = host
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self.buffers = RegisteredBuffers(self.register_memory)
        self._registered: dict[
            int, memoryview
        ] = {}  # by address; keeps the memory alive while the engine may access it

    def register_memory(self, view: memoryview) -> None:
        if self._engine.register_memory(address_of(view), len(view)) != 0:
            raise PeerUnreachable(
                f"Mooncake cannot register {len(view)} bytes of memory",
                hint="raise the limit of locked memory (ulimit -l)",
            )
        self._registered[address_of(view)] = view

    def unregister_memory(self, view: memoryview) -> None:
        """Withdraw the memory from the engine, so that peers can no longer access it."""
        if self._engine.unregister_memory(address_of(view)) == 0:
            del self._registered[address_of(view)]

    def read_remote_memory(self, peer_session: str, buffer: memoryview, ranges: Sequence[MemoryRange]) -> bool:
        """Read ranges of the peer's memory into the buffer, one after the other. Return whether the read succeeded.

        A read may take up to 30 s.
        """
        position, targets = address_of(buffer), []
        for _, length in ranges:
            targets.append(position)
            position += length
        addresses, lengths = [address for address, _ in ranges], [length for _, length in ranges]
        try:
            return self._engine.batch_transfer_sync_read(peer_session, targets, addresses, lengths) == 0
        except Exception:
            log.exception("Mooncake read failed: peer=%s", peer_session)
            return False


class MooncakeLink(StreamLink):
    def __init__(
        self,
        peer: Peer,
        layout: KVLayout,
        connect: Connector,
        options: LinkOptions,
        engine: MooncakeEngine,
        deadline: float,
    ) -> None:
        self._engine = engine
        super().__init__(peer, layout, connect, options, deadline)

    def _prepare_first_fetch(self, deadline: float) -> None:
        with self._borrow_channel(deadline) as channel:
            reply = self._send_and_receive(channel, MessageKind.ATTACH, {}, deadline)
        with _report_malformed_reply():
            self._session, self._is_staged = str(reply["session"]), reply.get("staged") is True
            self._blocks = 0 if self._is_staged else int(reply["blocks"])
            self._bases = [] if self._is_staged else [int(base) for base in reply["bases"]]
        if not self._is_staged and (len(self._bases) != self._peer.layout.parts or self._blocks < 1):
            raise BadTransfer("the KV sender's description of its memory does not match its cache layout")

    def fetch(self, fetch: PieceFetch) -> None:
        read = partial(self._read_staged_piece if self._is_staged else self._read_piece, fetch)
        reader = MooncakePieceReader(self._engine.buffers, fetch.pieces, read)
        try:
            with fetch.progress.stop_on_cancel(reader.interrupt):
                for piece in fetch.pieces:
                    with self._next_piece(reader, fetch) as read_piece:
                        data = read_piece.buffer[: piece.num_bytes(self._peer.layout)]
                        confirmation = read_piece.confirmation
                        if confirmation is None:
                            confirmation = self._confirm_read(fetch, piece)
                        self._check_piece(fetch, piece, data, confirmation)
                        fetch.scatter(piece, data)
                    fetch.mark_arrived(piece)
        finally:
            reader.close()

    @contextmanager
    def _next_piece(self, reader: MooncakePieceReader, fetch: PieceFetch) -> Iterator[ReadPiece]:
        try:
            piece = reader.take_piece(min(fetch.deadline - time.monotonic(), self._options.io_timeout_s))
        except Empty:
            fetch.progress.raise_if_cancelled()
            if fetch.deadline <= time.monotonic():
                raise TransferTimeout("the deadline passed before the KV sender's memory was read") from None
            raise PeerLost(f"KV peer {self._peer.name} sent nothing for {self._options.io_timeout_s:g} s") from None
        try:
            yield piece
        finally:
            reader.release_buffer(piece.buffer)

    # -- run by the reader's thread --------------------------------------------------------------------------------

    def _read_piece(self, fetch: PieceFetch, piece: TransferPiece) -> ReadPiece:
        """Read a piece of the sender's cache into a buffer, without asking the sender to confirm the read.

        `fetch` does that in its own thread, while this one reads the next piece."""
        ranges = self._remote_ranges(piece, fetch.blocks)
        with self._take_buffer(piece) as buffer:
            self._read_ranges(buffer, ranges)
            return ReadPiece(buffer)

    def _read_staged_piece(self, fetch: PieceFetch, piece: TransferPiece) -> ReadPiece:
        """Let the sender copy a piece to a slot, read it there, and confirm the read, which frees the slot."""
        with self._take_buffer(piece) as buffer:
            request = {"id": fetch.ticket.id, "piece": astuple(piece), "checked": self._options.use_checksums}
            reply = self._call(MessageKind.STAGE_PIECE, request, fetch.deadline)
            with _report_malformed_reply():
                number, address = int(reply["number"]), int(reply["address"])
            self._read_ranges(buffer, [(address, piece.num_bytes(self._peer.layout))])
            return ReadPiece(buffer, self._confirm_read(fetch, piece, number=number))

    @contextmanager
    def _take_buffer(self, piece: TransferPiece) -> Iterator[memoryview]:
        """Yield a buffer for a piece, and release it if an error is raised.

        Without an error it stays in use, and the caller of `take_piece` releases it."""
        try:
            buffer = self._engine.buffers.acquire_buffer(piece.num_bytes(self._peer.layout))
        except PeerUnreachable as error:
            raise PeerLost(f"Mooncake cannot read the memory of KV peer {self._peer.name}: {error}") from error
        try:
            yield buffer
        except BaseException as error:
            self._engine.buffers.release_buffer(buffer, reusable=not isinstance(error, ReadFailed))
            raise

    def _read_ranges(self, buffer: memoryview, ranges: Sequence[MemoryRange]) -> None:
        if not self._engine.read_remote_memory(self._session, buffer, ranges):
            raise ReadFailed(f"Mooncake cannot read the memory of KV peer {self._peer.name}")

    # -- confirmations ---------------------------------------------------------------------------------------------

    def _confirm_read(self, fetch: PieceFetch, piece: TransferPiece, **staged: int) -> dict[str, Any]:
        """Ask the sender, after the read, to confirm that the blocks still have the published content."""
        request = {"id": fetch.ticket.id, "piece": astuple(piece), "checked": self._options.use_checksums}
        return self._call(MessageKind.CONFIRM_READ, request | staged, fetch.deadline)

    def _check_piece(
        self, fetch: PieceFetch, piece: TransferPiece, data: memoryview, confirmation: dict[str, Any]
    ) -> None:
        if confirmation.get("mark") != compute_generations_crc(fetch.generations[piece.first_block : piece.end_block]):
            raise TransferCorrupted(f"the KV blocks of {piece} were overwritten after the ticket was issued")
        if self._options.use_checksums and confirmation.get("crc") != self._options.crc(data, 0):
            raise TransferCorrupted(f"the KV data of {piece} arrived with a wrong checksum")

    def _remote_ranges(self, piece: TransferPiece, blocks: BlockIds) -> list[MemoryRange]:
        """Return the ranges of the sender's memory that make up the piece, in the order of the wire format."""
        ids, size = blocks[piece.first_block : piece.end_block], self._peer.layout.plane_bytes
        if ids.min() < 0 or ids.max() >= self._blocks:
            raise BadTransfer(
                f"the KV ticket lists a block that the sender does not have: it has {self._blocks} blocks"
            )
        ranges, layer_bytes = contiguous_ranges(ids), size * self._blocks
        layers = range(piece.first_layer, piece.end_layer)
        starts = (base + layer * layer_bytes for layer in layers for base in self._bases)
        return [(start + size * a, size * (b - a)) for start in starts for a, b in ranges]


@contextmanager
def _report_malformed_reply() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise BadTransfer(f"the KV sender's description of its memory is malformed: {error!r}") from error


class ReadFailed(PeerLost):
    """Mooncake's engine reported an error, but it may still write to the buffer of the read."""


@dataclass(frozen=True, slots=True)
class ReadPiece:
    buffer: memoryview
    confirmation: dict[str, Any] | None = None  # the sender's, if it was asked for already


class MooncakePieceReader:
    """A thread that reads the pieces of a fetch in order, at most MAX_READ_AHEAD pieces in advance.

    The thread may run longer than the caller waits. Then it releases its buffers itself.
    """

    def __init__(
        self,
        buffers: RegisteredBuffers,
        pieces: Sequence[TransferPiece],
        read: Callable[[TransferPiece], ReadPiece],
    ) -> None:
        """`read`: reads a piece into one of `buffers`, or raises TransferError."""
        self._buffers, self._read = buffers, read
        self._results: SimpleQueue[ReadPiece | TransferError | None] = SimpleQueue()
        self._permits = threading.Semaphore(MAX_READ_AHEAD)
        self._lock = threading.Lock()
        self._closed = False
        self._interrupted = False
        threading.Thread(target=self._read_pieces, args=(pieces,), name="mooncake-read", daemon=True).start()

    def take_piece(self, timeout_s: float) -> ReadPiece:
        """Return the next piece, whose buffer the caller must release. Raises the error of the read if it failed.

        Raises queue.Empty after the timeout, or if `interrupt` was called.
        """
        result = self._results.get(timeout=max(0.0, timeout_s))
        if self._interrupted:
            if isinstance(result, ReadPiece):
                self.release_buffer(result.buffer)
            raise Empty
        if isinstance(result, ReadPiece):
            return result
        assert result is not None, "only `interrupt` puts None"
        raise result

    def release_buffer(self, buffer: memoryview) -> None:
        self._buffers.release_buffer(buffer, reusable=True)
        self._permits.release()

    def interrupt(self) -> None:
        self._interrupted = True
        self._results.put(None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._permits.release()
        with suppress(Empty):
            while True:
                if isinstance(result := self._results.get_nowait(), ReadPiece):
                    self._buffers.release_buffer(result.buffer, reusable=True)

    def _read_pieces(self, pieces: Sequence[TransferPiece]) -> None:
        for piece in pieces:
            self._permits.acquire()
            if self._closed:
                return
            result = self._read_one(piece)
            with self._lock:
                if not self._closed:
                    self._results.put(result)
                    if isinstance(result, TransferError):
                        return
                    continue
            if isinstance(result, ReadPiece):
                self._buffers.release_buffer(result.buffer, reusable=True)

    def _read_one(self, piece: TransferPiece) -> ReadPiece | TransferError:
        try:
            return self._read(piece)
        except TransferError as error:
            return error
        except Exception as error:
            log.exception("Mooncake read failed unexpectedly")
            return TransferError(f"a KV piece could not be read: {error!r}")


class MooncakeTransport:
    kind = "mooncake"

    def __init__(self, layout: KVLayout, engine: MooncakeEngine, options: LinkOptions | None = None) -> None:
        self._layout = layout
        self._engine = engine
        self._options = options or LinkOptions(connections=1)

    def connect(self, peer: Peer, deadline: float) -> MooncakeLink:
        dial = make_tcp_connector(peer.endpoints[self.kind])
        return MooncakeLink(peer, self._layout, dial, self._options, self._engine, deadline)
