"""BlockPublisher: lets other engines copy the KV blocks of prompts while the prompts are computed.

A published block has a lease, a time limit that readers renew. Until the lease ends, the block is neither moved nor
changed, even if the request that computed it has ended."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from emberline.core.events import Output, TransferStats
from emberline.core.handoff import PrefillResult
from emberline.core.plan import SampledToken
from emberline.core.request import Request
from emberline.kv.manager import KVManager
from emberline.kv.transfer.errors import TicketEnded
from emberline.kv.transfer.ticket import Ticket, compute_ticket_subject

if TYPE_CHECKING:  # it imports numpy, which would delay the start on a GPU
    from emberline.kv.transfer.sender import Sender


LEASE_AGE_BUCKETS_S = {"0-1": 1.0, "1-10": 10.0, "10-60": 60.0}
OLDEST_LEASE_BUCKET = "60-"


class BlockPublisher:
    def __init__(self, sender: Sender, kv: KVManager, lease_seconds: float) -> None:
        """`lease_seconds`: how long KV blocks stay published if no reader renews the lease."""
        self._sender = sender
        self._kv = kv
        self._lease_seconds = lease_seconds
        self._tickets: dict[str, Ticket | None] = {}  # of open requests; None: the lease has ended early
        self._requests = 0
        self._blocks = 0

    def publish_computed_blocks(self, request: Request) -> dict[str, Any] | None:
        """Publish the KV blocks that were computed since the last call.

        Return the ticket with which other engines can copy the blocks, if this call created it; else None."""
        full = min(request.num_computed, request.submitted_len) // self._kv.block_size
        ticket = self._tickets.get(request.id)
        first = request.id not in self._tickets
        if full == 0 or (ticket is None and not first):
            return None
        blocks = self._kv.publishable_blocks(request, len(ticket.blocks) if ticket else 0)
        if first:
            ticket = self._tickets[request.id] = self._open_ticket(request, blocks)
            return ticket.as_dict()
        if blocks:
            self._extend_ticket(request, blocks)
        return None

    def publish_and_output_ticket(self, request: Request, outputs: list[Output]) -> bool:
        """Publish computed KV blocks. If that created the ticket, add it to `outputs` and return True."""
        if (ticket := self.publish_computed_blocks(request)) is None:
            return False
        outputs.append(Output(request.submission_id, request.index, ticket=ticket))
        return True

    def complete_ticket(self, request: Request, sampled: SampledToken) -> dict[str, Any] | None:
        """Add the first sampled token to the request's ticket, and return the final ticket.

        Return None if the lease has already ended."""
        ticket = self._tickets.pop(request.id, None)
        if ticket is None:
            return None
        assert request.first_token_at is not None and request.admitted_at is not None
        seconds = request.first_token_at - request.admitted_at
        note = PrefillResult((sampled.token,), sampled.stop, min(request.num_cached, request.prompt_len), seconds)
        try:
            return self._sender.extend_ticket(ticket, (), complete=True, note=str(note)).as_dict()
        except TicketEnded:
            return None

    def end_request(self, request: Request) -> None:
        """End the lease of a request that ended before its ticket (the description for readers) was complete."""
        if (ticket := self._tickets.pop(request.id, None)) is not None:
            with suppress(TicketEnded):
                self._sender.close_ticket(ticket)

    def reclaim_expired_leases(self) -> None:
        """Free KV blocks whose lease has ended. Call this often while blocks are published."""
        for ended in self._sender.collect_ended_leases():
            self._kv.retained.unpin(ended.blocks)

    def write_stats_to(self, stats: TransferStats) -> None:
        """Write the publisher's statistics into `stats`."""
        pinned, traffic = self._sender.lease_ages(), self._sender.stats
        stats.published, stats.published_blocks = self._requests, self._blocks
        stats.sent_bytes = traffic.bytes
        stats.ended = {how.value: count for how, count in traffic.ended_leases.items()}
        stats.leases, stats.pinned_blocks = len(pinned), sum(blocks for _, blocks in pinned)
        ages = Counter[str]()
        for age, blocks in pinned:
            ages[next((name for name, below in LEASE_AGE_BUCKETS_S.items() if age < below), OLDEST_LEASE_BUCKET)] += (
                blocks
            )
        stats.pinned_by_age = dict(ages)
        stats.oldest_lease = max((age for age, _ in pinned), default=0.0)

    def _open_ticket(self, request: Request, blocks: list[int]) -> Ticket:
        self._requests += 1
        self._blocks += len(blocks)
        self._kv.retained.pin(blocks)
        subject = compute_ticket_subject(
            self._sender.region.layout, request.salt, request.tokens[: request.submitted_len]
        )
        return self._sender.publish(
            blocks, self._lease_seconds, complete=False, deadline=request.deadline, subject=subject
        )

    def _extend_ticket(self, request: Request, blocks: list[int]) -> None:
        ticket = self._tickets[request.id]
        assert ticket is not None
        self._kv.retained.pin(blocks)
        try:
            self._tickets[request.id] = self._sender.extend_ticket(ticket, blocks)
            self._blocks += len(blocks)
        except TicketEnded:
            self._kv.retained.unpin(blocks)
            self._tickets[request.id] = None
