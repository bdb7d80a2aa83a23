"""`emberline bench transfer`: the speed and CPU time of moving KV blocks between two caches, over each transport.

The sender runs in a second process, except for the transport `local`. Blocks lie at random places of both caches, which
is the worst case, and in a second measurement next to each other. They hold normally distributed bfloat16 numbers. For
comparison, one memcpy of the same size and plain sockets are measured. In results with `_uw`, the blocks are compressed
for the transfer, whether or not that is faster.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np

from emberline.bench.command_process import SendCommand, running_command_process
from emberline.bench.report import BenchReport
from emberline.bench.transfer_layouts import measure_layouts
from emberline.core.errors import InvalidRequest
from emberline.core.tls import TLSIdentity
from emberline.core.tls_config import TLSConfig
from emberline.kernels.cpu.library import find_library
from emberline.kv.checksum import Crc, select_crc
from emberline.kv.codec import KVCodec, select_kv_codec
from emberline.kv.mooncake import check_mooncake_usable, installed_distribution
from emberline.kv.transfer.base import Transport
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.link import LinkOptions
from emberline.kv.transfer.local import LocalTransport, advertise_local
from emberline.kv.transfer.mooncake import MooncakeEngine, MooncakeTransport
from emberline.kv.transfer.mooncake_server import serve_mooncake
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.region import HostRegion
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.shm import SharedSegment, ShmTransport, serve_shm
from emberline.kv.transfer.tcp import TcpTransport, serve_tcp
from emberline.kv.transfer.ticket import Ticket

LAYERS = 16
STEP = 64 << 10  # bytes; block sizes are multiples of this
CALL = 2 << 20  # bytes per call of bare sockets
LEASE_S = DEADLINE = 120.0  # seconds
STREAMS = (1, 2)


@dataclass(frozen=True, slots=True)
class TransferRound:
    rate: float  # GB/s
    cpu: float  # CPU seconds of all processes per GB


def bench(block_sizes: list[int], total_bytes: int, rounds: int, piece_bytes: int) -> BenchReport:
    """Run the benchmark. `block_sizes` are in bytes; each measurement moves `total_bytes`."""
    if any(size <= 0 or size % STEP for size in block_sizes):
        raise InvalidRequest(f"block sizes must be multiples of {STEP >> 10} KiB", param="blocks")
    library = find_library()
    crc, codec, broken = select_crc(library), select_kv_codec("auto", library, "bfloat16"), check_mooncake_usable()
    engine = MooncakeEngine() if broken is None else None
    config = {
        "block_bytes": block_sizes,
        "total_bytes": total_bytes,
        "rounds": rounds,
        "piece_bytes": piece_bytes,
        "layers": LAYERS,
    }
    config["mooncake"] = broken or installed_distribution()
    report = BenchReport("transfer", config)
    limit = _measure_memcpy(report, total_bytes, rounds)
    raw = {streams: measure_raw_sockets(report, total_bytes, rounds, streams) for streams in STREAMS}
    for size in block_sizes:
        for order in ("adjacent", "scattered"):
            _measure_case(
                report,
                TransferCase(size, total_bytes // size, order, piece_bytes, rounds, crc, codec, engine),
                limit,
                raw,
            )
    measure_layouts(report, total_bytes, rounds, limit)
    return report


def bench_layouts(total_bytes: int, rounds: int) -> BenchReport:
    """Run only one part of the benchmark: transfers between caches whose ranks divide the heads differently."""
    report = BenchReport("transfer", {"total_bytes": total_bytes, "rounds": rounds})
    measure_layouts(report, total_bytes, rounds, _measure_memcpy(report, total_bytes, rounds))
    return report


@dataclass(frozen=True, slots=True)
class TransferCase:
    block: int  # bytes
    count: int
    order: str
    piece: int
    rounds: int
    crc: Crc
    codec: KVCodec | None
    mooncake: MooncakeEngine | None

    @property
    def layout(self) -> KVLayout:
        return KVLayout("bench", LAYERS, 2, 8, 16, self.block // (LAYERS * 2 * 8 * 16), "bfloat16")

    def choose_block_ids(self, seed: int) -> list[int]:
        ids = list(range(self.count))
        if self.order == "scattered":
            random.Random(seed).shuffle(ids)
        return ids


def _measure_case(
    report: BenchReport, case: TransferCase, memcpy_speed: float, socket_speeds: dict[int, float]
) -> None:
    target = _make_region(case.layout, case.count)
    with running_command_process(
        _serve_blocks, case.layout, case.count, case.choose_block_ids(1), case.mooncake is not None
    ) as ask:
        expected = ask("sums")
        tcp = (f"tcp_{n}{end}" for n in STREAMS for end in ("", "_unchecked", "_uw"))
        for kind in ("local", "shm", *tcp, *(["mooncake"] if case.mooncake else [])):
            if kind == "local":
                found = _measure_local(case, target)
            else:
                _zero_region(target)
                found = _measure_transport(case, target, _make_transport(kind, case), ask)
                assert _plane_checksums(target, case.choose_block_ids(2)) == expected, "bytes were lost on the way"
            name = f"{kind}_{case.block >> 10}k_{case.order}"
            peer = socket_speeds[int(kind.split("_")[1])] if kind.startswith("tcp") else None
            report.add(name, [each.rate for each in found], "GB/s", peer=peer, limit=memcpy_speed)
            report.add(f"{name}_cpu", [each.cpu for each in found], "s/GB")


def measure_tls(report: BenchReport, config: TLSConfig, total_bytes: int, rounds: int, piece_bytes: int) -> None:
    """Add the speed of transfers over TLS, compared with the same transfers over TCP without encryption."""
    library, size = find_library(), 1 << 20
    case = TransferCase(size, total_bytes // size, "scattered", piece_bytes, rounds, select_crc(library), None, None)
    target, context = _make_region(case.layout, case.count), TLSIdentity(config).peer_client_context()
    with running_command_process(
        _serve_blocks, case.layout, case.count, case.choose_block_ids(1), False, config
    ) as ask:
        for streams in STREAMS:
            options = LinkOptions(streams, crc=case.crc)
            plain, secure = (
                _measure_transport(case, target, TcpTransport(case.layout, options, tls), ask)
                for tls in (None, context)
            )
            assert _plane_checksums(target, case.choose_block_ids(2)) == ask("sums"), "bytes were lost on the way"
            name, peer = f"kv_transfer_{streams}", median(each.rate for each in plain)
            report.add(name, [each.rate for each in secure], "GB/s", peer=peer)
            peer = median(each.cpu for each in plain)
            report.add(f"{name}_cpu", [each.cpu for each in secure], "s/GB", peer=peer)


def _make_transport(kind: str, case: TransferCase) -> Transport:
    if kind == "shm":
        return ShmTransport(case.layout)
    if kind == "mooncake":
        assert case.mooncake is not None
        return MooncakeTransport(case.layout, case.mooncake, LinkOptions(connections=1, crc=case.crc))
    _, streams, *how = kind.split("_")
    codecs = [case.codec] if how == ["uw"] and case.codec else []
    checked = how != ["unchecked"]
    return TcpTransport(case.layout, LinkOptions(int(streams), checked, codecs, always_encode=True, crc=case.crc))


def _measure_transport(
    case: TransferCase, target_region: HostRegion, transport: Transport, send_command: SendCommand
) -> list[TransferRound]:
    receiver, found, into = (
        Receiver(target_region, [transport], max_piece_bytes=case.piece),
        [],
        case.choose_block_ids(2),
    )
    for _ in range(case.rounds + 1):
        ticket = Ticket.parse(send_command("publish"))
        receiver.connect(ticket.peer, time.monotonic() + DEADLINE)
        theirs = send_command("cpu")
        seconds, ours = _time_call(partial(receiver.pull, ticket, into, time.monotonic() + DEADLINE))
        receiver.acknowledge(ticket, time.monotonic() + DEADLINE)
        size = case.count * case.block / 1e9
        found.append(TransferRound(size / seconds, (ours + send_command("cpu") - theirs) / size))
    receiver.close()
    return found[1:]  # the first is a warm-up


def _measure_local(case: TransferCase, target_region: HostRegion) -> list[TransferRound]:
    _fill_with_random_values(source := _make_region(case.layout, case.count))
    sender = Sender(source, "bench")
    advertise_local(sender, "here")
    receiver = Receiver(target_region, [LocalTransport([sender])], max_piece_bytes=case.piece)
    found, into = [], case.choose_block_ids(2)
    for _ in range(case.rounds + 1):
        ticket = sender.publish(case.choose_block_ids(1), LEASE_S)
        seconds, cpu = _time_call(partial(receiver.pull, ticket, into, time.monotonic() + DEADLINE))
        size = case.count * case.block / 1e9
        found.append(TransferRound(size / seconds, cpu / size))
    return found[1:]


def _time_call(work: Callable[[], object]) -> tuple[float, float]:
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def _measure_memcpy(report: BenchReport, total_bytes: int, rounds: int) -> float:
    source, target = np.ones(total_bytes, np.uint8), np.zeros(total_bytes, np.uint8)
    times = [_time_call(lambda: np.copyto(target, source)) for _ in range(rounds + 1)][1:]
    report.add("memcpy", [total_bytes / 1e9 / seconds for seconds, _ in times], "GB/s")
    report.add("memcpy_cpu", [cpu / (total_bytes / 1e9) for _, cpu in times], "s/GB")
    return report.results["memcpy"].value


def measure_raw_sockets(report: BenchReport, total_bytes: int, rounds: int, num_sockets: int) -> float:
    """Add the GB/s of plain sockets, the most that this system moves over TCP, and return it."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    args = (theirs, listener.getsockname()[1], total_bytes // num_sockets, rounds + 1, num_sockets)
    child = multiprocessing.get_context("spawn").Process(target=_send_bytes, args=args)
    child.start()
    socks = [listener.accept()[0] for _ in range(num_sockets)]
    target, found = memoryview(bytearray(total_bytes)), []
    share = total_bytes // num_sockets
    for _ in range(rounds + 1):
        before = ours.recv()
        work = [partial(_receive_all, sock, target[i * share : (i + 1) * share]) for i, sock in enumerate(socks)]
        ours.send("go")
        seconds, cpu = _time_call(partial(_run_in_threads, work))
        found.append(
            TransferRound(
                share * num_sockets / 1e9 / seconds, (cpu + ours.recv() - before) / (share * num_sockets / 1e9)
            )
        )
    child.join()
    for sock in (*socks, listener):
        sock.close()
    report.add(f"raw_socket_{num_sockets}", [each.rate for each in found[1:]], "GB/s")
    report.add(f"raw_socket_{num_sockets}_cpu", [each.cpu for each in found[1:]], "s/GB")
    return report.results[f"raw_socket_{num_sockets}"].value


