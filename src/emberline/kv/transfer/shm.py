"""The shared-memory transport: a receiver on the same host maps the sender's cache and copies from it.

Messages about leases use a Unix socket. The memory is an unnamed file. Its descriptor is passed between the processes,
so the memory is freed when the last of them ends. The memory also holds the generation numbers of the blocks, so that
the receiver notices an overwritten block right after its copy. A copy counts only if the lease was still valid after
it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from emberline.kv.transfer import unix
from emberline.kv.transfer.base import PieceFetch
from emberline.kv.transfer.channel import IO_TIMEOUT_S, MessageChannel, MessageKind
from emberline.kv.transfer.errors import BadTransfer, BlockReused, PeerLost, PeerUnreachable, TransferTimeout
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.link import LinkOptions, StreamLink
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.region import HostRegion, StagingBuffer, copy_piece
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.server import TransferServer
from emberline.kv.transfer.ticket import Peer


class SharedSegment:
    """The memory of a KV cache that other processes can map: the generation numbers, then the keys, then the values."""

    def __init__(self, layout: KVLayout, blocks: int) -> None:
        self.size = sum(_section_sizes(layout, blocks))
        self.fd, self._read_only = _create_memory_file(self.size)
        self.memory = mmap.mmap(self.fd, self.size)
        self.region = _region_in_memory(layout, blocks, self.memory)

    def open_read_only(self) -> int:
        """Return a new read-only file descriptor of the memory."""
        if self._read_only is not None:
            return os.dup(self._read_only)
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)


def _create_memory_file(size: int) -> tuple[int, int | None]:
    """Create an unnamed file of this size and return its descriptor.

    On macOS, which has no /proc, also return a read-only descriptor, otherwise None.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("emberline-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        # A receiver's access to its mapping would fault if the file shrank.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd, None
    fd, path = tempfile.mkstemp(prefix="emberline-kv-")  # macOS: without seals
    try:
        os.ftruncate(fd, size)
        return fd, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        Path(path).unlink()


class ShmServer(TransferServer):
    def __init__(self, sender: Sender, segment: SharedSegment, listener: socket.socket, io_timeout_s: float) -> None:
        self._segment = segment
        super().__init__(sender, listener, io_timeout_s=io_timeout_s)

    def _share_memory(self, channel: MessageChannel, transfer_id: int) -> None:
        unix.check_same_user(channel)
        deadline, fd = time.monotonic() + self._io_timeout_s, self._segment.open_read_only()
        try:
            channel.send_json(MessageKind.OKAY, transfer_id, {"blocks": self._segment.region.blocks}, deadline)
            socket.send_fds(channel.socket, [b"\0"], [fd])
        finally:
            os.close(fd)


def serve_shm(sender: Sender, segment: SharedSegment, *, io_timeout_s: float = IO_TIMEOUT_S) -> ShmServer:
    """Serve the sender at a new Unix socket. The sender must publish from the region of `segment`."""
    assert sender.region is segment.region
    listener, sender.endpoints["shm"] = unix.create_unix_listener()
    return ShmServer(sender, segment, listener, io_timeout_s)


class ShmLink(StreamLink):
    def _prepare_first_fetch(self, deadline: float) -> None:
        self._source = self._map_region(deadline)

    def fetch(self, fetch: PieceFetch) -> None:
        ticket, staging, renewed = fetch.ticket, StagingBuffer(), time.monotonic()
        for piece in fetch.pieces:
            fetch.progress.raise_if_cancelled()
            now = time.monotonic()
            if now >= fetch.deadline:
                raise TransferTimeout("the deadline passed before all pieces of the KV transfer were copied")
            if now - renewed > ticket.lease / 3:
                self.renew(ticket, fetch.deadline)
                renewed = now
            copy_piece(piece, self._source, fetch.blocks, fetch.region, fetch.target_blocks, staging)
            self._check_unchanged(fetch, piece)
            fetch.mark_arrived(piece)

    def _check_unchanged(self, fetch: PieceFetch, piece: TransferPiece) -> None:
        """Raise BlockReused if a block of the piece was overwritten.

        One check after the copy is enough, because generation numbers only increase.
        """
        part = slice(piece.first_block, piece.end_block)
        if not self._source.is_unchanged(fetch.blocks[part], fetch.generations[part]):
            raise BlockReused("a published KV block was overwritten before it was copied")

    def _map_region(self, deadline: float) -> HostRegion:
        with self._borrow_channel(deadline) as channel:
            blocks, fd = self._receive_descriptor(channel, deadline)
        try:
            size = sum(_section_sizes(self._peer.layout, blocks))
            if blocks < 1 or size != os.fstat(fd).st_size:
                raise BadTransfer(f"the KV sender's shared memory has a wrong size for {blocks} blocks")
            memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise PeerUnreachable(f"the KV sender's shared memory cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        return _region_in_memory(self._peer.layout, blocks, memory)

    def _receive_descriptor(self, channel: MessageChannel, deadline: float) -> tuple[int, int]:
        """Return the number of blocks of the sender's cache, and the file descriptor of its memory."""
        reply = self._send_and_receive(channel, MessageKind.ATTACH, {}, deadline)
        try:
            _, fds, _, _ = socket.recv_fds(channel.socket, 1, 1)
            return int(reply["blocks"]), fds[0]
        except (OSError, IndexError, KeyError, TypeError, ValueError) as error:
            channel.is_broken = True
            raise PeerLost(f"the KV sender did not send the file descriptor of its shared memory: {error!r}") from error


class ShmTransport:
    kind = "shm"

    def __init__(self, layout: KVLayout, options: LinkOptions | None = None) -> None:
        self._layout = layout
        self._options = options or LinkOptions(connections=1)

    def connect(self, peer: Peer, deadline: float) -> ShmLink:
        return ShmLink(peer, self._layout, unix.make_unix_connector(peer.endpoints["shm"]), self._options, deadline)


def _section_sizes(layout: KVLayout, num_blocks: int) -> list[int]:
    """Return the bytes of the generation numbers, the keys and the values, each rounded up to whole pages."""
    sizes = [8 * num_blocks] + [layout.layers * num_blocks * layout.plane_bytes] * layout.parts
    return [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]


def _region_in_memory(layout: KVLayout, num_blocks: int, memory: mmap.mmap) -> HostRegion:
    first, *others = _split_view(memoryview(memory), _section_sizes(layout, num_blocks))
    size = layout.layers * num_blocks * layout.plane_bytes
    return HostRegion(layout, [part[:size] for part in others], np.frombuffer(first[: 8 * num_blocks], np.uint64))


def _split_view(view: memoryview, sizes: list[int]) -> Iterator[memoryview]:
    start = 0
    for size in sizes:
        yield view[start : start + size]
        start += size
