"""The servers of the Mooncake transport: they serve leases, and state which memory receivers read."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from emberline.kv.codec import address_of
from emberline.kv.transfer.channel import IO_TIMEOUT_S, MessageChannel, MessageKind
from emberline.kv.transfer.mooncake import MooncakeEngine
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.region import HostRegion, StagingBuffer
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.server import TransferServer, compute_generations_crc
from emberline.kv.transfer.staged_pieces import StagedPieces
from emberline.kv.transfer.tcp import create_tcp_listener


class MooncakeServer(TransferServer):
    """A server whose receivers read memory of this process with Mooncake's engine."""

    def __init__(
        self,
        sender: Sender,
        engine: MooncakeEngine,
        memory: Sequence[memoryview],
        description: dict[str, Any],
        listener: socket.socket,
        io_timeout_s: float,
    ) -> None:
        """Register `memory`. Raises PeerUnreachable if the engine cannot register it.

        `description` tells receivers how to read the memory, for example its addresses."""
        self._engine, self._description = engine, description
        self._memory: list[memoryview] = []
        try:
            for part in memory:
                engine.register_memory(part)
                self._memory.append(part)
        except BaseException:
            self._unregister_memory()
            raise
        super().__init__(sender, listener, io_timeout_s=io_timeout_s)

    def stop(self) -> None:
        super().stop()
        self._unregister_memory()

    def _unregister_memory(self) -> None:
        for part in self._memory:
            self._engine.unregister_memory(part)

    def _share_memory(self, channel: MessageChannel, transfer_id: int) -> None:
        body = {"session": self._engine.session, **self._description}
        channel.send_json(MessageKind.OKAY, transfer_id, body, time.monotonic() + self._io_timeout_s)


class StagedPiecesServer(MooncakeServer):
    """A server that copies pieces to slots, where receivers read them."""

    def __init__(self, sender: Sender, engine: MooncakeEngine, listener: socket.socket, io_timeout_s: float) -> None:
        self._pieces = StagedPieces(sender)
        super().__init__(sender, engine, [self._pieces.memory], {"staged": True}, listener, io_timeout_s)

    def _handle_request(self, kind: int, body: dict[str, Any], staging: StagingBuffer) -> dict[str, Any]:
        if kind not in (MessageKind.STAGE_PIECE, MessageKind.CONFIRM_READ):
            return super()._handle_request(kind, body, staging)
        ticket_id, piece = body["id"], TransferPiece(*map(int, body["piece"]))
        if kind == MessageKind.STAGE_PIECE:
            slot_timeout_s = self._io_timeout_s / 2  # the receiver waits for the reply for the whole timeout
            staged = self._pieces.stage(ticket_id, piece, slot_timeout_s, uses_checksum=bool(body["checked"]))
            return {"number": staged.number, "address": address_of(staged.data)}
        with self._sender.read_under_lease(ticket_id, piece) as lease:
            crc = self._pieces.confirm_read(int(body["number"]), ticket_id, piece).crc
            return {"mark": compute_generations_crc(lease.generations[piece.first_block : piece.end_block]), "crc": crc}


def serve_mooncake(
    sender: Sender, engine: MooncakeEngine, port: int = 0, *, io_timeout_s: float = IO_TIMEOUT_S
) -> MooncakeServer:
    """Serve leases over TCP at the engine's host. A receiver also asks this server for the addresses of the memory.

    If the cache is in the host memory of one process, receivers read its blocks directly. Otherwise, for example with
    several ranks, they read the slots of a StagedPiecesServer.
    """
    listener, region = create_tcp_listener(engine.host, port), sender.region
    try:
        server: MooncakeServer
        if isinstance(region, HostRegion):
            description = {"bases": [*map(address_of, region.parts)], "blocks": region.blocks}
            server = MooncakeServer(sender, engine, region.parts, description, listener, io_timeout_s)
        else:
            server = StagedPiecesServer(sender, engine, listener, io_timeout_s)
    except BaseException:
        listener.close()
        raise
    sender.endpoints["mooncake"] = f"{engine.host}:{listener.getsockname()[1]}"
    return server
