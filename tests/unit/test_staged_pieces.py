"""StagedPieces: slots are reused when their pieces were read, and when nobody can read them any more."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator

import pytest
from staged_mooncake import StagedTransport, serve_staged
from test_transfer_mooncake import Pair, SlowEngine
from transfer_helpers import blank, content, fill, small, soon

from emberline.core.clock import ManualClock
from emberline.kv.codec import address_of
from emberline.kv.transfer import mooncake
from emberline.kv.transfer.errors import BadTransfer, PeerLost, TicketEnded, TransferTimeout
from emberline.kv.transfer.lease import LeaseEndReason
from emberline.kv.transfer.link import LinkOptions
from emberline.kv.transfer.mooncake import MooncakeEngine
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.region import HostRegion
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.staged_pieces import MAX_READ_S, NUM_SLOTS, StagedPiece, StagedPieces

LEASE = 30.0
FIRST, BOTH = TransferPiece(0, 3, 0, 1), TransferPiece(0, 3, 0, 2)


class Stage:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.sender = Sender(blank(small(), 12), "p", clock=self.clock)
        self.pieces = StagedPieces(self.sender, self.clock.now)

    def publish(self, deadline: float = 1e9) -> str:
        return self.sender.publish([1, 2], LEASE, deadline=deadline).id

    def add(self, ticket_id: str, piece: TransferPiece = FIRST) -> StagedPiece:
        return self.pieces.stage(ticket_id, piece, 0.0, uses_checksum=True)

    def is_full(self) -> bool:
        try:
            self.add(self.publish())
        except TransferTimeout:
            return True
        return False


def test_a_slot_has_the_bytes_of_the_piece() -> None:
    stage = Stage()
    assert isinstance(stage.sender.region, HostRegion)
    fill(stage.sender.region, [1, 2], 1)
    ticket = stage.publish()
    views = stage.sender.region.piece_views(BOTH, stage.sender._leases.find(ticket).blocks)
    staged = stage.add(ticket, BOTH)
    assert bytes(staged.data) == b"".join(views)
    assert staged.crc == zlib.crc32(staged.data)
    assert stage.pieces.stage(ticket, BOTH, 0.0, uses_checksum=False).crc == 0
    assert stage.pieces.confirm_read(staged.number, ticket, BOTH) is staged


def test_a_slot_is_reused_only_after_its_read_was_confirmed() -> None:
    stage = Stage()
    ticket = stage.publish()
    staged = [stage.add(ticket) for _ in range(NUM_SLOTS)]
    assert len({address_of(each.data) for each in staged}) == NUM_SLOTS and stage.is_full()
    for wrong in ((staged[3].number, "another", FIRST), (staged[3].number, ticket, BOTH), (-1, ticket, FIRST)):
        with pytest.raises(TransferTimeout, match="its slot was reused"):
            stage.pieces.confirm_read(*wrong)
    assert stage.is_full()
    for _ in range(2):  # a receiver that got no reply asks again
        stage.pieces.confirm_read(staged[3].number, ticket, FIRST)
    again = stage.add(ticket)
    assert address_of(again.data) == address_of(staged[3].data) and stage.is_full()
    with pytest.raises(TransferTimeout, match="its slot was reused"):
        stage.pieces.confirm_read(staged[3].number, ticket, FIRST)


def test_slots_of_ended_leases_are_reused() -> None:
    stage = Stage()
    kept, released, expires = stage.publish(), stage.publish(), stage.publish(deadline=10.0)
    for ticket in (kept, kept, *[released] * 3, *[expires] * 3):
        stage.add(ticket)
    assert stage.is_full()
    stage.sender.end_lease(released, LeaseEndReason.RELEASED)  # the request was aborted
    assert [stage.is_full() for _ in range(4)] == [False] * 3 + [True]
    stage.clock.advance(11.0)  # the receiver died
    assert [stage.is_full() for _ in range(4)] == [False] * 3 + [True]
    stage.sender.stop()
    assert [stage.is_full() for _ in range(NUM_SLOTS + 1)] == [False] * NUM_SLOTS + [True]


def test_no_other_piece_gets_a_slot_while_one_is_copied_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    ticket, ended = stage.publish(), stage.publish()
    earlier = [stage.add(ended) for _ in range(NUM_SLOTS)]
    stage.sender.end_lease(ended, LeaseEndReason.RELEASED)
    targets: list[int] = []

    def gather(piece: TransferPiece, blocks: object, layout: object, out: memoryview) -> None:
        with pytest.raises(TransferTimeout, match="its slot was reused"):
            stage.pieces.confirm_read(earlier[len(targets)].number, ended, FIRST)
        targets.append(address_of(out))
        if len(targets) < NUM_SLOTS:
            stage.add(ticket)
        else:
            assert stage.is_full()

    monkeypatch.setattr(stage.sender.region, "gather", gather)
    stage.add(ticket)
    assert sorted(targets) == sorted({address_of(each.data) for each in earlier})


def test_a_receiver_that_hangs_loses_its_slots() -> None:
    """Its lease lasts as long as blocks are added to the ticket."""
    stage = Stage()
    ticket = stage.sender.publish([1], LEASE, complete=False, deadline=1e9).id
    staged = [stage.add(ticket) for _ in range(NUM_SLOTS)]
    stage.clock.advance(MAX_READ_S)
    assert stage.is_full()
    stage.clock.advance(0.1)
    assert not stage.is_full()
    with pytest.raises(TransferTimeout, match="its slot was reused"):
        stage.pieces.confirm_read(staged[0].number, ticket, FIRST)
    stage.pieces.confirm_read(staged[1].number, ticket, FIRST)


def test_a_waiting_sender_gets_the_next_free_slot() -> None:
    sender = Sender(blank(small(), 12), "p")
    pieces, ticket = StagedPieces(sender), sender.publish([1], LEASE).id
    staged = [pieces.stage(ticket, FIRST, 0.0, uses_checksum=False) for _ in range(NUM_SLOTS)]
    got: list[StagedPiece] = []
    waiter = threading.Thread(target=lambda: got.append(pieces.stage(ticket, FIRST, 20.0, uses_checksum=False)))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    pieces.confirm_read(staged[5].number, ticket, FIRST)
    waiter.join(20)
    assert address_of(got[0].data) == address_of(staged[5].data)


def test_a_piece_that_cannot_be_staged_takes_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    ticket = stage.publish()

    def fail(*_: object) -> None:
        raise TransferTimeout("a rank did not copy its part")

    monkeypatch.setattr(stage.sender.region, "gather", fail)
    for _ in range(NUM_SLOTS + 1):
        with pytest.raises(TransferTimeout, match="a rank did not copy"):
            stage.add(ticket)
        with pytest.raises(BadTransfer, match="outside the KV ticket"):
            stage.add(ticket, TransferPiece(0, 3, 0, 3))
        with pytest.raises(TicketEnded):
            stage.add("unknown")
    monkeypatch.undo()
    monkeypatch.setattr(stage.pieces, "_slot_bytes", 10)
    with pytest.raises(BadTransfer, match="has 96 bytes; the limit is 10"):
        stage.add(ticket)
    monkeypatch.undo()
    assert [stage.is_full() for _ in range(NUM_SLOTS + 1)] == [False] * NUM_SLOTS + [True]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A sender with slots, and a fake engine, whose reads the test releases."""
    engine = SlowEngine()
    monkeypatch.setattr(mooncake, "new_engine", lambda _port: engine)
    made = Pair(engine, Sender(blank(small(), 12), "p"), MooncakeEngine())
    server = serve_staged(made.sender, made.mooncake)
    registered = len(made.mooncake._registered)
    assert registered == 1
    yield made
    made.release_reads()
    server.stop()
    assert len(made.mooncake._registered) == made.mooncake.buffers._count, "the slots are still registered"


