"""Sender: publishes blocks of a KV cache for a limited time (a lease), in which receivers may read them.

A transport reads within `read_under_lease`, which raises if the blocks changed during the read.
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
from emberline.kv.transfer.errors import BadTransfer, BlockReused, TicketEnded
from emberline.kv.transfer.lease import EndedLease, Lease, LeaseEndReason, LeaseTable
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.region import BlockIds, Generations, Region
from emberline.kv.transfer.ticket import Peer, Ticket


@dataclass(slots=True)
class SenderStats:
    """Counters since the start. Any thread may update them."""

    bytes: int = 0
    pieces: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # by error code
    ended_leases: Counter[LeaseEndReason] = field(default_factory=Counter)


class Sender:
    def __init__(
        self,
        region: Region,
        name: str,
        *,
        clock: Clock | None = None,
        crc: Crc = zlib.crc32,
        publish_checksums: bool = False,
    ) -> None:
        """Create a sender for a cache.

        With `publish_checksums`, a ticket contains a checksum of each block, which receivers compare after a transfer.
        """
        self.region = region
        self.crc = crc
        self.endpoints: dict[str, str] = {}  # address by transport; each server adds its own
        self.stats = SenderStats()
        self._name = name
        self._incarnation = secrets.token_hex(16)
        self._clock = clock or SystemClock()
        self._leases = LeaseTable(self._clock)
        self._publish_checksums = publish_checksums
        self._stats_lock = threading.Lock()

    @property
    def peer(self) -> Peer:
        return Peer(self._name, self._incarnation, self.region.layout, dict(self.endpoints))

    # -- for the owner of the cache --------------------------------------------------------------------------------

    def publish(
        self,
        blocks: Sequence[int],
        lease_s: float,
        *,
        complete: bool = True,
        deadline: float = inf,
        subject: str = "",
    ) -> Ticket:
        """Publish blocks under a lease and return the ticket with which a receiver can read them.

        The caller must keep the blocks unchanged until `collect_ended_leases` returns the lease. `subject` is the hash
        of the prompt (`compute_ticket_subject`), which receivers compare with their request. If not `complete`, the
        caller adds more blocks with `extend_ticket`. Renewals cannot extend the lease beyond `deadline`, a time on this
        process's clock.
        """
        assert lease_s > 0
        now, described = self._clock.now(), self._describe_blocks(blocks)
        expires_at = min(now + lease_s, deadline)
        new_lease = Lease(secrets.token_hex(16), *described, complete, lease_s, now, expires_at, deadline, subject)
        self._leases.add(new_lease)
        return self._make_ticket(new_lease)

    def extend_ticket(self, ticket: Ticket, blocks: Sequence[int], *, complete: bool = False, note: str = "") -> Ticket:
        """Add newly computed blocks to a ticket. The last call sets `complete`.

        `note` is a text for the receiver, such as the result of the prefill. Raises TicketEnded if the lease has ended.
        """
        assert complete or not note
        return self._make_ticket(self._leases.extend(ticket.id, *self._describe_blocks(blocks), complete, note))

    def close_ticket(self, ticket: Ticket) -> None:
        """End the lease of the ticket. Raises TicketEnded if it has already ended for a different reason."""
        self._leases.end(ticket.id, LeaseEndReason.CLOSED)

    def collect_ended_leases(self) -> list[EndedLease]:
        """Return the leases that ended since the last call. The caller may reuse their blocks."""
        ended = self._leases.collect_ended()
        self.stats.ended_leases.update(lease.reason for lease in ended)
        return ended

    def stop(self) -> None:
        self._leases.end_all(LeaseEndReason.CLOSED)

    def lease_ages(self) -> list[tuple[float, int]]:
        """Return the age in seconds and the number of blocks of each active lease."""
        return self._leases.lease_ages()

    # -- for transports --------------------------------------------------------------------------------------------

    def poll_ticket(self, ticket_id: str, known_blocks: int = 0, wait_s: float = 0.0) -> Ticket:
        """Return the ticket as soon as it lists more than `known_blocks` blocks, at the latest after `wait_s`."""
        return self._make_ticket(self._leases.wait_for_blocks(ticket_id, known_blocks, wait_s))

    def renew_lease(self, ticket_id: str) -> None:
        self._leases.renew(ticket_id)

    def is_leased(self, ticket_id: str) -> bool:
        """Return whether the lease of the ticket is active."""
        return self._leases.is_active(ticket_id)

    def end_lease(self, ticket_id: str, reason: LeaseEndReason) -> None:
        """End the lease on behalf of a receiver.

        Releasing a lease that has already ended is not an error, because the receiver may not know that it ended.
        """
        if reason not in (LeaseEndReason.ACKNOWLEDGED, LeaseEndReason.RELEASED):
            raise BadTransfer(
                f"the reason to end a KV lease is {reason!r}, but a receiver may only use acknowledged or released"
            )
        with suppress(TicketEnded) if reason is LeaseEndReason.RELEASED else nullcontext():
            self._leases.end(ticket_id, reason)

    @contextmanager
    def read_under_lease(self, ticket_id: str, piece: TransferPiece) -> Iterator[Lease]:
        """Yield the lease while the caller reads a piece of its blocks, then renew the lease.

        Raises BlockReused or TicketEnded when the context exits, if the blocks may have changed during the read.
        """
        yield self.check_readable(ticket_id, piece)
        self.check_readable(ticket_id, piece)
        self._leases.renew(ticket_id)
        with self._stats_lock:
            self.stats.pieces += 1
            self.stats.bytes += piece.num_bytes(self.region.layout)

    def check_readable(self, ticket_id: str, piece: TransferPiece) -> Lease:
        """Return the lease. Raises an error if it ended, if it lacks the piece, or if a block has new content."""
        lease = self._leases.find(ticket_id)
        if not piece.is_within(self.region.layout.layers, len(lease.blocks)):
            raise BadTransfer(f"{piece} is outside the KV ticket, which has {len(lease.blocks)} blocks")
        part = slice(piece.first_block, piece.end_block)
        if not self.region.is_unchanged(lease.blocks[part], lease.generations[part]):
            raise BlockReused("a published KV block was overwritten during its lease")
        return lease

    def record_failure(self, code: str) -> None:
        with self._stats_lock:
            self.stats.failures[code] += 1

    def _describe_blocks(self, blocks: Sequence[int]) -> tuple[BlockIds, Generations, tuple[int, ...]]:
        """Return the block ids, their generation numbers, and their checksums, which are empty if tickets have none."""
        assert all(0 <= block < self.region.blocks for block in blocks)
        ids = np.asarray(blocks, np.int64)
        checksums = tuple(self._block_checksum(ids, i) for i in range(len(blocks) if self._publish_checksums else 0))
        return ids, self.region.current_generations(ids), checksums

    def _block_checksum(self, blocks: BlockIds, index: int) -> int:
        layout = self.region.layout
        buffer = memoryview(bytearray(layout.block_bytes))
        self.region.gather(TransferPiece(0, layout.layers, index, index + 1), blocks, layout, buffer)
        return self.crc(buffer, 0)

    def _make_ticket(self, lease: Lease) -> Ticket:
        blocks, generations = tuple(lease.blocks.tolist()), tuple(lease.generations.tolist())
        optional = lease.checksums, lease.subject, lease.note
        return Ticket(self.peer, lease.id, blocks, generations, lease.complete, lease.duration_s, *optional)
