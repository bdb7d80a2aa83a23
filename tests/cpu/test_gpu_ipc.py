"""KV transfer by CUDA IPC, with host memory in place of GPU memory: opening, copying, confirming and closing."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from emberline.core.transfer_config import TransferConfig
from emberline.engine.gpu import ipc as transport
from emberline.engine.gpu.device import HostDevice
from emberline.engine.gpu.region import DeviceRegion
from emberline.kernels.cuda import ipc
from emberline.kernels.cuda.driver import CudaDriverError
from emberline.kernels.cuda.ipc import ExportedMemory
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.transfer.endpoint import TransferEndpoint
from emberline.kv.transfer.errors import BadTransfer, BlockReused, PeerUnreachable, TicketEnded
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.ticket import Ticket

BLOCKS, AHEAD = 12, 64  # blocks of a cache; bytes of its allocation before each part
SHAPE = KVShape(3, 2, 16, 8, torch.bfloat16)


class Opened:
    """A fake of the driver's memory handle."""

    alive: set[Opened]

    def __init__(self, handle: bytes, device: torch.device) -> None:
        self.address = int.from_bytes(handle, "little")
        self._among = self.alive  # the list of its own test, after which it may be closed
        self._among.add(self)

    def close(self) -> None:
        self._among.remove(self)


def export(part: torch.Tensor) -> ExportedMemory:
    return ExportedMemory((part.data_ptr() - AHEAD).to_bytes(ipc.HANDLE_BYTES, "little"), AHEAD)


def copy_rows(source: int, source_pitch: int, target: int, target_pitch: int, width: int, height: int) -> None:
    for row in range(height):
        ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "export_memory", export)
    monkeypatch.setattr(ipc, "copy_rows", copy_rows)
    monkeypatch.setattr(transport, "OpenedMemory", Opened)
    Opened.alive = set()


def open_endpoint(name: str, tokens: int = 8) -> TransferEndpoint:
    cache = KVCache(replace(SHAPE, block_size=tokens), BLOCKS)
    region = DeviceRegion(cache.shape.layout("m", transposed_keys=False), cache, HostDevice())
    rng = np.random.default_rng(len(name))
    for part in region.parts:
        part.copy_(torch.from_numpy(rng.integers(0, 1 << 60, part.shape)))
    assert transport.make_ipc_transport(region) is None, "host memory is not GPU memory"
    region.device = torch.device("cuda", 0)
    near = transport.make_ipc_transport(region)
    region.device = torch.device("cpu")
    return TransferEndpoint.open(TransferConfig(name), region, near)


@pytest.fixture
def pair() -> Iterator[tuple[TransferEndpoint, TransferEndpoint]]:
    docks = open_endpoint("there"), open_endpoint("hi")
    yield docks
    for dock in docks:
        dock.close()


def content(dock: TransferEndpoint, blocks: list[int]) -> bytes:
    layout, found = dock.sender.region.layout, bytearray()
    for i in range(len(blocks)):
        room = memoryview(bytearray(layout.block_bytes))
        dock.sender.region.gather(TransferPiece(0, layout.layers, i, i + 1), np.asarray(blocks), layout, room)
        found += room
    return bytes(found)


def with_transports(ticket: Ticket, *ways: str) -> Ticket:
    endpoints = {way: address for way, address in ticket.peer.endpoints.items() if way in ways}
    return replace(ticket, peer=replace(ticket.peer, endpoints=endpoints))


def soon() -> float:
    return time.monotonic() + 20


def wait_until(happened: Callable[[], bool]) -> None:
    ends = soon()
    while not happened():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_blocks_arrive(pair: tuple[TransferEndpoint, TransferEndpoint]) -> None:
    there, here = pair
    here.receiver._max_piece_bytes = (
        2 * SHAPE.block_bytes // SHAPE.layers
    )  # pieces are parts of layers, which must be merged
    side_by_side, strewn = [3, 4, 5, 6, 7], [9, 2, 0, 11, 10]
    for blocks, into in product((side_by_side, strewn), repeat=2):
        ticket = with_transports(there.sender.publish(blocks, 30.0), "cuda")
        assert here.receiver.pull(ticket, into, soon()).complete
        assert content(here, into) == content(there, blocks)
        here.receiver.acknowledge(ticket, soon())
    assert there.sender.stats.bytes == 20 * SHAPE.block_bytes
    assert len(Opened.alive) == 2
    assert here.receiver.connected_transports == {"cuda": 1} and here.receiver.failed_transports == {}


def test_only_adjacent_rows_are_merged() -> None:
    pieces = [
        TransferPiece(0, 1, 0, 2),
        TransferPiece(0, 1, 2, 4),
        TransferPiece(1, 3, 0, 2),
        TransferPiece(2, 3, 2, 4),
        TransferPiece(4, 5, 0, 2),
    ]
    assert transport.merge_adjacent_layers(pieces) == [
        TransferPiece(0, 3, 0, 2),
        TransferPiece(4, 5, 0, 2),
        TransferPiece(0, 1, 2, 4),
        TransferPiece(2, 3, 2, 4),
    ]


def test_other_blocks_are_unchanged(pair: tuple[TransferEndpoint, TransferEndpoint]) -> None:
    there, here = pair
    before = content(here, [0, 1, 2, 3, 4, 8, 9, 10, 11])
    here.receiver.pull(with_transports(there.sender.publish([3, 9, 1], 30.0), "cuda"), [5, 6, 7], soon())
    assert content(here, [0, 1, 2, 3, 4, 8, 9, 10, 11]) == before


