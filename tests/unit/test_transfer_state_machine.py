"""Transfers in any order of publish, extend, pull, end, expiry and reuse, as a state machine.

Each lease is collected once, bytes are right or an error is raised, and nothing stays pinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transfer_helpers import blank, content, fill, small

from emberline.core.clock import ManualClock
from emberline.kv.transfer.errors import BlockReused, TicketEnded, TransferCancelled, TransferTimeout
from emberline.kv.transfer.lease import LeaseEndReason
from emberline.kv.transfer.local import LocalTransport, advertise_local
from emberline.kv.transfer.progress import PullProgress
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.ticket import Ticket

BLOCKS, LEASE, FAR = 10, 10.0, 1e9


class InterruptingClock:
    """The transport's clock, read before every piece; at a chosen piece, it first runs an action."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.left = -1
        self.act: Callable[[], None] = lambda: None

    def now(self) -> float:
        self.left -= 1
        if self.left == 0:
            self.act()
        return self.clock.now()


@dataclass
class PublishedTicket:
    ticket: Ticket
    blocks: list[int]
    content: bytes
    complete: bool
    into: list[int]
    progress: PullProgress = field(default_factory=PullProgress)
    over: LeaseEndReason | None = None  # how the test ended it; expiry is detected later
    spoiled: int = 0  # bytes up to the last block that the owner overwrote during the lease


class TransferStateMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.between = InterruptingClock(self.clock)
        self.region = blank(small(), BLOCKS)
        self.sender = Sender(self.region, "p", clock=self.clock)
        advertise_local(self.sender, "here")
        transport = LocalTransport([self.sender], self.between)
        self.receiver = Receiver(blank(small(), 4), [transport], clock=self.clock, max_piece_bytes=40)
        self.free = set(range(BLOCKS))
        self.all: list[PublishedTicket] = []
        self.returned: Counter[str] = Counter()
        self.seed = 0

    def write_new_content(self, count: int) -> tuple[list[int], bytes]:
        blocks = [self.free.pop() for _ in range(min(count, len(self.free)))]
        self.seed += 1
        return blocks, fill(self.region, blocks, self.seed)

    @rule(count=st.integers(0, 3), complete=st.booleans())
    def publish(self, count: int, complete: bool) -> None:
        blocks, sent = self.write_new_content(count)
        ticket = self.sender.publish(blocks, LEASE, complete=complete)
        self.all.append(PublishedTicket(ticket, blocks, sent, complete, [0, 1, 2, 3]))

    @precondition(lambda self: any(not p.complete for p in self.all))
    @rule(data=st.data(), complete=st.booleans())
    def extend(self, data: st.DataObject, complete: bool) -> None:
        published = data.draw(st.sampled_from([p for p in self.all if not p.complete]))
        blocks, sent = self.write_new_content(min(1, 4 - len(published.blocks)))
        try:
            published.ticket = self.sender.extend_ticket(published.ticket, blocks, complete=complete)
        except TicketEnded:
            assert self.has_ended(published)
            self.free.update(blocks)
        else:
            published.blocks += blocks
            published.content += sent
            published.complete = complete

    @precondition(lambda self: self.all)
    @rule(data=st.data(), again=st.booleans(), at=st.integers(1, 8))
    def pull(self, data: st.DataObject, again: bool, at: int) -> None:
        """Pull from the start or continue, with an action before the n-th piece."""
        published = data.draw(st.sampled_from(self.all))
        doing = data.draw(st.sampled_from(["nothing", "wait", "cancel", "close", "reuse"]))
        progress = published.progress if again and not published.progress.complete else PullProgress()
        acts = {
            "wait": lambda: self.clock.advance(LEASE),
            "cancel": progress.cancel,
            "close": lambda: self.close(published),
        }
        self.between.left, self.between.act = at, acts.get(doing, lambda: None)
        if doing == "reuse":
            self.between.act = self.end_and_reuse
        landed = progress.arrived_bytes
        try:
            self.receiver.pull(published.ticket, published.into, FAR, progress=progress, include_later_blocks=False)
        except TicketEnded:
            assert self.has_ended(published)
        except BlockReused:
            assert published.spoiled
        except TransferCancelled:
            published.progress = PullProgress()
        except TransferTimeout:
            raise AssertionError("there was time enough") from None
        else:
            assert not self.has_ended(published) and landed >= published.spoiled, (
                "the overwritten bytes had arrived before"
            )
            if progress.arrived_bytes == len(
                published.content
            ):  # if continued, other pulls may have used the same blocks since
                got = content(self.receiver.region, published.into[: len(published.blocks)])
                assert got == published.content or progress is published.progress
            assert progress.complete == published.complete
        self.between.left = -1

    def end_and_reuse(self) -> None:
        """End everything that can end, and write new content to its blocks."""
        self.clock.advance(LEASE)
        self.collect()
        self.write_and_free(BLOCKS)

    def write_and_free(self, count: int) -> None:
        blocks, _ = self.write_new_content(count)
        self.free.update(blocks)

    @rule(count=st.integers(1, BLOCKS))
    def reuse(self, count: int) -> None:
        self.write_and_free(count)

    @precondition(lambda self: self.all)
    @rule(data=st.data(), how=st.sampled_from([LeaseEndReason.ACKNOWLEDGED, LeaseEndReason.RELEASED]))
    def end(self, data: st.DataObject, how: LeaseEndReason) -> None:
        published = data.draw(st.sampled_from(self.all))
        say = self.receiver.acknowledge if how is LeaseEndReason.ACKNOWLEDGED else self.receiver.release
        was_over = self.has_ended(published)
        try:
            say(published.ticket, FAR)
        except TicketEnded:
            assert was_over and how is LeaseEndReason.ACKNOWLEDGED
        else:
            published.over = published.over if was_over else how  # releasing an ended lease does nothing

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def close_lease(self, data: st.DataObject) -> None:
        self.close(data.draw(st.sampled_from(self.all)))

    def close(self, published: PublishedTicket) -> None:
        try:
            self.sender.close_ticket(published.ticket)
        except TicketEnded:
            assert self.has_ended(published)
        else:
            published.over = published.over or LeaseEndReason.CLOSED

    @precondition(lambda self: any(p.blocks for p in self.all))
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """Overwrite a block during its lease."""
        published = data.draw(st.sampled_from([p for p in self.all if p.blocks]))
        if not self.has_ended(published):
            fill(self.region, published.blocks[-1:], 0)
            published.spoiled = len(published.content)

    @rule(seconds=st.sampled_from([1.0, LEASE / 2, LEASE]))
    def advance_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def collect(self) -> None:
        for ended in self.sender.collect_ended_leases():
            self.returned[ended.id] += 1
            published = next(p for p in self.all if p.ticket.id == ended.id)
            assert list(ended.blocks) == published.blocks and (published.over or LeaseEndReason.EXPIRED) is ended.reason
            published.over = ended.reason
            self.free.update(ended.blocks)

    def has_ended(self, published: PublishedTicket) -> bool:
        try:
            self.sender._leases.find(published.ticket.id)
        except TicketEnded:
            return True
        return False

    @invariant()
    def blocks_are_conserved(self) -> None:
        assert all(count == 1 for count in self.returned.values())
        held = [block for p in self.all if not self.returned[p.ticket.id] for block in p.blocks]
        assert len(held) == len(set(held)) and not self.free & set(held)
        assert len(held) + len(self.free) == BLOCKS

    def teardown(self) -> None:
        for published in [p for p in self.all if not p.complete]:
            self.close(published)  # incomplete leases end when their owner closes them
        self.clock.advance(LEASE)
        self.collect()
        assert self.sender.lease_ages() == [] and self.free == set(range(BLOCKS))
        assert set(self.returned) == {p.ticket.id for p in self.all}


TransferStateMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHandoffs = TransferStateMachine.TestCase
