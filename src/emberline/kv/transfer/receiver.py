"""Receiver: pulls published blocks into its own region, over the first transport that reaches the sender.

The receiver reads from the sender and is the only writer of its own memory: after `pull` has returned or raised, no
more bytes arrive. Arrived blocks count only if the lease was still valid after their last byte, because the sender
cannot have reused the blocks before that.
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

PIECE = 4 << 20  # large enough that fixed costs are small, small enough for the last-level CPU cache
WAIT = 1.0  # longest wait for more blocks of a growing ticket in one call


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
        """`transports`: in order of preference."""
        self.region = region
        self._transports = transports
        self._clock = clock or SystemClock()
        self._crc = crc
        self._piece_bytes = piece_bytes
        self.reached: Counter[str] = Counter()  # peers connected, by transport
        self.passed_over: Counter[str] = Counter()  # peers that a preferred transport failed to reach, by transport
        self._links: dict[str, Link] = {}  # by the peer's incarnation, so that a restarted peer gets a new link
        self._lock = threading.Lock()

    def pair(self, peer: Peer, deadline: float) -> None:
        """Connect to a peer before the first pull. Raises TransferError if the two caches cannot be connected."""
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
        """Copy the ticket's blocks into `target_blocks`; with `follow`, also those published later.

        `target_blocks` holds all blocks of the ticket, but those before its block `first_block` are not written.
        Repeating a pull is harmless, and after an error the same progress continues. The lease lasts until
        `acknowledge` or `release`.
        """
        progress = progress or Progress()
        wanted = range(self.region.layout.layers)[slice(layers.start, layers.stop) if layers else slice(None)]
        if not wanted or (layers is not None and layers != wanted):
            raise BadTransfer(f"the cache has {self.region.layout.layers} layers; a pull asks for {layers}")
        with progress.running(ticket, into, wanted, first) as newest:
            if not progress.complete:
                with self._reached(ticket.peer, deadline) as link:
                    self._pull(link, newest, into, deadline, wanted, progress, follow, first)
        return progress

    def renew(self, ticket: Ticket, deadline: float) -> None:
        """Renew the lease, so that the sender keeps the blocks."""
        with self._reached(ticket.peer, deadline) as link:
            link.renew(ticket, deadline)

    def acknowledge(self, ticket: Ticket, deadline: float) -> None:
        with self._reached(ticket.peer, deadline) as link:
            link.end(ticket, How.ACKNOWLEDGED, deadline)

    def release(self, ticket: Ticket, deadline: float) -> None:
        """End the lease of a ticket that is no longer needed, whether or not it was pulled."""
        with self._reached(ticket.peer, deadline) as link:
            link.end(ticket, How.RELEASED, deadline)

    def forget(self, peer: Peer) -> None:
        """Close the connections to a peer; a running pull raises PeerLost."""
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
        peer_layout, ids = ticket.peer.layout, np.asarray(into, np.int64)
        while True:
            progress.check()
            self._check_room(ticket, into)
            new = range(max(progress.blocks, first), len(ticket.blocks))
            progress.plan(ticket, cut(layers, new, peer_layout, self._piece_bytes))
            blocks, generations = np.asarray(ticket.blocks, np.int64), np.asarray(ticket.generations, np.uint64)
            began = self._clock.now()
            link.fetch(Fetch(ticket, blocks, generations, progress.missing, self.region, ids, progress, deadline))
            assert not progress.missing
            took = self._clock.now() - began
            progress.moving += took
            if ticket.complete:
                break
            remaining = deadline - self._clock.now()
            if remaining <= 0:
                arrived = len(ticket.blocks)
                raise TransferTimeout(f"the deadline passed after {arrived} KV blocks; the peer had not published all")
            wait, known = min(remaining, WAIT, ticket.lease / 3) if follow else 0.0, len(ticket.blocks)
            ticket = ticket.grown(link.state(ticket, known, wait, deadline))
            progress.hidden += took if len(ticket.blocks) > known else 0.0  # the last copy overlaps with no prefill
            if not ticket.checksums:
                progress.proven = known  # the lease was valid after they arrived
            if not follow and len(ticket.blocks) == known and not ticket.complete:
                break
        link.renew(ticket, deadline)
        if ticket.checksums and len(layers) == peer_layout.layers:
            progress.verified += self._verify(ticket, ids, first)
        progress.proven = len(ticket.blocks)
        progress.complete = ticket.complete

    def _check_room(self, ticket: Ticket, into: Sequence[int]) -> None:
        needed = self.region.layout.blocks_for(len(ticket.blocks), ticket.peer.layout)
        if needed > len(into):
            raise BadTransfer(f"the KV ticket fills {needed} blocks; only {len(into)} are allocated for it")
        if len(set(into)) != len(into) or not all(0 <= block < self.region.blocks for block in into):
            raise BadTransfer("the target blocks of a pull are not distinct blocks of this cache")

    def _verify(self, ticket: Ticket, into: Ids, first: int) -> int:
        """Compare each arrived block with its published checksum; return their number.

        Raises TransferCorrupted for a block that differs.
        """
        peer_layout = ticket.peer.layout
        buffer = memoryview(bytearray(peer_layout.block_bytes))
        for i, published in enumerate(ticket.checksums[first:], first):
            whole = Piece(0, peer_layout.layers, i, i + 1)
            self.region.gather(whole, into, peer_layout, buffer)
            if self._crc(buffer, 0) != published:
                raise Corrupted(f"block {i} of the KV ticket arrived with another checksum than the published one")
        return len(ticket.checksums[first:])

    @contextmanager
    def _reached(self, peer: Peer, deadline: float) -> Iterator[Link]:
        """Yield the link to a peer. Close it if the peer is gone: a link may map memory of the peer's process."""
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
        if kept is not link:  # another thread connected first
            link.close()
        return kept

    def _connected(self, peer: Peer, deadline: float) -> Link:
        errors: dict[str, TransferError] = {}
        for transport in self._transports:
            if transport.kind in peer.endpoints:
                try:
                    link = transport.connect(peer, deadline)
                except TransferError as error:
                    errors[transport.kind] = error
                else:
                    self._pass_over(peer, errors)
                    self.reached[transport.kind] += 1
                    return link
        for failure in errors.values():
            if not isinstance(failure, PeerUnreachable):  # the peer answered with the actual reason
                raise failure
        reasons = "; ".join(failure.message for failure in errors.values()) or "no transport in common"
        raise PeerUnreachable(f"KV peer {peer.name} cannot be reached: {reasons}")

    def _pass_over(self, peer: Peer, why: Mapping[str, TransferError]) -> None:
        """Count and log the preferred transports that failed before one connected."""
        for kind, error in why.items():
            if not isinstance(error, Elsewhere):
                facts = peer.name, kind, error.message
                log.warning("KV transport failed, using the next: peer=%s transport=%s reason=%s", *facts)
                self.passed_over[kind] += 1
