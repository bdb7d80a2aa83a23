"""Receiver: copies (pulls) published KV blocks into its own cache, over the first transport that reaches the sender.

The receiver reads from the sender and is the only writer of its own memory. After `pull` has returned or raised, no
more bytes arrive. Received blocks count only if the lease was still valid after their last byte, because until then the
sender cannot have reused the blocks.
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
from emberline.kv.transfer.base import PieceFetch, TransferLink, Transport
from emberline.kv.transfer.errors import (
    BadTransfer,
    PeerChanged,
    PeerOnOtherHost,
    PeerUnreachable,
    TransferCorrupted,
    TransferError,
    TransferTimeout,
)
from emberline.kv.transfer.lease import LeaseEndReason
from emberline.kv.transfer.piece import MAX_PIECE_BYTES, TransferPiece, cut_into_pieces
from emberline.kv.transfer.progress import PullProgress
from emberline.kv.transfer.region import BlockIds, Region
from emberline.kv.transfer.ticket import Peer, Ticket

log = logging.getLogger("emberline.transfer")

TICKET_POLL_S = 1.0  # longest wait for more blocks of a growing ticket in one call


class Receiver:
    def __init__(
        self,
        region: Region,
        transports: Sequence[Transport],
        *,
        clock: Clock | None = None,
        crc: Crc = zlib.crc32,
        max_piece_bytes: int = MAX_PIECE_BYTES,
    ) -> None:
        """Create a receiver for a cache. `transports` are tried in this order."""
        self.region = region
        self._transports = transports
        self._clock = clock or SystemClock()
        self._crc = crc
        self._max_piece_bytes = max_piece_bytes
        self.connected_transports: Counter[str] = Counter()  # peers connected, by transport
        self.failed_transports: Counter[str] = (
            Counter()
        )  # peers that a preferred transport failed to reach, by transport
        self._links: dict[str, TransferLink] = {}  # by the peer's incarnation, so that a restarted peer gets a new link
        self._lock = threading.Lock()

    def connect(self, peer: Peer, deadline: float) -> None:
        """Connect to a peer before the first pull.

        Raises TransferError if no transport connects or the two caches are incompatible.
        """
        self._get_or_connect_link(peer, deadline)

    def pull(
        self,
        ticket: Ticket,
        target_blocks: Sequence[int],
        deadline: float,
        *,
        layers: range | None = None,
        progress: PullProgress | None = None,
        include_later_blocks: bool = True,
        first_block: int = 0,
    ) -> PullProgress:
        """Copy the blocks of the ticket into `target_blocks` and return the progress.

        `target_blocks` has an entry for every block of the ticket, but only blocks from `first_block` on are copied.
        With `include_later_blocks`, wait for blocks that the sender adds to the ticket later, until the ticket is
        complete. After an error, call again with the same `progress` to continue. The caller must end the lease with
        `acknowledge` or `release`.
        """
        progress = progress or PullProgress()
        selected_layers = range(self.region.layout.layers)[slice(layers.start, layers.stop) if layers else slice(None)]
        if not selected_layers or (layers is not None and layers != selected_layers):
            raise BadTransfer(
                f"a KV pull asks for layers {layers}, but the cache has {self.region.layout.layers} layers"
            )
        with progress.track_pull(ticket, target_blocks, selected_layers, first_block) as newest:
            if not progress.complete:
                with self._connected_link(ticket.peer, deadline) as link:
                    self._pull_over_link(
                        link,
                        newest,
                        target_blocks,
                        deadline,
                        selected_layers,
                        progress,
                        include_later_blocks,
                        first_block,
                    )
        return progress

    def renew(self, ticket: Ticket, deadline: float) -> None:
        """Renew the lease of the ticket, so that the sender keeps the blocks."""
        with self._connected_link(ticket.peer, deadline) as link:
            link.renew(ticket, deadline)

    def acknowledge(self, ticket: Ticket, deadline: float) -> None:
        with self._connected_link(ticket.peer, deadline) as link:
            link.end(ticket, LeaseEndReason.ACKNOWLEDGED, deadline)

    def release(self, ticket: Ticket, deadline: float) -> None:
        """End the lease of a ticket that is no longer needed, whether or not it was pulled."""
        with self._connected_link(ticket.peer, deadline) as link:
            link.end(ticket, LeaseEndReason.RELEASED, deadline)

    def disconnect(self, peer: Peer) -> None:
        """Close the connections to a peer. A running pull from this peer raises PeerLost."""
        with self._lock:
            link = self._links.pop(peer.incarnation, None)
        if link is not None:
            link.close()

    def close(self) -> None:
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()

    def _pull_over_link(
        self,
        link: TransferLink,
        ticket: Ticket,
        target_blocks: Sequence[int],
        deadline: float,
        layers: range,
        progress: PullProgress,
        include_later_blocks: bool,
        first_block: int,
    ) -> None:
        peer_layout, ids = ticket.peer.layout, np.asarray(target_blocks, np.int64)
        while True:
            progress.raise_if_cancelled()
            self._check_target_blocks(ticket, target_blocks)
            new = range(max(progress.planned_blocks, first_block), len(ticket.blocks))
            progress.add_pieces(ticket, cut_into_pieces(layers, new, peer_layout, self._max_piece_bytes))
            blocks, generations = np.asarray(ticket.blocks, np.int64), np.asarray(ticket.generations, np.uint64)
            began = self._clock.now()
            link.fetch(
                PieceFetch(ticket, blocks, generations, progress.missing_pieces, self.region, ids, progress, deadline)
            )
            assert not progress.missing_pieces
            copy_seconds = self._clock.now() - began
            progress.transfer_seconds += copy_seconds
            if ticket.complete:
                break
            remaining = deadline - self._clock.now()
            if remaining <= 0:
                arrived = len(ticket.blocks)
                raise TransferTimeout(
                    f"the deadline passed after {arrived} KV blocks, before the peer had published all"
                )
            wait, known = (
                min(remaining, TICKET_POLL_S, ticket.lease / 3) if include_later_blocks else 0.0,
                len(ticket.blocks),
            )
            ticket = ticket.merge_update(link.poll_ticket(ticket, known, wait, deadline))
            progress.overlapped_seconds += (
                copy_seconds if len(ticket.blocks) > known else 0.0
            )  # the last copy overlaps with no prefill
            if not ticket.checksums:
                progress.confirmed_blocks = known  # the lease was valid after they arrived
            if not include_later_blocks and len(ticket.blocks) == known and not ticket.complete:
                break
        link.renew(ticket, deadline)
        if ticket.checksums and len(layers) == peer_layout.layers:
            progress.verified_blocks += self._verify_checksums(ticket, ids, first_block)
        progress.confirmed_blocks = len(ticket.blocks)
        progress.complete = ticket.complete

    def _check_target_blocks(self, ticket: Ticket, target_blocks: Sequence[int]) -> None:
        needed = self.region.layout.num_blocks_for(len(ticket.blocks), ticket.peer.layout)
        if needed > len(target_blocks):
            raise BadTransfer(
                f"the KV ticket needs {needed} blocks, but only {len(target_blocks)} are allocated for it"
            )
        if len(set(target_blocks)) != len(target_blocks) or not all(
            0 <= block < self.region.blocks for block in target_blocks
        ):
            raise BadTransfer("the target blocks of a KV pull must be distinct blocks of this cache")

    def _verify_checksums(self, ticket: Ticket, target_blocks: BlockIds, first_block: int) -> int:
        """Compare each received block with its published checksum and return the number of compared blocks.

        Raises TransferCorrupted for a block that differs.
        """
        peer_layout = ticket.peer.layout
        buffer = memoryview(bytearray(peer_layout.block_bytes))
        for i, published in enumerate(ticket.checksums[first_block:], first_block):
            whole = TransferPiece(0, peer_layout.layers, i, i + 1)
            self.region.gather(whole, target_blocks, peer_layout, buffer)
            if self._crc(buffer, 0) != published:
                raise TransferCorrupted(
                    f"block {i} of the KV ticket arrived with a different checksum than the published one"
                )
        return len(ticket.checksums[first_block:])

    @contextmanager
    def _connected_link(self, peer: Peer, deadline: float) -> Iterator[TransferLink]:
        """Yield the link to a peer, and connect first if needed.

        If the peer turns out to be gone, the link is closed, because a link may map memory of the peer's process.
        """
        try:
            yield self._get_or_connect_link(peer, deadline)
        except (PeerUnreachable, PeerChanged):
            self.disconnect(peer)
            raise

    def _get_or_connect_link(self, peer: Peer, deadline: float) -> TransferLink:
        with self._lock:
            link = self._links.get(peer.incarnation)
        if link is not None:
            return link
        self.region.layout.check_compatible(peer.layout)
        link = self._connect_link(peer, deadline)
        with self._lock:
            kept = self._links.setdefault(peer.incarnation, link)
        if kept is not link:  # another thread connected first
            link.close()
        return kept

    def _connect_link(self, peer: Peer, deadline: float) -> TransferLink:
        errors: dict[str, TransferError] = {}
        for transport in self._transports:
            if transport.kind in peer.endpoints:
                try:
                    link = transport.connect(peer, deadline)
                except TransferError as error:
                    errors[transport.kind] = error
                else:
                    self._record_failed_transports(peer, errors)
                    self.connected_transports[transport.kind] += 1
                    return link
        for failure in errors.values():
            if not isinstance(failure, PeerUnreachable):  # the peer answered with the actual reason
                raise failure
        reasons = "; ".join(failure.message for failure in errors.values()) or "no transport in common"
        raise PeerUnreachable(f"KV peer {peer.name} cannot be reached: {reasons}")

    def _record_failed_transports(self, peer: Peer, errors: Mapping[str, TransferError]) -> None:
        """Count and log the preferred transports that failed before a later transport connected."""
        for kind, error in errors.items():
            if not isinstance(error, PeerOnOtherHost):
                facts = peer.name, kind, error.message
                log.warning("KV transport failed, using the next transport: peer=%s transport=%s reason=%s", *facts)
                self.failed_transports[kind] += 1
