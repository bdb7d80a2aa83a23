"""Leases, generations and block sizes, over LocalTransport with a fake clock."""

from __future__ import annotations

import json
import threading
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_helpers import blank, content, fill, small

from emberline.core.clock import ManualClock
from emberline.kernels.cpu.library import find_library
from emberline.kv.checksum import crc_of_views, select_crc
from emberline.kv.transfer import local
from emberline.kv.transfer.errors import (
    BadTransfer,
    BlockReused,
    IncompatibleCaches,
    PeerChanged,
    PeerUnreachable,
    TicketEnded,
    TransferCancelled,
    TransferCorrupted,
    TransferTimeout,
)
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.lease import LeaseEndReason
from emberline.kv.transfer.local import LocalTransport, advertise_local
from emberline.kv.transfer.piece import TransferPiece, cut_into_pieces
from emberline.kv.transfer.progress import PullProgress
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.region import HostRegion, StagingBuffer, contiguous_ranges, copy_piece
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.ticket import Peer, Ticket

LEASE, FAR = 30.0, 1e9
CRC = select_crc(find_library())


class Pair:
    """A sender and a receiver in one process."""

    def __init__(self, layout: KVLayout | None = None, other: KVLayout | None = None, **options: bool) -> None:
        self.clock = ManualClock()
        self.sender = Sender(blank(layout or small(), 12), "p", clock=self.clock, **options)
        advertise_local(self.sender, "here")
        transport = LocalTransport([self.sender], self.clock)
        region = blank(other or layout or small(), 12)
        self.receiver = Receiver(region, [transport], clock=self.clock, max_piece_bytes=64)

    def received_content(self, blocks: list[int]) -> bytes:
        return content(self.receiver.region, blocks)


def test_blocks_arrive_and_are_collected_once() -> None:
    pair = Pair()
    sent = fill(pair.sender.region, [5, 6, 2], 1)
    ticket = pair.sender.publish([5, 6, 2], LEASE)
    assert pair.sender.lease_ages() == [(0.0, 3)]
    progress = pair.receiver.pull(ticket, [9, 1, 2], FAR)
    assert progress.complete and progress.arrived_bytes == 3 * small().block_bytes
    assert pair.received_content([9, 1, 2]) == sent
    assert pair.sender.collect_ended_leases() == []
    pair.receiver.acknowledge(ticket, FAR)
    pair.receiver.acknowledge(ticket, FAR)  # a reply may get lost, so a second call is accepted
    assert [(e.id, e.blocks, e.reason) for e in pair.sender.collect_ended_leases()] == [
        (ticket.id, (5, 6, 2), LeaseEndReason.ACKNOWLEDGED)
    ]
    assert pair.sender.collect_ended_leases() == [] and pair.sender.lease_ages() == []


def test_ticket_json_round_trip() -> None:
    pair = Pair(publish_checksums=True)
    ticket = pair.sender.publish([3, 1], LEASE, complete=False)
    assert Ticket.parse(json.loads(json.dumps(ticket.as_dict()))) == ticket
    assert ticket.peer.layout.layout_hash == small(tokens=8).layout_hash != small(width=4).layout_hash


def test_layout_of_one_group_is_that_of_earlier_releases() -> None:
    """Workers of different releases exchange blocks. Several groups of layers have a field of their own."""
    layout = small(order="little", turned=2)
    assert layout.layout_hash == "0284f7cc1e2ea07b4567418f777b2ee4" and "groups" not in layout.as_dict()
    assert "groups" not in Pair().sender.publish([3], LEASE).as_dict()["peer"]["layout"]
    grouped = replace(layout, groups="3x0+512-ab")
    assert grouped.layout_hash != layout.layout_hash and KVLayout.parse(grouped.as_dict()) == grouped
    with pytest.raises(IncompatibleCaches, match="malformed"):
        KVLayout.parse({**layout.as_dict(), "groups": 1})
    with pytest.raises(IncompatibleCaches, match="differ in groups"):
        grouped.check_compatible(layout)
    layout.check_compatible(replace(layout, tokens=8))
    with pytest.raises(IncompatibleCaches, match="4 tokens here, 8 at the peer"):
        grouped.check_compatible(replace(grouped, tokens=8))


@pytest.mark.parametrize(
    "change",
    [{"blocks": [1]}, {"generations": []}, {"lease": 0}, {"checksums": [1, 2, 3]}, {"blocks": "x"}, {"peer": 1}],
)
def test_malformed_ticket_is_refused(change: dict[str, object]) -> None:
    ticket_data = {**Pair().sender.publish([3, 1], LEASE).as_dict(), **change}
    with pytest.raises(BadTransfer):
        Ticket.parse(ticket_data)