@pytest.mark.parametrize("error", [TicketEnded, BlockReused])
def test_copy_after_lease_end_does_not_count(
    pair: tuple[TransferEndpoint, TransferEndpoint], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = pair
    ticket = there.sender.publish([1, 2], 30.0)

    def late(*rows: int) -> None:
        copy_rows(*rows)
        if error is BlockReused:
            there.sender.region.bump_generation(2)
        elif there.sender.lease_ages():
            there.sender.close_ticket(ticket)

    monkeypatch.setattr(ipc, "copy_rows", late)
    with pytest.raises(error):
        here.receiver.pull(with_transports(ticket, "cuda"), [4, 5], soon())


def test_memory_is_closed_when_peer_restarts(pair: tuple[TransferEndpoint, TransferEndpoint]) -> None:
    there, here = pair
    ticket = with_transports(there.sender.publish([1, 2], 30.0), "cuda")
    here.receiver.connect(ticket.peer, soon())
    assert len(Opened.alive) == 2
    there.close()
    wait_until(lambda: not Opened.alive)
    with pytest.raises(PeerUnreachable):
        here.receiver.pull(ticket, [4, 5], soon())


def test_memory_is_closed_after_the_last_copy(
    pair: tuple[TransferEndpoint, TransferEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's process dies while blocks are copied; the traceback of the error holds a reference."""
    there, here = pair
    ticket = with_transports(there.sender.publish([1, 2], 30.0), "cuda")

    def late(*rows: int) -> None:
        there.close()
        time.sleep(0.1)
        assert len(Opened.alive) == 2
        copy_rows(*rows)

    monkeypatch.setattr(ipc, "copy_rows", late)
    with pytest.raises(PeerUnreachable) as error:
        here.receiver.pull(ticket, [4, 5], soon())
    wait_until(lambda: not Opened.alive)
    assert error.value.__traceback__ is not None


def test_memory_is_closed_on_disconnect(pair: tuple[TransferEndpoint, TransferEndpoint]) -> None:
    there, here = pair
    here.receiver.connect(there.sender.peer, soon())
    here.receiver.disconnect(there.sender.peer)
    wait_until(lambda: not Opened.alive)


def test_unopenable_memory_uses_next_transport(
    pair: tuple[TransferEndpoint, TransferEndpoint], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there, here = pair

    def refuse(*_: object) -> None:
        raise CudaDriverError("peer access is not supported")

    monkeypatch.setattr(transport, "OpenedMemory", refuse)
    ticket = there.sender.publish([1, 2], 30.0)
    assert set(ticket.peer.endpoints) == {"cuda", "tcp"}
    with caplog.at_level(logging.WARNING):
        here.receiver.pull(ticket, [4, 5], soon())
    assert content(here, [4, 5]) == content(there, [1, 2])
    assert here.receiver.failed_transports == {"cuda": 1} and "peer=there transport=cuda" in caplog.text
    assert "peer access is not supported" in caplog.text


def test_peer_on_another_host_logs_nothing(pair: tuple[TransferEndpoint, TransferEndpoint]) -> None:
    there, here = pair
    ticket = there.sender.publish([1, 2], 30.0)
    peer = replace(ticket.peer, endpoints={**ticket.peer.endpoints, "cuda": "emberline-elsewhere"})
    here.receiver.pull(replace(ticket, peer=peer), [4, 5], soon())
    assert content(here, [4, 5]) == content(there, [1, 2]) and here.receiver.failed_transports == {}


def test_other_block_size_uses_next_transport(pair: tuple[TransferEndpoint, TransferEndpoint]) -> None:
    there, large = pair[0], open_endpoint("larger", tokens=16)
    large.receiver.pull(there.sender.publish([1, 2, 3, 4], 30.0), [7, 3], soon())
    assert large.receiver.failed_transports == {"cuda": 1}
    large.close()


def test_unshareable_memory_is_not_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(part: torch.Tensor) -> ExportedMemory:
        raise CudaDriverError("operation not supported")

    monkeypatch.setattr(ipc, "export_memory", refuse)
    dock = open_endpoint("there")
    assert set(dock.sender.endpoints) == {"tcp"}
    dock.close()


def test_invalid_ticket_reads_nothing(pair: tuple[TransferEndpoint, TransferEndpoint]) -> None:
    there, here = pair
    ticket = with_transports(there.sender.publish([1, 2], 30.0), "cuda")
    with pytest.raises(BadTransfer, match="block ids outside"):
        here.receiver.pull(replace(ticket, blocks=(1, BLOCKS)), [4, 5], soon())


def test_distant_rows_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    copies: list[tuple[int, int, int, int]] = []

    class Driver:
        def cuMemcpy2DAsync_v2(self, rows: object, stream: object) -> int:
            found = rows._obj  # type: ignore[attr-defined]
            copies.append((found.source_device, found.target_device, found.width, found.height))
            return 0

    class Stream:
        cuda_stream = 7

    monkeypatch.setattr(ipc, "driver_library", Driver)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    ipc.copy_rows(100, 50, 900, 70, 20, 3)
    assert copies == [(100, 900, 20, 3)]
    copies.clear()
    ipc.copy_rows(100, 1 << 31, 900, 70, 20, 2)
    assert copies == [(100, 900, 20, 1), (100 + (1 << 31), 970, 20, 1)]
    assert ctypes.sizeof(ipc._Memcpy2D) == 2 * 56 + 16