def make_receiver(pair: Pair, io_timeout_s: float = 20.0) -> Receiver:
    options = LinkOptions(connections=1, io_timeout_s=io_timeout_s)
    return Receiver(blank(small(), 12), [StagedTransport(small(), pair.mooncake, options)])


def test_bytes_of_a_reused_slot_are_refused(pair: Pair) -> None:
    """The slot gets another piece after the receiver has asked for its own, and before it reads."""
    sent = fill(pair.sender.region, [1, 2], 1)  # type: ignore[arg-type]
    fill(pair.sender.region, [3, 4], 2)  # type: ignore[arg-type]
    receiver = make_receiver(pair)
    before = content(receiver.region, range(12))  # type: ignore[arg-type]
    ticket, other = pair.sender.publish([1, 2], LEASE), pair.sender.publish([3, 4], LEASE)
    errors: list[Exception] = []

    def pull() -> None:
        try:
            receiver.pull(ticket, [5, 6], soon())
        except (TicketEnded, TransferTimeout) as error:
            errors.append(error)

    thread = threading.Thread(target=pull)
    thread.start()
    while not pair.engine.reads:
        thread.join(0.002)
    pair.sender.end_lease(ticket.id, LeaseEndReason.RELEASED)
    late, following = make_receiver(pair), threading.Thread(target=lambda: late.pull(other, [5, 6], soon()))
    following.start()
    while pair.engine.reads < 2:
        thread.join(0.002)
    pair.release_reads()
    thread.join(20)
    following.join(20)
    assert [type(error) for error in errors] == [TicketEnded]
    assert content(receiver.region, range(12)) == before  # type: ignore[arg-type]
    assert content(late.region, [5, 6]) == content(pair.sender.region, [3, 4]) != sent  # type: ignore[arg-type]
    receiver.close()
    late.close()


def test_abandoned_read_keeps_its_buffer_and_frees_it_later(pair: Pair) -> None:
    sent = fill(pair.sender.region, [1, 2], 1)  # type: ignore[arg-type]
    receiver, ticket = make_receiver(pair, 0.05), pair.sender.publish([1, 2], LEASE)
    with pytest.raises(PeerLost, match="sent nothing"):
        receiver.pull(ticket, [3, 4], soon())
    assert not pair.mooncake.buffers._idle
    pair.release_reads()
    assert len(pair.mooncake.buffers._idle) == pair.mooncake.buffers._count == 1
    patient = make_receiver(pair)
    patient.pull(ticket, [3, 4], soon())
    assert content(patient.region, [3, 4]) == sent  # type: ignore[arg-type]
    receiver.close()
    patient.close()