def test_pull_follows_growing_ticket() -> None:
    pair = Pair()
    pair.sender = Sender(pair.sender.region, "p")  # with real time, since two threads wait
    advertise_local(pair.sender, "here")
    receiver = Receiver(pair.receiver.region, [LocalTransport([pair.sender])], max_piece_bytes=64)
    sent = fill(pair.sender.region, [0], 1)
    ticket = pair.sender.publish([0], LEASE, complete=False)
    thread = threading.Thread(target=receiver.pull, args=(ticket, [0, 1, 2, 3], FAR))
    thread.start()
    for block in (1, 2, 3):
        sent += fill(pair.sender.region, [block], block)
        pair.sender.extend_ticket(ticket, [block], complete=block == 3)
    thread.join(20)
    assert not thread.is_alive() and content(receiver.region, [0, 1, 2, 3]) == sent


def test_copies_overlap_with_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies but the last overlap, also if the last blocks are published before the ticket is complete."""
    pair = Pair()
    fill(pair.sender.region, [0, 1, 2], 1)
    ticket = pair.sender.publish([0], LEASE, complete=False)
    (transport,) = pair.receiver._transports
    link = transport.connect(ticket.peer, FAR)
    state, computed = link.poll_ticket, [([1], False), ([2], False), ([], True)]

    def later(*asked: Any) -> Any:
        blocks, complete = computed.pop(0)
        pair.clock.advance(10.0)
        pair.sender.extend_ticket(ticket, blocks, complete=complete)
        return state(*asked)

    def slow(fetch: Any, copy: Any = link.fetch) -> None:
        pair.clock.advance(float(len(fetch.pieces) > 0))
        copy(fetch)

    monkeypatch.setattr(link, "poll_ticket", later)
    monkeypatch.setattr(link, "fetch", slow)
    monkeypatch.setattr(transport, "connect", lambda peer, deadline: link)
    progress = pair.receiver.pull(ticket, [0, 1, 2], FAR)
    assert progress.complete and (progress.transfer_seconds, progress.overlapped_seconds) == (3.0, 2.0)


def test_layers_can_be_pulled_separately() -> None:
    pair = Pair()
    sent = fill(pair.sender.region, [0, 1], 1)
    ticket = pair.sender.publish([0, 1], LEASE)
    for layer in (2, 0, 1):
        assert pair.received_content([4, 5]) != sent
        pair.receiver.pull(ticket, [4, 5], FAR, layers=range(layer, layer + 1))
    assert pair.received_content([4, 5]) == sent
    for wrong in (range(2, 4), range(0), range(0, 3, 2)):
        with pytest.raises(BadTransfer):
            pair.receiver.pull(ticket, [4, 5], FAR, layers=wrong)


@given(st.sampled_from([(4, 4), (4, 8), (8, 4), (4, 16), (16, 4), (2, 6)]), st.data())
@settings(max_examples=60, deadline=None)
def test_block_sizes_may_differ(tokens: tuple[int, int], data: st.DataObject) -> None:
    pair = Pair(small(tokens[0]), small(tokens[1]))
    blocks = data.draw(st.lists(st.integers(0, 11), unique=True, min_size=1, max_size=4))
    needed = -(-len(blocks) * tokens[0] // tokens[1])
    if needed > 12:
        return
    into = data.draw(st.lists(st.integers(0, 11), unique=True, min_size=needed, max_size=needed))
    sent = fill(pair.sender.region, blocks, 7)
    pair.receiver.pull(pair.sender.publish(blocks, LEASE), into, FAR)
    assert pair.received_content(into)[: len(sent)] == sent


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": 6}, "block sizes"),
        ({"dtype": "float16"}, "dtype"),
        ({"order": "big"}, "order"),
        ({"heads": 4}, "heads"),
        ({"layers": 4}, "layers"),
        ({"model": "another"}, "model"),
        ({"model": "another", "dtype": "float16"}, "dtype"),
    ],
)
def test_incompatible_caches_are_refused_with_a_reason(change: dict[str, object], named: str) -> None:
    pair = Pair(small(), small(**change))
    with pytest.raises(IncompatibleCaches, match=named):
        pair.receiver.connect(pair.sender.peer, FAR)


def test_lease_expires_unless_renewed() -> None:
    pair = Pair()
    ticket = pair.sender.publish([1], LEASE)
    for _ in range(5):
        pair.clock.advance(LEASE - 1)
        pair.receiver.renew(ticket, FAR)
    assert pair.sender.collect_ended_leases() == []
    pair.clock.advance(LEASE)
    for attempt in (pair.receiver.renew, pair.receiver.acknowledge, lambda t, d: pair.receiver.pull(t, [0], d)):
        with pytest.raises(TicketEnded, match="expired"):
            attempt(ticket, FAR)
    pair.receiver.release(ticket, FAR)  # harmless
    assert [e.reason for e in pair.sender.collect_ended_leases()] == [LeaseEndReason.EXPIRED]


def test_renewal_ends_at_the_deadline() -> None:
    pair = Pair()
    ticket = pair.sender.publish([1], LEASE, deadline=LEASE + 10)
    pair.clock.advance(LEASE - 1)
    pair.receiver.renew(ticket, FAR)
    pair.clock.advance(11)
    with pytest.raises(TicketEnded, match="expired"):
        pair.receiver.renew(ticket, FAR)


@pytest.mark.parametrize("how", ["acknowledge", "release", "close"])
def test_ticket_cannot_be_replayed(how: str) -> None:
    pair = Pair()
    ticket = pair.sender.publish([1], LEASE)
    if how == "close":
        pair.sender.close_ticket(ticket)
    else:
        getattr(pair.receiver, how)(ticket, FAR)
    with pytest.raises(TicketEnded, match=how[:5]):
        pair.receiver.pull(ticket, [0], FAR)
    with pytest.raises(TicketEnded):
        pair.sender.extend_ticket(ticket, [2])
    assert len(pair.sender.collect_ended_leases()) == 1
    with pytest.raises(TicketEnded, match="no such"):
        pair.receiver.pull(replace(ticket, id="0" * 32), [0], FAR)


def test_reuse_during_the_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    ticket = pair.sender.publish([1, 2], LEASE)

    def meanwhile(*everything: Any) -> None:
        copy_piece(*everything)
        fill(pair.sender.region, [2], 5)

    monkeypatch.setattr(local, "copy_piece", meanwhile)
    progress = PullProgress()
    with pytest.raises(BlockReused):
        pair.receiver.pull(ticket, [0, 1], FAR, progress=progress)
    assert progress.arrived_bytes == 0 and not progress.complete


def test_lease_end_during_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    ticket = pair.sender.publish([1, 2], LEASE)

    def meanwhile(*everything: Any) -> None:
        copy_piece(*everything)
        pair.clock.advance(LEASE)

    monkeypatch.setattr(local, "copy_piece", meanwhile)
    progress = PullProgress()
    with pytest.raises(TicketEnded, match="expired"):
        pair.receiver.pull(ticket, [0, 1], FAR, progress=progress)
    assert progress.arrived_bytes == 0


def test_reading_keeps_the_lease_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    ticket = pair.sender.publish([1, 2, 3], LEASE)

    def slowly(*everything: Any) -> None:
        copy_piece(*everything)
        pair.clock.advance(LEASE - 1)

    monkeypatch.setattr(local, "copy_piece", slowly)
    assert pair.receiver.pull(ticket, [0, 1, 2], FAR).complete
    assert pair.clock.now() > 2 * LEASE


def test_stopped_pull_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    sent = fill(pair.sender.region, [1, 2, 3], 3)
    ticket = pair.sender.publish([1, 2, 3], LEASE)
    copied = []

    def slowly(piece: TransferPiece, *others: Any) -> None:
        copy_piece(piece, *others)
        copied.append(piece.num_bytes(small()))
        pair.clock.advance(1)

    monkeypatch.setattr(local, "copy_piece", slowly)
    progress = PullProgress()
    with pytest.raises(TransferTimeout):
        pair.receiver.pull(ticket, [0, 1, 2], pair.clock.now() + 2, progress=progress)
    assert 0 < progress.arrived_bytes < len(sent)
    pair.receiver.pull(ticket, [0, 1, 2], FAR, progress=progress)
    assert progress.complete and pair.received_content([0, 1, 2]) == sent and sum(copied) == len(sent)
    pair.receiver.release(ticket, FAR)
    assert pair.receiver.pull(ticket, [0, 1, 2], FAR, progress=progress) is progress  # nothing is left to fetch
    with pytest.raises(BadTransfer):
        pair.receiver.pull(ticket, [3, 4, 5], FAR, progress=progress)


def test_cancelled_pull_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    ticket, progress, copied = pair.sender.publish([1, 2, 3], LEASE), PullProgress(), []

    def once(*everything: Any) -> None:
        copied.append(1)
        progress.cancel()

    monkeypatch.setattr(local, "copy_piece", once)
    with pytest.raises(TransferCancelled):
        pair.receiver.pull(ticket, [0, 1, 2], FAR, progress=progress)
    assert copied == [1]


@pytest.mark.parametrize("into", [[0], [0, 0], [0, 12], [-1, 0]])
def test_target_blocks_are_checked(into: list[int]) -> None:
    pair = Pair()
    with pytest.raises(BadTransfer):
        pair.receiver.pull(pair.sender.publish([1, 2], LEASE), into, FAR)


def test_silent_change_fails_checksum() -> None:
    pair = Pair(publish_checksums=True)
    fill(pair.sender.region, [1, 2], 1)
    ticket = pair.sender.publish([1, 2], LEASE)
    pair.receiver.pull(ticket, [3, 4], FAR)
    generations = pair.sender.region.generations.copy()
    fill(pair.sender.region, [2], 9)
    pair.sender.region.generations[:] = generations  # as if the owner had not bumped the generation
    with pytest.raises(TransferCorrupted, match="block 1"):
        pair.receiver.pull(ticket, [3, 4], FAR)


def test_other_incarnation_is_refused() -> None:
    pair = Pair()
    ticket = pair.sender.publish([1], LEASE)
    second = Sender(pair.sender.region, "p", clock=pair.clock)
    advertise_local(second, "here")
    receiver = Receiver(pair.receiver.region, [LocalTransport([second])], clock=pair.clock)
    with pytest.raises(PeerChanged):
        receiver.pull(ticket, [0], FAR)
    receiver = Receiver(pair.receiver.region, [], clock=pair.clock)
    with pytest.raises(PeerUnreachable, match="no transport in common"):
        receiver.connect(Peer.parse(ticket.as_dict()["peer"]), FAR)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4000))
def test_pieces_cover_everything_once(layers: int, blocks: int, most: int) -> None:
    layout = small(layers=layers)
    pieces = list(cut_into_pieces(range(layers), range(blocks), layout, most))
    cells = [
        (y, x) for p in pieces for y in range(p.first_layer, p.end_layer) for x in range(p.first_block, p.end_block)
    ]
    assert sorted(cells) == [(y, x) for y in range(layers) for x in range(blocks)]
    assert all(p.num_bytes(layout) <= max(most, layout.layer_bytes) for p in pieces)


@given(st.binary(max_size=300), st.integers(0, 300))
def test_native_crc_equals_zlib(data: bytes, at: int) -> None:
    for whole in (memoryview(data), memoryview(bytearray(data))):
        assert crc_of_views(CRC, [whole[:at], whole[at:]]) == zlib.crc32(data)


def test_adjacent_blocks_are_merged() -> None:
    assert contiguous_ranges(np.array([3, 4, 5, 9, 8, 0])) == [(3, 6), (9, 10), (8, 9), (0, 1)]
    region: HostRegion = blank(small(), 6)
    assert len(region.piece_views(TransferPiece(0, 1, 0, 4), np.array([1, 2, 3, 5]))) == 2 * 2


@pytest.mark.parametrize(("theirs", "ours"), [(4, 4), (4, 8), (8, 4), (2, 8), (16, 2)])
def test_transposed_keys_arrive_transposed(theirs: int, ours: int) -> None:
    """Elements are stored before tokens, which matters if block sizes differ."""
    layers, heads, numbers, total = 2, 3, 5, 32
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 1 << 16, (layers, total, heads, numbers), np.uint16)
    values = rng.integers(0, 1 << 16, (layers, total, heads, numbers), np.uint16)

    def region(tokens: int, *, full: bool) -> HostRegion:
        layout = KVLayout("m", layers, 2, heads, tokens, 2 * numbers, "bfloat16", turned=2)
        shape = (layers, total // tokens, tokens, heads, numbers)
        parts = [keys.reshape(shape).transpose(0, 1, 3, 4, 2), values.reshape(shape).transpose(0, 1, 3, 2, 4)]
        return HostRegion(layout, [bytearray(part.tobytes() if full else part.nbytes) for part in parts])

    source, target, wanted = region(theirs, full=True), region(ours, full=False), region(ours, full=True)
    for piece in (
        TransferPiece(0, 1, 0, total // theirs),
        TransferPiece(1, 2, 0, 1),
        TransferPiece(1, 2, 1, total // theirs),
    ):
        copy_piece(piece, source, np.arange(total // theirs), target, np.arange(total // ours), StagingBuffer())
    assert [bytes(part) for part in target.parts] == [bytes(part) for part in wanted.parts]
    assert not are_compatible(source.layout, replace(source.layout, turned=0))


def are_compatible(one: KVLayout, other: KVLayout) -> bool:
    try:
        one.check_compatible(other)
    except IncompatibleCaches:
        return False
    return True
