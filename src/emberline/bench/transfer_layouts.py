"""Part of `emberline bench transfer`: the speed between caches whose ranks divide the heads differently.

Results `tcp_` use TCP, like workers with several ranks. Results `mapped_` are copies within one process, which show the
speed that a receiver could reach at most if it mapped the memory of all ranks of a sender on the same host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from emberline.bench.command_process import running_command_process
from emberline.bench.report import BenchReport
from emberline.kernels.cpu.library import find_library
from emberline.kv.block_shard import BlockShard
from emberline.kv.checksum import select_crc
from emberline.kv.transfer.base import Transport
from emberline.kv.transfer.endpoint import STAGED_PULL_CONNECTIONS
from emberline.kv.transfer.group_region import GroupRegion
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.link import LinkOptions
from emberline.kv.transfer.local import LocalTransport, advertise_local
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.region import HostRegion, Region
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.tcp import TcpTransport, serve_tcp
from emberline.kv.transfer.ticket import Ticket

LAYERS, HEADS, TOKENS, WIDTH = 32, 8, 16, 256  # of Llama-3.1-8B in bfloat16: blocks of 2 MiB
LAYOUT = KVLayout("bench", LAYERS, 2, HEADS, TOKENS, WIDTH, "bfloat16")
PAIRS = ((1, 1), (2, 1), (1, 2), (2, 4), (1, 16))  # tensor ranks of sender and receiver; 16: each head is on two ranks
LEASE_S = 120.0


def measure_layouts(report: BenchReport, total_bytes: int, rounds: int, limit: float) -> None:
    """Add the GB/s between each pair of sender and receiver in PAIRS. `limit`: GB/s of a memcpy."""
    count = total_bytes // LAYOUT.block_bytes
    for sender_ranks, receiver_ranks in PAIRS:
        target, name = make_region(receiver_ranks, count), f"tp{sender_ranks}_to_tp{receiver_ranks}"
        source = make_region(sender_ranks, count)
        fill(source)
        sender = Sender(source, "bench")
        advertise_local(sender, "here")
        rates = _measure(target, LocalTransport([sender]), partial(sender.publish, range(count), LEASE_S), rounds)
        report.add(f"mapped_{name}", rates, "GB/s", limit=limit)
        options = LinkOptions(STAGED_PULL_CONNECTIONS, crc=select_crc(find_library()))
        with running_command_process(_serve_blocks, sender_ranks, count) as ask:
            rates = _measure(target, TcpTransport(LAYOUT, options), lambda: Ticket.parse(ask("publish")), rounds)
        report.add(f"tcp_{name}", rates, "GB/s", limit=limit)


def make_region(ranks: int, num_blocks: int) -> Region:
    """Return the cache of an engine with this many tensor ranks."""
    per_rank, copies = max(1, HEADS // ranks), max(1, ranks // HEADS)
    parts = []
    for rank in range(ranks):
        first = rank // copies * per_rank
        own = replace(LAYOUT, heads=per_rank)
        size = own.layers * num_blocks * own.plane_bytes
        memory = HostRegion(own, [np.zeros(size, np.uint8).data for _ in range(own.parts)])
        part = BlockShard((range(LAYERS),), range(first, first + per_rank), is_first=rank % copies == 0)
        parts.append((part, memory))
    return parts[0][1] if ranks == 1 else GroupRegion(LAYOUT, parts)


def fill(region: Region) -> None:
    """Write different content to each block."""
    data, blocks = np.random.default_rng(1).bytes(LAYOUT.block_bytes), np.arange(region.blocks)
    for block in range(region.blocks):
        content = memoryview(data[block:] + data[:block])
        region.scatter(TransferPiece(0, LAYERS, block, block + 1), blocks, LAYOUT, content)


def _measure(region: Region, transport: Transport, publish: Callable[[], Ticket], rounds: int) -> list[float]:
    receiver, rates = Receiver(region, [transport]), []
    for _ in range(rounds + 1):
        ticket, deadline = publish(), time.monotonic() + LEASE_S
        receiver.connect(ticket.peer, deadline)
        began = time.perf_counter()
        receiver.pull(ticket, range(region.blocks), deadline)
        rates.append(region.blocks * LAYOUT.block_bytes / 1e9 / (time.perf_counter() - began))
        receiver.acknowledge(ticket, deadline)
    receiver.close()
    return rates[1:]  # the first is a warm-up


def _serve_blocks(pipe: Connection, ranks: int, num_blocks: int) -> None:
    """Main function of the sending process: publish all blocks on each command."""
    region = make_region(ranks, num_blocks)
    fill(region)
    sender = Sender(region, "bench", crc=select_crc(find_library()))
    server = serve_tcp(sender)
    while pipe.recv() != "stop":
        pipe.send(sender.publish(range(num_blocks), LEASE_S).as_dict())
        sender.collect_ended_leases()
    server.stop()
