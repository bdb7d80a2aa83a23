"""KV transfers between GPUs of one host by CUDA IPC.

The receiver maps the sender's KV cache into its own address space and copies blocks from it.

Control messages and leases (the time for which the sender keeps blocks unchanged) use a Unix socket. After a copy,
the sender confirms that the lease is still valid and that no block was reused. Mapped memory stays allocated after
the sender's process has ended, so a thread waits until the sender disconnects and then unmaps the memory."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import torch

from emberline.engine.gpu.region import DeviceRegion
from emberline.kernels.cuda import ipc
from emberline.kernels.cuda.driver import CudaDriverError
from emberline.kernels.cuda.ipc import ExportedMemory, OpenedMemory
from emberline.kv.transfer import errors, unix
from emberline.kv.transfer.base import PieceFetch
from emberline.kv.transfer.channel import IO_TIMEOUT_S, MessageChannel, MessageKind
from emberline.kv.transfer.endpoint import SameHostAccess
from emberline.kv.transfer.link import Connector, LinkOptions, StreamLink
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.region import BlockIds
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.server import IDLE_TIMEOUT_S, TransferServer, compute_generations_crc
from emberline.kv.transfer.ticket import Peer

log = logging.getLogger("emberline.transfer")


def make_ipc_transport(region: DeviceRegion) -> SameHostAccess | None:
    """Return the IPC transport of a region; None if its memory cannot be shared."""
    if region.device.type != "cuda":
        return None
    try:
        exported = [ipc.export_memory(part) for part in region.parts]
    except CudaDriverError as error:
        log.warning("Sharing GPU memory failed, KV transfers use main memory: reason=%s", error)
        return None

    def serve(sender: Sender) -> TransferServer:
        listener, sender.endpoints[IpcTransport.kind] = unix.create_unix_listener()
        return IpcServer(sender, exported, listener)

    return SameHostAccess(IpcTransport(region), serve)


class IpcServer(TransferServer):
    def __init__(self, sender: Sender, parts: Sequence[ExportedMemory], listener: socket.socket) -> None:
        self._parts = parts
        super().__init__(sender, listener)

    def _share_memory(self, channel: MessageChannel, transfer_id: int) -> None:
        unix.check_same_user(channel)
        parts = [(part.handle.hex(), part.offset) for part in self._parts]
        reply = {"parts": parts, "blocks": self._sender.region.blocks}
        channel.send_json(MessageKind.OKAY, transfer_id, reply, time.monotonic() + IO_TIMEOUT_S)


class PeerMemory:
    """A sender's KV cache, mapped into this process until the last user has called `release`.

    The object's creator counts as the first user. Garbage collection would unmap the memory too late, since exceptions
    keep references to local variables."""

    def __init__(self, blocks: int, parts: Sequence[ExportedMemory], device: torch.device) -> None:
        self.blocks = blocks
        self._users, self._lock = 1, threading.Lock()
        self._opened: dict[bytes, OpenedMemory] = {}
        try:
            for handle, _ in parts:
                if handle not in self._opened:  # two parts may be in one allocation
                    self._opened[handle] = OpenedMemory(handle, device)
        except CudaDriverError:
            self.release()
            raise
        self.bases = [self._opened[handle].address + offset for handle, offset in parts]

    @contextmanager
    def keep_mapped(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                raise errors.PeerUnreachable("the sender has disconnected, and its GPU memory was unmapped")
            self._users += 1
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            opened = [] if self._users else list(self._opened.values())
        for one in opened:
            with suppress(CudaDriverError):  # the device was lost
                one.close()


class IpcLink(StreamLink):
    def __init__(self, peer: Peer, region: DeviceRegion, dial: Connector, deadline: float) -> None:
        self._region = region
        super().__init__(peer, region.layout, dial, LinkOptions(connections=1), deadline)

    def _prepare_first_fetch(self, deadline: float) -> None:
        with self._borrow_channel(deadline) as channel:
            reply = self._send_and_receive(channel, MessageKind.ATTACH, {}, deadline)
        try:
            self._memory = self._map_peer_memory(reply)
        except CudaDriverError as error:
            raise errors.PeerUnreachable(f"GPU memory of {self._peer.name} cannot be mapped: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise errors.BadTransfer(f"the sender's description of its GPU memory is invalid: {error!r}") from error
        threading.Thread(target=self._release_after_disconnect, name="kv-watch", daemon=True).start()

    def _map_peer_memory(self, reply: dict[str, Any]) -> PeerMemory:
        parts = [ExportedMemory(bytes.fromhex(handle), int(offset)) for handle, offset in reply["parts"]]
        if len(parts) != len(self._region.parts) or any(len(handle) != ipc.HANDLE_BYTES for handle, _ in parts):
            raise ValueError(
                f"the other worker's memory must have {len(self._region.parts)} valid handles; it sent {len(parts)}"
            )
        return PeerMemory(int(reply["blocks"]), parts, self._region.device)

    def _release_after_disconnect(self) -> None:
        """Wait until the sender disconnects or this link is closed, then release the sender's memory."""
        while not self._closed:
            try:
                channel = self._open_channel(time.monotonic() + IO_TIMEOUT_S)
            except errors.TransferError:
                break
            if not self._closed:
                with suppress(errors.PeerLost):  # the sender also disconnects idle connections
                    channel.wait_for_message(IDLE_TIMEOUT_S)
            self._return_channel(channel)
        self._memory.release()

    def fetch(self, fetch: PieceFetch) -> None:
        """Copy all KV blocks of a fetch at once. The copy cannot be cancelled, but it is short."""
        fetch.progress.raise_if_cancelled()
        if time.monotonic() >= fetch.deadline:
            raise errors.TransferTimeout("the deadline of the KV transfer passed before the copy was started")
        if not fetch.pieces:
            return
        try:
            with self._memory.keep_mapped(), self._region.direct_write():
                for piece in merge_adjacent_layers(fetch.pieces):
                    part = slice(piece.first_block, piece.end_block)
                    self._copy_blocks(piece, fetch.blocks[part], fetch.target_blocks[part])
        except CudaDriverError as error:
            raise errors.PeerUnreachable(f"GPU memory of {self._peer.name} cannot be copied: {error}") from error
        self._verify_unchanged(fetch)
        for piece in fetch.pieces:
            fetch.mark_arrived(piece)

    def _copy_blocks(self, piece: TransferPiece, source_blocks: BlockIds, target_blocks: BlockIds) -> None:
        memory = self._memory
        if source_blocks.min() < 0 or source_blocks.max() >= memory.blocks:
            raise errors.BadTransfer(
                f"the ticket has block ids outside [0, {memory.blocks}), the range of the sender's cache"
            )
        size, height = self._layout.plane_bytes, piece.end_layer - piece.first_layer
        sender_layer_bytes, layer_bytes = memory.blocks * size, self._region.blocks * size  # bytes of a layer
        for base, part in zip(memory.bases, self._region.parts, strict=True):
            source, target = (
                base + piece.first_layer * sender_layer_bytes,
                part.data_ptr() + piece.first_layer * layer_bytes,
            )
            for a, b, count in _contiguous_runs(source_blocks, target_blocks):
                ipc.copy_rows(
                    source + a * size, sender_layer_bytes, target + b * size, layer_bytes, count * size, height
                )

    def _verify_unchanged(self, fetch: PieceFetch) -> None:
        """Raise TransferCorrupted if the sender reused one of the copied blocks before the copy ended."""
        first, last = min(piece.first_block for piece in fetch.pieces), max(piece.end_block for piece in fetch.pieces)
        whole = TransferPiece(0, self._layout.layers, first, last)
        query = {"id": fetch.ticket.id, "piece": astuple(whole), "checked": False}
        if self._call(MessageKind.CONFIRM_READ, query, fetch.deadline).get("mark") != compute_generations_crc(
            fetch.generations[first:last]
        ):
            raise errors.TransferCorrupted("the sender reused KV blocks while they were being copied")


