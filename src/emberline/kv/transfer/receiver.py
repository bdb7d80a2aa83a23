"""Receiver: pulls published blocks into its own region, over the first transport that reaches the sender.

It only ever reads from the sender, and it alone writes to its memory: once `pull` has returned or raised, nothing more
arrives. What arrived counts only if the lease was alive after the last byte: until then, no block can have been reused.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from emberline.core.clock import Clock, SystemClock
from emberline.kv.checksum import Crc
from emberline.kv.transfer.base import Fetch, Link, Transport
from emberline.kv.transfer.errors import (
    BadTransfer,
    Corrupted,
    Elsewhere,
    PeerChanged,
    PeerUnreachable,
    TransferError,
    TransferTimeout,
)
from emberline.kv.transfer.lease import How
from emberline.kv.transfer.piece import Piece, cut
from emberline.kv.transfer.progress import Progress
from emberline.kv.transfer.region import Ids, Region
from emberline.kv.transfer.ticket import Peer, Ticket

log = logging.getLogger("emberline.transfer")

PIECE = 4 << 20  # bytes: what a piece costs besides its copying is then small, and it stays in the last cache
WAIT = 1.0  # seconds that a growing ticket is waited for at a time


class Receiver:
    def __init__(
        self,
        region: Region,
        transports: Sequence[Transport],
        *,
        clock: Clock | None = None,
        crc: Crc = zlib.crc32,
        piece_bytes: int = PIECE,
    ) -> None:
        """`transports`: the best first."""
        self.region = region
        self._transports = transports
        self._clock = clock or SystemClock()
        self._crc = crc
        self._piece_bytes = piece_bytes
        self.reached: Counter[str] = Counter()  # peers, by the transport that led there
        self.passed_over: Counter[str] = Counter()  # the same, by those that should have and did not
        self._links: dict[str, Link] = {}  # by incarnation: one that ended is never spoken to again
        self._lock = threading.Lock()

    def pair(self, peer: Peer, deadline: float) -> None:
        """Connects before there is anything to pull, or says why these two do not pair."""
        self._link(peer, deadline)

    def pull(
        self,
        ticket: Ticket,
        into: Sequence[int],
        deadline: float,
        *,
        layers: range | None = None,
        progress: Progress | None = None,
        follow: bool = True,
        first: int = 0,
    ) -> Progress:
        """Until all blocks of the ticket are in `into`, also those yet to be published if `follow`. Pulling twice does
        no harm; after an error the same progress goes on. The lease lasts until `acknowledge` or `release`. `first`:
        of the ticket's blocks, from which on they are wanted; where those before it would go, nothing is written."""
        progress = progress or Progress()
        wanted = range(self.region.layout.layers)[slice(layers.start, layers.stop) if layers else slice(None)]
        if not wanted or (layers is not None and layers != wanted):
            raise BadTransfer(f"{layers} are not layers of this cache")
        with progress.running(ticket, into, wanted, first) as newest:
            if not progress.complete:
                with self._reached(ticket.peer, deadline) as link:
                    self._pull(link, newest, into, deadline, wanted, progress, follow, first)
        return progress

    def renew(self, ticket: Ticket, deadline: float) -> None:
        """The heartbeat, from when a request arrives until its blocks do."""
        with self._reached(ticket.peer, deadline) as link:
            link.renew(ticket, deadline)

    def acknowledge(self, ticket: Ticket, deadline: float) -> None:
        with self._reached(ticket.peer, deadline) as link:
            link.end(ticket, How.ACKNOWLEDGED, deadline)

    def release(self, ticket: Ticket, deadline: float) -> None:
        """Not wanted any more, whatever has been pulled of it."""
        with self._reached(ticket.peer, deadline) as link:
            link.end(ticket, How.RELEASED, deadline)

    def forget(self, peer: Peer) -> None:
        """Hangs up; a pull that is under way ends with PeerLost."""
        with self._lock:
            link = self._links.pop(peer.incarnation, None)
        if link is not None:
            link.close()

    def close(self) -> None:
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()

    def _pull(
        self,
        link: Link,
        ticket: Ticket,
        into: Sequence[int],
        deadline: float,
        layers: range,
        progress: Progress,
        follow: bool,
        first: int,
    ) -> None:
        theirs, ids = ticket.peer.layout, np.asarray(into, np.int64)
        while True:
            progress.check()
            self._check_room(ticket, into)
            new = range(max(progress.blocks, first), len(ticket.blocks))
            progress.plan(ticket, cut(layers, new, theirs, self._piece_bytes))
            blocks, marks = np.asarray(ticket.blocks, np.int64), np.asarray(ticket.generations, np.uint64)
            began = self._clock.now()
            link.fetch(Fetch(ticket, blocks, marks, progress.missing, self.region, ids, progress, deadline))
            assert not progress.missing
            took = self._clock.now() - began
            progress.moving += took
            if ticket.complete:
                break
            left = deadline - self._clock.now()
            if left <= 0:
                raise TransferTimeout(f"{len(ticket.blocks)} blocks arrived in time, and more were to come")
            wait, known = min(left, WAIT, ticket.lease / 3) if follow else 0.0, len(ticket.blocks)
            ticket = ticket.grown(link.state(ticket, known, wait, deadline))
            progress.hidden += took if len(ticket.blocks) > known else 0.0  # the last blocks hide behind nothing
            if not ticket.checksums:
                progress.proven = known  # for the lease was alive after they landed
            if not follow and len(ticket.blocks) == known and not ticket.complete:
                break
        link.renew(ticket, deadline)
        if ticket.checksums and len(layers) == theirs.layers:
            progress.verified += self._verify(ticket, ids, first)
        progress.proven = len(ticket.blocks)
        progress.complete = ticket.complete

    def _check_room(self, ticket: Ticket, into: Sequence[int]) -> None:
        needed = self.region.layout.blocks_for(len(ticket.blocks), ticket.peer.layout)
        if needed > len(into):
            raise BadTransfer(f"the ticket fills {needed} blocks, and {len(into)} are there to take them")
        if len(set(into)) != len(into) or not all(0 <= block < self.region.blocks for block in into):
            raise BadTransfer("the blocks to fill are not distinct blocks of this cache")

    def _verify(self, ticket: Ticket, into: Ids, first: int) -> int:
        """How many blocks are as they were when they were published; one that is not raises."""
        theirs = ticket.peer.layout
        room = memoryview(bytearray(theirs.block_bytes))
        for i, told in enumerate(ticket.checksums[first:], first):
            whole = Piece(0, theirs.layers, i, i + 1)
            self.region.gather(whole, into, theirs, room)
            if self._crc(room, 0) != told:
                raise Corrupted(f"block {i} of the ticket arrived with another checksum than it left with")
        return len(ticket.checksums[first:])

    @contextmanager
    def _reached(self, peer: Peer, deadline: float) -> Iterator[Link]:
        """One that is gone is forgotten, for a link may hold on to memory of the other process."""
        try:
            yield self._link(peer, deadline)
        except (PeerUnreachable, PeerChanged):
            self.forget(peer)
            raise

    def _link(self, peer: Peer, deadline: float) -> Link:
        with self._lock:
            link = self._links.get(peer.incarnation)
        if link is not None:
            return link
        self.region.layout.check_pair(peer.layout)
        link = self._connected(peer, deadline)
        with self._lock:
            kept = self._links.setdefault(peer.incarnation, link)
        if kept is not link:  # another thread was faster
            link.close()
        return kept

    def _connected(self, peer: Peer, deadline: float) -> Link:
        why: dict[str, TransferError] = {}
        for transport in self._transports:
            if transport.kind in peer.endpoints:
                try:
                    link = transport.connect(peer, deadline)
                except TransferError as error:
                    why[transport.kind] = error
                else:
                    self._pass_over(peer, why)
                    self.reached[transport.kind] += 1
                    return link
        for told in why.values():
            if not isinstance(told, PeerUnreachable):  # somebody answers, and says what is wrong
                raise told
        reasons = "; ".join(error.message for error in why.values()) or "no transport in common"
        raise PeerUnreachable(f"{peer.name} cannot be reached: {reasons}")

    def _pass_over(self, peer: Peer, why: Mapping[str, TransferError]) -> None:
        """Better ways than the one that was taken."""
        for kind, error in why.items():
            if not isinstance(error, Elsewhere):
                log.warning("%s is not reached by %s: %s", peer.name, kind, error.message)
                self.passed_over[kind] += 1
