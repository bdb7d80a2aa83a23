"""StreamLink: the link to a sender over stream sockets.

It opens its connections at once and keeps them open.
"""

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

from emberline.kv.checksum import Crc, chained
from emberline.kv.codec import Codec
from emberline.kv.transfer.base import Fetch
from emberline.kv.transfer.channel import PATIENCE, Channel, Kind, Message
from emberline.kv.transfer.errors import Corrupted, PeerLost, PeerUnreachable
from emberline.kv.transfer.layout import Layout
from emberline.kv.transfer.lease import How
from emberline.kv.transfer.pace import Pace
from emberline.kv.transfer.piece import Piece
from emberline.kv.transfer.server import DATA, MOST_PULL, generation_mark
from emberline.kv.transfer.ticket import Peer, Ticket

Dial = Callable[[float], socket.socket]  # connects within a timeout in seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Habits:
    """How a receiver transfers pieces over stream sockets."""

    streams: int = 2  # connections used by one pull
    checked: bool = True  # whether pieces carry a checksum on the wire
    codecs: Sequence[Codec] = ()  # used if the sender supports one too and it measures faster
    always: bool = False  # whether to use a common codec without measuring
    patience: float = PATIENCE
    crc: Crc = zlib.crc32


class Crew:
    """The connections of one fetch: when one fails, all are stopped."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._channels: set[Channel] = set()
        self._lock = threading.Lock()

    @contextmanager
    def on(self, channel: Channel) -> Iterator[None]:
        with self._lock:
            if self.failure is not None:
                raise PeerLost("another connection of the same KV transfer failed")
            self._channels.add(channel)
        try:
            yield
        finally:
            with self._lock:
                self._channels.discard(channel)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error
            for channel in self._channels:
                channel.stop()


class StreamLink:
    def __init__(self, peer: Peer, layout: Layout, dial: Dial, habits: Habits, deadline: float) -> None:
        self._peer = peer
        self._layout = layout  # of the receiver
        self._dial = dial
        self._habits = habits
        self._codec: Codec | None = None  # chosen by the sender in the handshake
        self._pace = Pace()
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[Channel] = []
        self._all: set[Channel] = set()
        try:
            for _ in range(habits.streams):
                self._give(self._opened(deadline))
            self._prepare(deadline)
        except BaseException:
            self.close()
            raise

    def _prepare(self, deadline: float) -> None:
        """Prepare what the first fetch needs besides connections; for subclasses."""

    def state(self, ticket: Ticket, known: int, wait: float, deadline: float) -> Ticket:
        reply = self._ask(Kind.STATE, {"id": ticket.id, "known": known, "wait": wait}, deadline)
        return Ticket.parsed(reply)

    def renew(self, ticket: Ticket, deadline: float) -> None:
        self._ask(Kind.RENEW, {"id": ticket.id}, deadline)

    def end(self, ticket: Ticket, how: How, deadline: float) -> None:
        self._ask(Kind.END, {"id": ticket.id, "how": how}, deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels = list(self._all)
            for channel in self._idle:
                channel.close()
            self._idle.clear()
        for channel in channels:
            channel.stop()

    def fetch(self, fetch: Fetch) -> None:
        """Fetch the pieces over several connections at once; the calling thread serves one of them."""
        count = min(self._habits.streams, len(fetch.pieces))
        if not count:
            return
        size = sum(piece.size(self._peer.layout) for piece in fetch.pieces)
        codec = self._codec if self._habits.always or self._pace.coded(size) else None
        group, began = Crew(), time.monotonic()

        def fetch_share(share: Sequence[Piece]) -> None:
            try:
                with (
                    self._channel(fetch.deadline) as channel,
                    group.on(channel),
                    fetch.progress.stopping(channel.stop),
                ):
                    self._stream(channel, fetch, share, codec)
            except BaseException as error:
                group.fail(error)

        own, *others = [fetch.pieces[i::count] for i in range(count)]
        threads = [threading.Thread(target=fetch_share, args=(share,), name="kv-pull", daemon=True) for share in others]
        unstarted = [share for share, thread in zip(others, threads, strict=True) if not _started(thread)]
        for share in (own, *unstarted):
            fetch_share(share)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        fetch.progress.check()
        if group.failure is not None:
            raise group.failure
        if self._codec is not None:
            self._pace.note(codec is not None, size, time.monotonic() - began)

    def _stream(self, channel: Channel, fetch: Fetch, pieces: Sequence[Piece], codec: Codec | None) -> None:
        transfer, deadline = secrets.randbits(64), fetch.deadline
        request = {
            "id": fetch.ticket.id,
            "pieces": [dataclasses.astuple(piece) for piece in pieces],
            "seconds": min(deadline - time.monotonic(), MOST_PULL),
            "checked": self._habits.checked,
            "coded": codec is not None,
        }
        channel.tell(Kind.PULL, transfer, request, deadline)
        for piece in pieces:
            self._land(channel, transfer, fetch, piece, codec)
            fetch.landed(piece)

    def _land(self, channel: Channel, transfer: int, fetch: Fetch, piece: Piece, codec: Codec | None) -> None:
        header = _expected(channel.receive(fetch.deadline), Kind.DATA, transfer, channel)
        *bounds, generations_sum, length = DATA.unpack(header.body)
        size = piece.size(self._peer.layout)
        valid = length == size if codec is None else length <= codec.room(size)
        if Piece(*bounds) != piece or not valid:
            raise _broken(channel, f"the peer sent another piece than the requested {piece}")
        if generations_sum != generation_mark(fetch.generations[piece.first : piece.last]):
            raise _broken(channel, f"{piece} arrived with another generation than the ticket's")
        direct = fetch.target(piece) if codec is None else None
        memory = memoryview(b"") if direct else channel.staging.room(length + (size if codec else 0))
        views = direct or [memory[:length]]
        channel.receive_into(list(views), fetch.deadline)
        end = _expected(channel.receive(fetch.deadline), Kind.SEALED, transfer, channel)
        if codec is not None:
            views = [memory[length:]]
            valid = codec.decode(memory[:length], views[0])
        elif self._habits.checked:
            valid = struct.pack("<I", chained(self._habits.crc, views)) == end.body
        if not valid:
            raise _broken(channel, f"{piece} arrived with a wrong checksum")
        if direct is None:
            fetch.scatter(piece, views[0])

    def _ask(self, kind: Kind, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Send a request and return the reply; retry once, since an idle connection may have died.

        All requests are idempotent.
        """
        try:
            return self._asked(kind, body, deadline)
        except PeerLost:
            if self._closed:
                raise
            return self._asked(kind, body, deadline)

    def _asked(self, kind: Kind, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        with self._channel(deadline) as channel:
            return self._told(channel, kind, body, deadline)

    def _told(self, channel: Channel, kind: Kind, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        transfer = secrets.randbits(64)
        channel.tell(kind, transfer, body, deadline)
        return _expected(channel.receive(deadline), Kind.OKAY, transfer, channel).read()

    @contextmanager
    def _channel(self, deadline: float) -> Iterator[Channel]:
        """Lend an idle connection that is still open, or a new one."""
        channel = self._take() or self._opened(deadline)
        try:
            yield channel
        finally:
            self._give(channel)

    def _take(self) -> Channel | None:
        with self._lock:
            while self._idle:
                channel = self._idle.pop()
                if channel.is_quiet():
                    return channel
                self._all.discard(channel)
                channel.close()
        return None

    def _give(self, channel: Channel) -> None:
        with self._lock:
            if not channel.broken and not self._closed:
                self._idle.append(channel)
                return
            self._all.discard(channel)
        channel.close()

    def _opened(self, deadline: float) -> Channel:
        try:
            remaining = deadline - time.monotonic()
            channel = Channel(self._dial(max(0.001, min(remaining, self._habits.patience))), self._habits.patience)
        except OSError as error:
            raise PeerUnreachable(f"cannot connect to KV peer {self._peer.name}: {error}") from error
        with self._lock:
            self._all.add(channel)
        try:
            self._greet(channel, deadline)
        except BaseException:
            channel.broken = True
            self._give(channel)
            raise
        return channel

    def _greet(self, channel: Channel, deadline: float) -> None:
        transfer = secrets.randbits(64)
        codecs = {codec.name: codec for codec in self._habits.codecs}
        hello = {
            "incarnation": self._peer.incarnation,
            "layout": dataclasses.asdict(self._layout),
            "codecs": list(codecs),
        }
        channel.tell(Kind.HELLO, transfer, hello, deadline)
        welcome = _expected(channel.receive(deadline), Kind.WELCOME, transfer, channel).read()
        if Layout.parsed(welcome.get("layout")) != self._peer.layout:
            raise _broken(channel, "the peer's cache layout differs from its description")
        chosen = welcome.get("codec")
        if chosen is not None and chosen not in codecs:
            raise _broken(channel, f"the peer chose the codec {chosen!r}, which was not offered")
        self._codec = codecs[chosen] if chosen is not None else None


def _started(thread: threading.Thread) -> bool:
    """Start the thread; return False if the system allows no more.

    The caller must still wait for the threads that did start: they write to the cache.
    """
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def _expected(message: Message, kind: Kind, transfer: int, channel: Channel) -> Message:
    if message.transfer != transfer:
        raise _broken(channel, "a reply to another request arrived")
    if message.kind == Kind.ERROR:
        raise message.error()
    if message.kind != kind:
        raise _broken(channel, f"a message of kind {message.kind} arrived instead of {kind.name} ({kind.value})")
    return message


def _broken(channel: Channel, why: str) -> Corrupted:
    channel.broken = True
    return Corrupted(why)
