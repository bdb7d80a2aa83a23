"""StreamLink: a link to a sender over stream sockets. It opens all its connections at the start and keeps them open."""

from __future__ import annotations

import dataclasses
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from emberline.kv.checksum import Crc, crc_of_views
from emberline.kv.codec import KVCodec
from emberline.kv.transfer.base import PieceFetch
from emberline.kv.transfer.channel import IO_TIMEOUT_S, MessageChannel, MessageKind, TransferMessage
from emberline.kv.transfer.codec_choice import LinkCodecChooser
from emberline.kv.transfer.errors import PeerLost, PeerUnreachable, TransferCorrupted
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.lease import LeaseEndReason
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.server import DATA_HEADER, MAX_PULL_S, compute_generations_crc
from emberline.kv.transfer.ticket import Peer, Ticket
from emberline.kv.transfer.tls_channel import make_channel

Connector = Callable[[float], socket.socket]  # connects within a timeout in seconds


@dataclasses.dataclass(frozen=True, slots=True)
class LinkOptions:
    """How a receiver transfers pieces of KV blocks over stream sockets."""

    connections: int = 2  # connections used by one pull
    use_checksums: bool = True  # whether pieces carry a checksum on the wire
    codecs: Sequence[KVCodec] = ()  # used if the sender supports one too and it measures faster
    always_encode: bool = False  # whether to use a common codec without measuring
    io_timeout_s: float = IO_TIMEOUT_S
    crc: Crc = zlib.crc32


