"""TransferServer: serves the published blocks of a sender over stream sockets, with one thread per connection."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from hmac import compare_digest
from typing import Any
from zlib import crc32

from emberline.core.log_throttle import LogThrottle
from emberline.core.pending_connections import PendingConnections
from emberline.kv.checksum import crc_of_views
from emberline.kv.codec import KVCodec
from emberline.kv.transfer.channel import IO_TIMEOUT_S, MessageChannel, MessageKind, TransferMessage
from emberline.kv.transfer.errors import BadTransfer, PeerChanged, PeerLost, TransferError
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.lease import Lease, LeaseEndReason
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.region import Generations, StagingBuffer
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.tls_channel import make_channel

log = logging.getLogger("emberline.transfer")

DATA_HEADER = struct.Struct(
    "<IIIIIQ"
)  # the piece's bounds, the CRC-32 of its generations, the number of bytes that follow
IDLE_TIMEOUT_S = 600.0
MAX_PULL_S = 3600.0
MAX_POLL_WAIT_S = 10.0  # longest wait of one request for more blocks of a ticket
MAX_CONNECTIONS = 256  # that have authenticated
MAX_PENDING_CONNECTIONS = 64  # that have not
MAX_HELLO_BYTES = 1 << 16  # of the first message, whose sender is not known yet
# What reading a malformed message raises.
MALFORMED = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)


def compute_generations_crc(generations: Generations) -> int:
    return crc32(generations.tobytes())


class TransferServer:
    def __init__(
        self,
        sender: Sender,
        listener: socket.socket,
        *,
        codecs: Sequence[KVCodec] = (),
        io_timeout_s: float = IO_TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sender = sender
        self._tls = tls
        self._listener = listener
        self._codecs = {codec.name: codec for codec in codecs}
        self._io_timeout_s = io_timeout_s
        self._lock = threading.Lock()
        self._connections: dict[MessageChannel, threading.Thread] = {}
        self._pending = PendingConnections(MAX_PENDING_CONNECTIONS)
        self._authenticated: set[MessageChannel] = set()
        self._error_log = LogThrottle(log)
        self._stopping = False
        self._accept_thread = threading.Thread(target=self._accept_connections, name="kv-accept", daemon=True)
        self._accept_thread.start()

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._connections)

    def stop(self) -> None:
        """Close the listener and all connections, and wait until their threads have ended."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._accept_thread.join()
        self._listener.close()
        with self._lock:
            connections = list(self._connections.items())
        for channel, _ in connections:
            channel.stop()
        for _, thread in connections:
            thread.join()

    def _accept_connections(self) -> None:
        while not self._stopping:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                self._pause_accepting(error)
                continue
            try:
                self._start_connection(sock, str(address[0]) if address else "")
            except OSError:  # the peer has closed the connection already
                sock.close()
            except RuntimeError as error:
                self._pause_accepting(error)

    def _pause_accepting(self, error: Exception) -> None:
        if not self._stopping:
            self._error_log.write(logging.ERROR, "Cannot accept a KV transfer connection: error=%s", error)
            time.sleep(0.1)  # probably out of descriptors or threads; closing connections free some

    def _start_connection(self, sock: socket.socket, address: str) -> None:
        if len(self._authenticated) >= MAX_CONNECTIONS:
            sock.close()
            return
        if self._tls is not None:
            sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        channel = make_channel(sock, self._io_timeout_s)
        thread = threading.Thread(target=self._serve_connection, args=(channel,), name="kv-serve", daemon=True)
        with self._lock:
            self._connections[channel] = thread
        self._pending.add(channel, address, channel.stop)
        try:
            thread.start()
        except RuntimeError:
            self._pending.remove(channel)
            with self._lock:
                del self._connections[channel]
            channel.close()
            raise

    def _serve_connection(self, channel: MessageChannel) -> None:
        try:
            channel.complete_tls_handshake()
            codec = self._handshake(channel)
            if not self._pending.remove(channel):
                return
            with self._lock:
                self._authenticated.add(channel)
            while not self._stopping:
                self._serve_request(channel, self._receive_request(channel), codec)
        except TransferError as error:
            if not isinstance(error, PeerLost):  # a receiver may disconnect at any time
                self._sender.record_failure(error.code)
                self._error_log.write(
                    logging.WARNING,
                    "KV transfer connection closed after an error: code=%s reason=%s",
                    error.code,
                    error,
                )
        except Exception:
            log.exception("KV transfer connection failed unexpectedly")
        finally:
            self._pending.remove(channel)
            with self._lock:
                self._authenticated.discard(channel)
                del self._connections[channel]
            channel.close()

    def _receive_request(self, channel: MessageChannel) -> TransferMessage:
        channel.wait_for_message(IDLE_TIMEOUT_S)
        return channel.receive(time.monotonic() + self._io_timeout_s)

    def _handshake(self, channel: MessageChannel) -> KVCodec | None:
        deadline = time.monotonic() + self._io_timeout_s
        hello = channel.receive(deadline, MAX_HELLO_BYTES)
        try:
            body, own = hello.read_json(), self._sender.peer
            if hello.kind != MessageKind.HELLO:
                raise BadTransfer(
                    f"the first message of a KV transfer connection has kind {hello.kind}, but must be HELLO"
                )
            if not compare_digest(str(body.get("incarnation")).encode(errors="replace"), own.incarnation.encode()):
                raise PeerChanged(f"KV peer {own.name} was restarted", hint="get its new incarnation from the router")
            own.layout.check_compatible(KVLayout.parse(body.get("layout")))
            codec = next((self._codecs[name] for name in body.get("codecs", ()) if name in self._codecs), None)
        except (TransferError, *MALFORMED) as error:
            reported = _describe_failure(error)
            self._send_error(channel, hello.transfer, reported)
            raise reported from None
        welcome = {"layout": own.layout.as_dict(), "codec": codec.name if codec else None}
        channel.send_json(MessageKind.WELCOME, hello.transfer, welcome, deadline)
        return codec

    def _serve_request(self, channel: MessageChannel, request: TransferMessage, codec: KVCodec | None) -> None:
        """Answer one request. An error is sent to the peer if the connection can still be used."""
        try:
            body = request.read_json()
            if request.kind == MessageKind.PULL:
                self._send_pieces(channel, request.transfer, body, codec)
            elif request.kind == MessageKind.ATTACH:
                self._share_memory(channel, request.transfer)
            else:
                reply = self._handle_request(request.kind, body, channel.staging)
                channel.send_json(MessageKind.OKAY, request.transfer, reply, time.monotonic() + self._io_timeout_s)
        except (TransferError, *MALFORMED) as error:
            reported = _describe_failure(error)
            if channel.is_broken:
                raise reported from None
            self._sender.record_failure(reported.code)
            self._send_error(channel, request.transfer, reported)

    def _handle_request(self, kind: int, body: dict[str, Any], staging: StagingBuffer) -> dict[str, Any]:
        if kind == MessageKind.STATE:
            wait = min(float(body["wait"]), MAX_POLL_WAIT_S)
            return self._sender.poll_ticket(body["id"], int(body["known"]), wait).as_dict()
        if kind == MessageKind.RENEW:
            self._sender.renew_lease(body["id"])
        elif kind == MessageKind.END:
            self._sender.end_lease(body["id"], LeaseEndReason(body["how"]))
        elif kind == MessageKind.CONFIRM_READ:
            return self._confirm_read(
                body["id"], TransferPiece(*map(int, body["piece"])), staging if body["checked"] else None
            )
        else:
            raise BadTransfer(f"unknown kind of KV transfer request: {kind}")
        return {}

    def _confirm_read(self, ticket_id: str, piece: TransferPiece, staging: StagingBuffer | None) -> dict[str, Any]:
        """Confirm that the blocks of a piece did not change while the receiver read them from memory.

        The reply contains the CRC of the blocks' generation numbers and, if `staging` is given, the CRC of the piece's
        bytes.
        """
        with self._sender.read_under_lease(ticket_id, piece) as lease:
            views = self._piece_payload(piece, lease, staging, None) if staging is not None else []
            return {
                "mark": compute_generations_crc(lease.generations[piece.first_block : piece.end_block]),
                "crc": crc_of_views(self._sender.crc, views),
            }

    def _send_pieces(
        self, channel: MessageChannel, transfer_id: int, body: dict[str, Any], codec: KVCodec | None
    ) -> None:
        """Send each piece as a DATA message, the bytes of the piece, and a PIECE_END message.

        PIECE_END is sent only if the blocks did not change while the bytes were sent.
        """
        deadline, codec = time.monotonic() + min(float(body["seconds"]), MAX_PULL_S), codec if body["coded"] else None
        for piece in (TransferPiece(*map(int, part)) for part in body["pieces"]):
            with self._sender.read_under_lease(body["id"], piece) as lease:
                payload = self._piece_payload(piece, lease, channel.staging, codec)
                generations_sum = compute_generations_crc(lease.generations[piece.first_block : piece.end_block])
                header = DATA_HEADER.pack(*dataclasses.astuple(piece), generations_sum, sum(map(len, payload)))
                channel.send(MessageKind.DATA, transfer_id, header, deadline, payload)
                crc = crc_of_views(self._sender.crc, payload) if body["checked"] and codec is None else 0
            channel.send(MessageKind.PIECE_END, transfer_id, struct.pack("<I", crc), deadline)

    def _piece_payload(
        self, piece: TransferPiece, lease: Lease, staging: StagingBuffer, codec: KVCodec | None
    ) -> list[memoryview]:
        region = self._sender.region
        if codec is None and (views := region.in_place_views(piece, lease.blocks)):
            return views
        size = piece.num_bytes(region.layout)
        memory = staging.reserve(size + (codec.max_encoded_bytes(size) if codec else 0))
        plain, coded = memory[:size], memory[size:]
        region.gather(piece, lease.blocks, region.layout, plain)
        return [plain if codec is None else coded[: codec.encode(plain, coded)]]

    def _share_memory(self, channel: MessageChannel, transfer_id: int) -> None:
        raise BadTransfer("this KV transport does not let receivers access the sender's memory")

    def _send_error(self, channel: MessageChannel, transfer_id: int, error: TransferError) -> None:
        body = {"code": error.code, "message": error.message, "hint": error.hint}
        channel.send_json(MessageKind.ERROR, transfer_id, body, time.monotonic() + self._io_timeout_s)


def _describe_failure(error: Exception) -> TransferError:
    if isinstance(error, TransferError):
        return error
    return BadTransfer(f"malformed KV transfer message: {str(error)[:200] or type(error).__name__}")
