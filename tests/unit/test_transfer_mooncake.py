"""The Mooncake transport with slow, failing and abandoned reads, and with a broken wheel."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transfer_helpers import blank, content, fill, small, soon

from emberline.kv import mooncake as adapter
from emberline.kv.mooncake import MooncakeMissing, check_mooncake_usable
from emberline.kv.transfer import mooncake
from emberline.kv.transfer.errors import PeerLost, PeerUnreachable, TransferCancelled, TransferTimeout
from emberline.kv.transfer.link import LinkOptions
from emberline.kv.transfer.mooncake import MooncakeEngine, MooncakeTransport, RegisteredBuffers
from emberline.kv.transfer.mooncake_server import serve_mooncake
from emberline.kv.transfer.progress import PullProgress
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.sender import Sender

LEASE = 30.0


@dataclass
class SlowEngine:
    """A fake engine that reads by memmove once the test releases it, and returns a chosen result."""

    go: threading.Event = field(default_factory=threading.Event)
    answer: int = 0
    reads: int = 0
    ended: int = 0

    def initialize(self, *_: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 1

    def register_memory(self, address: int, size: int) -> int:
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0

    def batch_transfer_sync_read(self, session: str, into: list[int], places: list[int], lengths: list[int]) -> int:
        self.reads += 1
        self.go.wait(20)
        for target, source, length in zip(into, places, lengths, strict=True):
            ctypes.memmove(target, source, length)
        self.ended += 1
        return self.answer


@dataclass
class Pair:
    engine: SlowEngine
    sender: Sender
    mooncake: MooncakeEngine

    def receiver(self, patience: float = 20.0) -> Receiver:
        transport = MooncakeTransport(small(), self.mooncake, LinkOptions(connections=1, io_timeout_s=patience))
        return Receiver(blank(small(), 12), [transport])

    def release_reads(self) -> None:
        self.engine.go.set()
        until = soon()
        while self.engine.ended < self.engine.reads:
            assert time.monotonic() < until
            time.sleep(0.002)
        for thread in threading.enumerate():
            if thread.name == "mooncake-read":
                thread.join(20)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    engine = SlowEngine()
    monkeypatch.setattr(mooncake, "new_engine", lambda _port: engine)
    made = Pair(engine, Sender(blank(small(), 12), "p"), MooncakeEngine())
    server = serve_mooncake(made.sender, made.mooncake)
    yield made
    made.release_reads()
    server.stop()


def test_late_write_never_reaches_the_cache(pair: Pair) -> None:
    sent, receiver = fill(pair.sender.region, [1, 2], 1), pair.receiver()
    ticket = pair.sender.publish([1, 2], LEASE)
    before = content(receiver.region, range(12))
    with pytest.raises(TransferTimeout):
        receiver.pull(ticket, [3, 4], soon(0.2))
    pair.release_reads()
    assert content(receiver.region, range(12)) == before != sent
    receiver.pull(ticket, [3, 4], soon())
    assert content(receiver.region, [3, 4]) == sent and pair.mooncake.buffers._count == 1  # the buffer was reused
    receiver.close()


def test_buffer_is_not_reused_before_engine_is_done(pair: Pair) -> None:
    receiver, ticket = pair.receiver(patience=0.05), pair.sender.publish([1, 2], LEASE)
    for given_up in range(3):
        with pytest.raises(PeerLost, match="sent nothing"):
            receiver.pull(ticket, [3, 4], soon())
        assert pair.mooncake.buffers._count == given_up + 1
    pair.release_reads()
    patient = pair.receiver()
    patient.pull(ticket, [3, 4], soon())
    assert pair.mooncake.buffers._count == 3
    receiver.close()
    patient.close()


def test_closed_reader_reads_nothing_more(pair: Pair) -> None:
    transport = MooncakeTransport(small(), pair.mooncake, LinkOptions(connections=1, io_timeout_s=0.05))
    receiver = Receiver(blank(small(), 12), [transport], max_piece_bytes=64)
    with pytest.raises(PeerLost, match="sent nothing"):
        receiver.pull(pair.sender.publish([1, 2, 3], LEASE), [3, 4, 5], soon())
    pair.release_reads()
    assert pair.engine.reads == 1 and len(pair.mooncake.buffers._idle) == 1
    receiver.close()


def test_pull_is_cancelled_while_engine_reads(pair: Pair) -> None:
    receiver, progress, ended = pair.receiver(), PullProgress(), []
    ticket = pair.sender.publish([1, 2], LEASE)

    def pull() -> None:
        try:
            receiver.pull(ticket, [3, 4], soon(3600), progress=progress)
        except TransferCancelled as error:
            ended.append(error)

    thread = threading.Thread(target=pull)
    thread.start()
    while not pair.engine.reads:
        time.sleep(0.002)
    progress.cancel()
    thread.join(20)
    assert len(ended) == 1 and not thread.is_alive()
    receiver.close()


def test_failed_read_quarantines_its_buffer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.engine.answer = -1
    pair.engine.go.set()
    receiver, ticket = pair.receiver(), pair.sender.publish([1, 2], LEASE)
    for failed in range(2):
        with pytest.raises(PeerLost, match="memory"):
            receiver.pull(ticket, [3, 4], soon())
        assert pair.mooncake.buffers._count == failed + 1
    pair.engine.answer = 0
    monkeypatch.setattr(mooncake, "QUARANTINE_S", -1.0)
    receiver.pull(ticket, [3, 4], soon())
    assert pair.mooncake.buffers._count == 2
    receiver.close()


def test_number_of_buffers_is_bounded() -> None:
    rooms = RegisteredBuffers(lambda view: None, max_buffers=2)
    first = rooms.acquire_buffer(10)
    rooms.acquire_buffer(10)
    with pytest.raises(PeerUnreachable, match="blocked by failed reads"):
        rooms.acquire_buffer(10)
    rooms.release_buffer(first, reusable=True)
    assert rooms.acquire_buffer(10) is first


def test_unallocated_buffer_is_not_counted() -> None:
    def refuse(view: memoryview) -> None:
        raise PeerUnreachable("no memory may be locked")

    rooms = RegisteredBuffers(refuse, max_buffers=1)
    for _ in range(2):
        with pytest.raises(PeerUnreachable, match="locked"):
            rooms.acquire_buffer(10)


BROKEN = {
    "import os; os.abort()": "signal 6",
    "import time; time.sleep(60)": "does not start within",
    "raise ImportError('libibverbs.so.1: cannot open')": "libibverbs.so.1",
    "raise OSError('wrong ELF class')": "wrong ELF class",
}


@pytest.mark.parametrize("code", BROKEN)
def test_broken_wheel_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    (tmp_path / "mooncake" / "engine.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert BROKEN[code] in (check_mooncake_usable(timeout_s=1.5 if "sleep" in code else 20.0) or "")


def test_installed_wheel_works() -> None:
    assert check_mooncake_usable() is None


def test_missing_wheel_makes_peer_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_port: int) -> None:
        raise MooncakeMissing("Mooncake cannot be imported: no module")

    monkeypatch.setattr(mooncake, "new_engine", missing)
    with pytest.raises(PeerUnreachable, match="cannot be imported"):
        MooncakeEngine()
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(MooncakeMissing, match="cannot be imported"):
        adapter.new_engine()
