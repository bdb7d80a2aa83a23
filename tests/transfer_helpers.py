"""Helpers for transfer tests: small caches with known content, and a proxy that injects connection faults."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.region import HostRegion
from emberline.kv.transfer.ticket import Ticket


def small(tokens: int = 4, **others: object) -> KVLayout:
    return replace(KVLayout("m", layers=3, parts=2, heads=2, tokens=tokens, width=2, dtype="bfloat16"), **others)


def blank(layout: KVLayout, blocks: int) -> HostRegion:
    size = layout.layers * blocks * layout.plane_bytes
    return HostRegion(layout, [bytearray(size) for _ in range(layout.parts)])


def fill(region: HostRegion, wanted: Sequence[int], seed: int) -> bytes:
    """Write new content as the owner of a cache does, bumping the generation first; return it."""
    rng, blocks = np.random.default_rng(seed), np.asarray(wanted, np.int64)
    for i, block in enumerate(blocks):
        region.bump_generation(block)
        for view in region.piece_views(TransferPiece(0, region.layout.layers, i, i + 1), blocks):
            view[:] = rng.bytes(len(view))
    return content(region, wanted)


def content(region: HostRegion, wanted: Sequence[int]) -> bytes:
    """Return the content by token, independent of block size: [tokens, layers, parts, heads, width]."""
    lay, found, blocks = region.layout, [], np.asarray(wanted, np.int64)
    for i in range(len(blocks)):
        views = region.piece_views(TransferPiece(0, lay.layers, i, i + 1), blocks)
        array = np.frombuffer(b"".join(views), np.uint8)
        found.append(array.reshape(lay.layers, lay.parts, lay.heads, lay.tokens, lay.width).transpose(3, 0, 1, 2, 4))
    return b"".join(part.tobytes() for part in found)


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def with_endpoint(ticket: Ticket, address: str) -> Ticket:
    return replace(ticket, peer=replace(ticket.peer, endpoints={"tcp": address}))


@dataclass
class Fault:
    kind: str  # cut: close both directions; flip: invert a bit; hold: forward no more bytes without closing
    down: bool  # whether in the direction from sender to receiver
    at: int  # after so many bytes of that direction of the first connection


@dataclass
class Proxy:
    """A proxy that forwards bytes and injects one fault, on the first connection."""

    target: str
    fault: Fault | None = None
    counts: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    borders: dict[bool, set[int]] = field(default_factory=lambda: {True: set(), False: set()})
    happened: bool = False

    def __enter__(self) -> Proxy:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._done = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for sock in [self._listener, *self._sockets]:
            sock.close()

    def _accept(self) -> None:
        first = True
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                host, _, port = self.target.rpartition(":")
                far = socket.create_connection((host, int(port)))
                self._sockets += [near, far]
                for down, source, sink in ((False, near, far), (True, far, near)):
                    thread = threading.Thread(target=self._pump, args=(source, sink, down, first), daemon=True)
                    self._threads.append(thread)
                    thread.start()
                first = False

    def _pump(self, source: socket.socket, sink: socket.socket, down: bool, first: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if first:
                    data = self._apply_fault(data, down)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _apply_fault(self, data: bytes, down: bool) -> bytes:
        begin = self.counts[down]
        self.counts[down] = end = begin + len(data)
        self.borders[down].add(begin)
        fault = self.fault
        if fault is None or fault.down != down or not begin <= fault.at < end:
            return data
        self.happened = True
        at = fault.at - begin
        if fault.kind == "flip":
            return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        if fault.kind == "hold":
            self._done.wait(30)
            raise OSError("held")
        raise OSError("cut")
