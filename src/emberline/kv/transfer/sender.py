"""Sender: publishes blocks of its region under leases, and lets transports read them while the lease lasts.

What it promises: bytes that were read under `reading` are those that were published, or an error says otherwise.
"""

from __future__ import annotations

import secrets
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from math import inf

import numpy as np

from emberline.core.clock import Clock, SystemClock
from emberline.kv.checksum import Crc
from emberline.kv.transfer.errors import BadTransfer, BlockReused, TicketOver
from emberline.kv.transfer.lease import Ended, How, Lease, Leases
from emberline.kv.transfer.piece import Piece
from emberline.kv.transfer.region import Ids, Marks, Region
from emberline.kv.transfer.ticket import Peer, Ticket


@dataclass(slots=True)
class Traffic:
    """Counted since the start; any thread adds to it."""

    bytes: int = 0
    pieces: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # by code
    ended: Counter[How] = field(default_factory=Counter)


class Sender:
    def __init__(
        self,
        region: Region,
        name: str,
        *,
        clock: Clock | None = None,
        crc: Crc = zlib.crc32,
        seal: bool = False,
    ) -> None:
        """`seal`: tickets carry a checksum of each block, which receivers compare with what arrived in their memory."""
        self.region = region
        self.crc = crc
        self.endpoints: dict[str, str] = {}  # each server adds its own
        self.traffic = Traffic()
        self._name = name
        self._incarnation = secrets.token_hex(16)
        self._clock = clock or SystemClock()
        self._leases = Leases(self._clock)
        self._seal = seal
        self._counting = threading.Lock()

    @property
    def peer(self) -> Peer:
        return Peer(self._name, self._incarnation, self.region.layout, dict(self.endpoints))

    # -- for the owner of the cache --------------------------------------------------------------------------------

    def publish(
        self,
        blocks: Sequence[int],
        lease: float,
        *,
        complete: bool = True,
        deadline: float = inf,
        subject: str = "",
    ) -> Ticket:
        """The owner holds the blocks until `collect` names the ticket, and writes to none of them. `deadline`: on our
        clock, beyond which no renewal goes."""
        assert lease > 0
        now, found = self._clock.now(), self._described(blocks)
        until = min(now + lease, deadline)
        started = Lease(secrets.token_hex(16), *found, complete, lease, now, until, deadline, subject)
        self._leases.begin(started)
        return self._ticket(started)

    def extend(self, ticket: Ticket, blocks: Sequence[int], *, complete: bool = False, note: str = "") -> Ticket:
        """More blocks, as they are computed; with the last, a note. TicketOver: nobody wants them any more."""
        assert complete or not note
        return self._ticket(self._leases.extend(ticket.id, *self._described(blocks), complete, note))

    def close(self, ticket: Ticket) -> None:
        """Ends the lease from this side; TicketOver if it has ended already."""
        self._leases.end(ticket.id, How.CLOSED)

    def collect(self) -> list[Ended]:
        """Which leases ended since the last call. Each is named once; its blocks are the owner's again."""
        ended = self._leases.collect()
        self.traffic.ended.update(lease.how for lease in ended)
        return ended

    def stop(self) -> None:
        self._leases.end_all(How.CLOSED)

    def pinned(self) -> list[tuple[float, int]]:
        """Of each live lease: its age in seconds, and how many blocks it pins."""
        return self._leases.ages()

    # -- for transports --------------------------------------------------------------------------------------------

    def state(self, id: str, known: int = 0, wait: float = 0.0) -> Ticket:
        """The ticket as it is now, or as soon as it has more blocks than `known`."""
        return self._ticket(self._leases.wait(id, known, wait))

    def renew(self, id: str) -> None:
        self._leases.renew(id)

    def end(self, id: str, how: How) -> None:
        """As the receiver says. To release what is over already is no mistake: its receiver could not know."""
        if how not in (How.ACKNOWLEDGED, How.RELEASED):
            raise BadTransfer(f"no receiver can say that a lease is {how}")
        with suppress(TicketOver) if how is How.RELEASED else nullcontext():
            self._leases.end(id, how)

    @contextmanager
    def reading(self, id: str, piece: Piece) -> Iterator[Lease]:
        """While its blocks are read. Leaving raises if they may have been written to meanwhile; else the lease is
        renewed, since somebody evidently reads."""
        yield self._readable(id, piece)
        self._readable(id, piece)
        self._leases.renew(id)
        with self._counting:
            self.traffic.pieces += 1
            self.traffic.bytes += piece.size(self.region.layout)

    def failed(self, code: str) -> None:
        with self._counting:
            self.traffic.failures[code] += 1

    def _readable(self, id: str, piece: Piece) -> Lease:
        lease = self._leases.find(id)
        if not piece.fits(self.region.layout.layers, len(lease.blocks)):
            raise BadTransfer(f"{piece} of a ticket with {len(lease.blocks)} blocks")
        part = slice(piece.first, piece.last)
        if not self.region.holds(lease.blocks[part], lease.generations[part]):
            raise BlockReused("a published block has been given other content under its lease")
        return lease

    def _described(self, blocks: Sequence[int]) -> tuple[Ids, Marks, tuple[int, ...]]:
        """Blocks, their generations, and checksums if they are sealed."""
        assert all(0 <= block < self.region.blocks for block in blocks)
        ids = np.asarray(blocks, np.int64)
        sums = tuple(self._sum(ids, i) for i in range(len(blocks) if self._seal else 0))
        return ids, self.region.current(ids), sums

    def _sum(self, blocks: Ids, at: int) -> int:
        layout = self.region.layout
        room = memoryview(bytearray(layout.block_bytes))
        self.region.gather(Piece(0, layout.layers, at, at + 1), blocks, layout, room)
        return self.crc(room, 0)

    def _ticket(self, lease: Lease) -> Ticket:
        blocks, generations = tuple(lease.blocks.tolist()), tuple(lease.generations.tolist())
        about = lease.checksums, lease.subject, lease.note
        return Ticket(self.peer, lease.id, blocks, generations, lease.complete, lease.seconds, *about)