class FetchConnections:
    """The connections that are used by one fetch. When one of them fails, all are stopped."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._channels: set[MessageChannel] = set()
        self._lock = threading.Lock()

    @contextmanager
    def stop_on_failure(self, channel: MessageChannel) -> Iterator[None]:
        with self._lock:
            if self.failure is not None:
                raise PeerLost("a different connection of the same KV transfer failed")
            self._channels.add(channel)
        try:
            yield
        finally:
            with self._lock:
                self._channels.discard(channel)

    def stop_all(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error
            for channel in self._channels:
                channel.stop()


class StreamLink:
    def __init__(self, peer: Peer, layout: KVLayout, connect: Connector, options: LinkOptions, deadline: float) -> None:
        self._peer = peer
        self._layout = layout  # of the receiver
        self._connect = connect
        self._options = options
        self._codec: KVCodec | None = None  # chosen by the sender in the handshake
        self._codec_chooser = LinkCodecChooser()
        self._lock = threading.Lock()
        self._closed = False
        self._idle_channels: list[MessageChannel] = []
        self._open_channels: set[MessageChannel] = set()
        try:
            for _ in range(options.connections):
                self._return_channel(self._open_channel(deadline))
            self._prepare_first_fetch(deadline)
        except BaseException:
            self.close()
            raise

    def _prepare_first_fetch(self, deadline: float) -> None:
        """Prepare what the first fetch needs in addition to connections. Subclasses override this method."""

    def poll_ticket(self, ticket: Ticket, known_blocks: int, wait_s: float, deadline: float) -> Ticket:
        reply = self._call(MessageKind.STATE, {"id": ticket.id, "known": known_blocks, "wait": wait_s}, deadline)
        return Ticket.parse(reply)

    def renew(self, ticket: Ticket, deadline: float) -> None:
        self._call(MessageKind.RENEW, {"id": ticket.id}, deadline)

    def end(self, ticket: Ticket, reason: LeaseEndReason, deadline: float) -> None:
        self._call(MessageKind.END, {"id": ticket.id, "how": reason}, deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels = list(self._open_channels)
            for channel in self._idle_channels:
                channel.close()
            self._idle_channels.clear()
        for channel in channels:
            channel.stop()

    def fetch(self, fetch: PieceFetch) -> None:
        """Fetch the pieces over several connections in parallel. The calling thread uses one of them."""
        count = min(self._options.connections, len(fetch.pieces))
        if not count:
            return
        size = sum(piece.num_bytes(self._peer.layout) for piece in fetch.pieces)
        codec = self._codec if self._options.always_encode or self._codec_chooser.should_encode(size) else None
        group, began = FetchConnections(), time.monotonic()

        def fetch_share(share: Sequence[TransferPiece]) -> None:
            try:
                with (
                    self._borrow_channel(fetch.deadline) as channel,
                    group.stop_on_failure(channel),
                    fetch.progress.stop_on_cancel(channel.stop),
                ):
                    self._fetch_pieces(channel, fetch, share, codec)
            except BaseException as error:
                group.stop_all(error)

        own, *others = [fetch.pieces[i::count] for i in range(count)]
        threads = [threading.Thread(target=fetch_share, args=(share,), name="kv-pull", daemon=True) for share in others]
        unstarted = [share for share, thread in zip(others, threads, strict=True) if not _try_start_thread(thread)]
        for share in (own, *unstarted):
            fetch_share(share)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        fetch.progress.raise_if_cancelled()
        if group.failure is not None:
            raise group.failure
        if self._codec is not None:
            self._codec_chooser.record_transfer(codec is not None, size, time.monotonic() - began)

    def _fetch_pieces(
        self, channel: MessageChannel, fetch: PieceFetch, pieces: Sequence[TransferPiece], codec: KVCodec | None
    ) -> None:
        transfer, deadline = secrets.randbits(64), fetch.deadline
        request = {
            "id": fetch.ticket.id,
            "pieces": [dataclasses.astuple(piece) for piece in pieces],
            "seconds": min(deadline - time.monotonic(), MAX_PULL_S),
            "checked": self._options.use_checksums,
            "coded": codec is not None,
        }
        channel.send_json(MessageKind.PULL, transfer, request, deadline)
        for piece in pieces:
            self._receive_piece(channel, transfer, fetch, piece, codec)
            fetch.mark_arrived(piece)

    def _receive_piece(
        self, channel: MessageChannel, transfer_id: int, fetch: PieceFetch, piece: TransferPiece, codec: KVCodec | None
    ) -> None:
        header = _check_message(channel.receive(fetch.deadline), MessageKind.DATA, transfer_id, channel)
        *bounds, generations_sum, length = DATA_HEADER.unpack(header.body)
        size = piece.num_bytes(self._peer.layout)
        valid = length == size if codec is None else length <= codec.max_encoded_bytes(size)
        if TransferPiece(*bounds) != piece or not valid:
            raise _make_corruption_error(
                channel, f"the peer sent a different piece of KV blocks than the requested {piece}"
            )
        if generations_sum != compute_generations_crc(fetch.generations[piece.first_block : piece.end_block]):
            raise _make_corruption_error(
                channel, f"the KV blocks of {piece} were overwritten after the ticket was issued"
            )
        direct = fetch.in_place_target(piece) if codec is None else None
        memory = memoryview(b"") if direct else channel.staging.reserve(length + (size if codec else 0))
        views = direct or [memory[:length]]
        channel.receive_into(list(views), fetch.deadline)
        end = _check_message(channel.receive(fetch.deadline), MessageKind.PIECE_END, transfer_id, channel)
        if codec is not None:
            views = [memory[length:]]
            valid = codec.decode(memory[:length], views[0])
        elif self._options.use_checksums:
            valid = struct.pack("<I", crc_of_views(self._options.crc, views)) == end.body
        if not valid:
            raise _make_corruption_error(channel, f"the KV data of {piece} arrived with a wrong checksum")
        if direct is None:
            fetch.scatter(piece, views[0])

    def _call(self, kind: MessageKind, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Send a request and return the reply.

        If an idle connection was closed by the peer, the request is sent once more. All requests are idempotent.
        """
        try:
            return self._call_once(kind, body, deadline)
        except PeerLost:
            if self._closed:
                raise
            return self._call_once(kind, body, deadline)

    def _call_once(self, kind: MessageKind, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        with self._borrow_channel(deadline) as channel:
            return self._send_and_receive(channel, kind, body, deadline)

    def _send_and_receive(
        self, channel: MessageChannel, kind: MessageKind, body: dict[str, Any], deadline: float
    ) -> dict[str, Any]:
        transfer = secrets.randbits(64)
        channel.send_json(kind, transfer, body, deadline)
        return _check_message(channel.receive(deadline), MessageKind.OKAY, transfer, channel).read_json()

    @contextmanager
    def _borrow_channel(self, deadline: float) -> Iterator[MessageChannel]:
        """Yield an idle connection that is still open, or a new one. It becomes idle again when the context exits."""
        channel = self._take_idle_channel() or self._open_channel(deadline)
        try:
            yield channel
        finally:
            self._return_channel(channel)

    def _take_idle_channel(self) -> MessageChannel | None:
        with self._lock:
            while self._idle_channels:
                channel = self._idle_channels.pop()
                if channel.is_idle():
                    return channel
                self._open_channels.discard(channel)
                channel.close()
        return None

    def _return_channel(self, channel: MessageChannel) -> None:
        with self._lock:
            if not channel.is_broken and not self._closed:
                self._idle_channels.append(channel)
                return
            self._open_channels.discard(channel)
        channel.close()

    def _open_channel(self, deadline: float) -> MessageChannel:
        try:
            remaining = deadline - time.monotonic()
            channel = make_channel(
                self._connect(max(0.001, min(remaining, self._options.io_timeout_s))), self._options.io_timeout_s
            )
        except OSError as error:
            raise PeerUnreachable(f"cannot connect to KV peer {self._peer.name}: {error}") from error
        with self._lock:
            self._open_channels.add(channel)
        try:
            self._handshake(channel, deadline)
        except BaseException:
            channel.is_broken = True
            self._return_channel(channel)
            raise
        return channel

    def _handshake(self, channel: MessageChannel, deadline: float) -> None:
        transfer = secrets.randbits(64)
        codecs = {codec.name: codec for codec in self._options.codecs}
        hello = {
            "incarnation": self._peer.incarnation,
            "layout": self._layout.as_dict(),
            "codecs": list(codecs),
        }
        channel.send_json(MessageKind.HELLO, transfer, hello, deadline)
        welcome = _check_message(channel.receive(deadline), MessageKind.WELCOME, transfer, channel).read_json()
        if KVLayout.parse(welcome.get("layout")) != self._peer.layout:
            raise _make_corruption_error(channel, "the KV peer has a different cache layout than the ticket states")
        chosen = welcome.get("codec")
        if chosen is not None and chosen not in codecs:
            raise _make_corruption_error(
                channel, f"the KV peer chose the codec {chosen!r}, which this receiver did not offer"
            )
        self._codec = codecs[chosen] if chosen is not None else None


def _try_start_thread(thread: threading.Thread) -> bool:
    """Start the thread. Return False if the system allows no more threads.

    The caller must still wait for the threads that did start, because they write to the cache.
    """
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def _check_message(
    message: TransferMessage, expected_kind: MessageKind, transfer_id: int, channel: MessageChannel
) -> TransferMessage:
    if message.transfer != transfer_id:
        raise _make_corruption_error(channel, "the KV peer sent a reply to a different request")
    if message.kind == MessageKind.ERROR:
        raise message.to_error()
    if message.kind != expected_kind:
        raise _make_corruption_error(
            channel,
            f"the KV peer sent a message of kind {message.kind} instead of {expected_kind.name}"
            f" ({expected_kind.value})",
        )
    return message


def _make_corruption_error(channel: MessageChannel, reason: str) -> TransferCorrupted:
    channel.is_broken = True
    return TransferCorrupted(reason)