def _run_in_threads(functions: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=each) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _receive_all(sock: socket.socket, buffer: memoryview) -> None:
    while buffer:
        buffer = buffer[sock.recv_into(buffer[:CALL], 0, socket.MSG_WAITALL) :]


def _send_bytes(pipe: Connection, port: int, bytes_per_socket: int, rounds: int, num_sockets: int) -> None:
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_sockets)]
    view = memoryview(bytearray(os.urandom(1 << 20) * -(-bytes_per_socket // (1 << 20))))[:bytes_per_socket]

    def send_all(sock: socket.socket) -> None:
        for at in range(0, bytes_per_socket, CALL):
            sock.sendall(view[at : at + CALL])

    for _ in range(rounds):
        pipe.send(time.process_time())
        pipe.recv()
        _run_in_threads([partial(send_all, sock) for sock in socks])
        pipe.send(time.process_time())


# -- sender process ----------------------------------------------------------------------------------------------------


def _serve_blocks(
    pipe: Connection,
    layout: KVLayout,
    num_blocks: int,
    block_ids: list[int],
    use_mooncake: bool,
    tls: TLSConfig | None = None,
) -> None:
    """Main function of the sending process: publish the blocks, or return measurements, on each command."""
    segment = SharedSegment(layout, num_blocks)
    _fill_with_random_values(segment.region)
    library = find_library()
    codec = select_kv_codec("auto", library, "bfloat16")
    sender = Sender(segment.region, "bench", crc=select_crc(library))
    servers = [serve_tcp(sender, codecs=[codec] if codec else []), serve_shm(sender, segment)]
    if use_mooncake:
        servers.append(serve_mooncake(sender, MooncakeEngine()))
    if tls is not None:
        servers.append(serve_tcp(sender, tls=TLSIdentity(tls).peer_listener_context()))
    answers: dict[str, Callable[[], Any]] = {
        "publish": lambda: sender.publish(block_ids, LEASE_S).as_dict(),
        "cpu": time.process_time,
        "sums": lambda: _plane_checksums(segment.region, block_ids),
    }
    while (what := pipe.recv()) != "stop":
        pipe.send(answers[what]())
        sender.collect_ended_leases()
    for server in servers:
        server.stop()


def _make_region(layout: KVLayout, num_blocks: int) -> HostRegion:
    size = layout.layers * num_blocks * layout.plane_bytes
    return HostRegion(layout, [np.zeros(size, np.uint8).data for _ in range(layout.parts)])


def _whole_region_piece(region: HostRegion) -> TransferPiece:
    return TransferPiece(0, region.layout.layers, 0, region.blocks)


def _fill_with_random_values(region: HostRegion) -> None:
    """Fill the region with normally distributed values.

    Each plane (the keys or the values of one layer) differs from the next.
    """
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(1 << 22, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for view in region.piece_views(_whole_region_piece(region), np.arange(region.blocks)):
        plane = np.frombuffer(view, np.uint16)
        plane[:] = np.resize(np.roll(values, -int(rng.integers(1 << 22))), len(plane))


def _zero_region(region: HostRegion) -> None:
    for view in region.piece_views(_whole_region_piece(region), np.arange(region.blocks)):
        np.frombuffer(view, np.uint8)[:] = 0


def _plane_checksums(region: HostRegion, block_ids: list[int]) -> list[int]:
    """Return a checksum of each layer's keys and values of each block, which reveals missing or misplaced data."""
    where = np.asarray(block_ids, np.int64)
    wholes = (region.piece_views(TransferPiece(0, LAYERS, i, i + 1), where) for i in range(len(block_ids)))
    return [int(np.frombuffer(view, np.uint64).sum()) for views in wholes for view in views]