class IpcTransport:
    kind = "cuda"

    def __init__(self, region: DeviceRegion) -> None:
        self._region = region

    def connect(self, peer: Peer, deadline: float) -> IpcLink:
        if peer.layout.tokens != self._region.layout.tokens:
            raise errors.PeerUnreachable(
                f"{peer.name} has blocks of {peer.layout.tokens} tokens instead of {self._region.layout.tokens}, which "
                "CUDA IPC cannot convert"
            )
        return IpcLink(peer, self._region, unix.make_unix_connector(peer.endpoints[self.kind]), deadline)


def merge_adjacent_layers(pieces: Iterable[TransferPiece]) -> list[TransferPiece]:
    """Merge transfer pieces that contain the same KV blocks in adjacent layers."""
    merged: list[TransferPiece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.first_block, piece.end_block, piece.first_layer)):
        last = merged[-1] if merged else None
        if (
            last
            and replace(last, first_layer=piece.first_layer, end_layer=piece.end_layer) == piece
            and last.end_layer == piece.first_layer
        ):
            merged[-1] = replace(last, end_layer=piece.end_layer)
        else:
            merged.append(piece)
    return merged


def _contiguous_runs(source_blocks: BlockIds, target_blocks: BlockIds) -> list[tuple[int, int, int]]:
    """Return runs of KV blocks that are adjacent in both lists, each as (first source, first target, count)."""
    steps = (np.diff(source_blocks) != 1) | (np.diff(target_blocks) != 1)
    starts = [0, *(np.flatnonzero(steps) + 1).tolist()]
    ends = [*starts[1:], len(source_blocks)]
    return [(int(source_blocks[a]), int(target_blocks[a]), b - a) for a, b in zip(starts, ends, strict=True)]
