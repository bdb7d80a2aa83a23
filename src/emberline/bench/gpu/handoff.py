"""Measures KV transfer between two processes on one GPU, over TCP and by CUDA IPC.

First, transfers of KV blocks alone are measured in GB/s and compared with plain copies. Then one process computes a
prompt and the other process continues the request. The results show how much time this handoff adds, and how much of
the transfer overlaps with the prefill.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from emberline.bench.gpu.job_run import CONFIG, VOCAB
from emberline.bench.gpu.model import RandomWeights
from emberline.bench.report import BenchReport
from emberline.bench.transfer import measure_raw_sockets
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError
from emberline.core.events import Timing
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.engine import Engine
from emberline.engine.gpu import ipc
from emberline.engine.gpu.boot import boot_gpu
from emberline.engine.gpu.device import CudaDevice
from emberline.engine.gpu.region import DeviceRegion
from emberline.kernels.cpu.library import find_library
from emberline.kv.cache import KVCache, KVShape
from emberline.kv.checksum import select_crc
from emberline.kv.transfer.base import Transport
from emberline.kv.transfer.endpoint import TransferEndpoint, TransferOptions
from emberline.kv.transfer.link import LinkOptions
from emberline.kv.transfer.piece import MAX_PIECE_BYTES, cut_into_pieces
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.tcp import TcpTransport
from emberline.kv.transfer.ticket import Ticket

TRANSPORTS = ("tcp", "cuda")
MOVED_BLOCKS, CACHE_FACTOR = 64, 3  # blocks of a transfer, scattered over a cache of three times as many
CONNECTIONS = (2, 4, 8)
ROUNDS = 5
PROMPT_TOKENS, CHUNK_TOKENS = 8192, 2048
KV_MEMORY_BYTES = 8 << 30
TRANSFER_TIMEOUT_S = 60.0


def measure(report: BenchReport, rounds: int = 0) -> None:
    _measure_blocks(report, rounds or ROUNDS)
    _measure_requests(report, rounds or ROUNDS)


# -- blocks alone ------------------------------------------------------------------------------------------------------


def _measure_blocks(report: BenchReport, rounds: int) -> None:
    """Add the GB/s of block transfers over each transport to the report.

    The name of a TCP result ends with the number of connections. The engine uses four by default.
    """
    crc = select_crc(find_library())
    with _running_child_process(_publish_blocks) as pipe:
        region = _make_region()
        size = MOVED_BLOCKS * region.layout.block_bytes
        limits = _measure_copies(region, rounds)
        _measure_staging(report, region, limits["tcp"], rounds)
        for streams in CONNECTIONS:
            peer = measure_raw_sockets(report, size, rounds, streams)
            transport = TcpTransport(region.layout, LinkOptions(streams, crc=crc))
            rates = _measure_transport(pipe, region, transport, rounds)
            report.add(f"handoff_tcp_{streams}", rates, "GB/s", peer=peer, limit=limits["tcp"])
        rates = _measure_transport(pipe, region, ipc.IpcTransport(region), rounds)
        report.add("handoff_cuda", rates, "GB/s", limit=limits["cuda"])
        report.config["moved"] = f"{MOVED_BLOCKS} blocks of {region.layout.block_bytes} bytes, at random places"


def _measure_transport(pipe: Connection, region: DeviceRegion, transport: Transport, rounds: int) -> list[float]:
    receiver, into, rates = Receiver(region, [transport]), _random_block_ids(1), []
    for _ in range(rounds + 1):
        pipe.send("publish")
        ticket = Ticket.parse(_receive_message(pipe))
        began = time.perf_counter()
        progress = receiver.pull(ticket, into, time.monotonic() + TRANSFER_TIMEOUT_S)
        rates.append(progress.arrived_bytes / 1e9 / (time.perf_counter() - began))
        receiver.acknowledge(ticket, time.monotonic() + TRANSFER_TIMEOUT_S)
    receiver.close()
    return rates[1:]  # the first one connects


def _measure_staging(report: BenchReport, region: DeviceRegion, limit: float, rounds: int) -> None:
    """Add the GB/s of the copies between GPU cache and main memory that a TCP connection makes."""
    layout, blocks = region.layout, np.asarray(_random_block_ids(1), np.int64)
    pieces = list(cut_into_pieces(range(layout.layers), range(MOVED_BLOCKS), layout, MAX_PIECE_BYTES))
    buffer = memoryview(bytearray(max(piece.num_bytes(layout) for piece in pieces)))
    for name, move in (("gather", region.gather), ("scatter", region.scatter)):
        rates = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            for piece in pieces:
                move(piece, blocks, layout, buffer[: piece.num_bytes(layout)])
            rates.append(MOVED_BLOCKS * layout.block_bytes / 1e9 / (time.perf_counter() - began))
        report.add(f"handoff_{name}", rates[1:], "GB/s", limit=limit)


# -- requests ----------------------------------------------------------------------------------------------------------


def _measure_requests(report: BenchReport, rounds: int) -> None:
    with _running_child_process(_compute_prompts) as pipe:
        engine = _make_engine("here")
        for transport in TRANSPORTS:
            moves = [_run_handoff(engine, pipe, transport, i) for i in range(rounds + 1)][1:]  # the first one connects
            alone = min(move.alone for move in moves)
            for name in ("ticket", "pulling", "computed", "landed", "first", "second"):
                values = [getattr(move, name) for move in moves]
                peer = {"peer": alone} if name == "first" else {}
                report.add(f"handoff_{transport}_{name}_ms", values, "ms", **peer)
            report.add(f"handoff_{transport}_overhead_ms", [move.first - move.computed for move in moves], "ms")
            report.add(f"handoff_{transport}_moving_ms", [move.moving for move in moves], "ms")
            report.add(f"handoff_{transport}_hidden", [move.hidden for move in moves], "%")
            assert engine.transfer_endpoint is not None
            engine.transfer_endpoint.receiver.close()
        engine.close()


@dataclass(frozen=True, slots=True)
class HandoffTimes:
    """Times of one prompt that the other process computes and this process continues.

    All are milliseconds since the prompt was sent, unless stated otherwise.
    """

    alone: float  # first token, if this process computes the prompt itself
    moving: float  # duration of the copies
    hidden: float  # percent of that during which the other process still computed
    ticket: float  # ticket received
    pulling: float  # transfer started
    computed: float  # prompt computed by the other process
    landed: float  # last block received
    first: float  # first token
    second: float  # second token


def _run_handoff(engine: Engine, pipe: Connection, transport: str, prompt_number: int) -> HandoffTimes:
    rng = random.Random(f"{transport} {prompt_number}")
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    submission = Submission(
        f"{transport}{prompt_number}",
        [rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)],
        params,
        timeout=TRANSFER_TIMEOUT_S,
    )
    local = _run_request(engine, replace(submission, id=f"{submission.id}-alone", salt="alone"))
    before, sent = engine.stats().transfer, time.monotonic()
    pipe.send(submission)
    ticket = Ticket.parse(_receive_message(pipe))
    received = time.monotonic()
    by_transport = replace(ticket, peer=replace(ticket.peer, endpoints={transport: ticket.peer.endpoints[transport]}))
    timing, computed, after = (
        _run_request(engine, replace(submission, source=by_transport.as_dict())),
        _receive_message(pipe),
        engine.stats().transfer,
    )
    if before is None or after is None or after.pull_failures or timing.pulled is None:
        raise EmberlineError(f"KV transfer failed: stats={after}")
    marks = received, timing.pulled.began, computed, timing.pulled.ended, timing.first_token, timing.finished
    moving = after.copy_seconds - before.copy_seconds
    hidden = 100.0 * (after.hidden_seconds - before.hidden_seconds) / moving
    return HandoffTimes(
        1e3 * (local.ttft or 0.0), 1e3 * moving, hidden, *(1e3 * ((mark or 0.0) - sent) for mark in marks)
    )


def _run_request(engine: Engine, submission: Submission) -> Timing:
    engine.add(submission)
    timing: Timing | None = None
    while not engine.idle:
        for output in engine.step():
            if output.error is not None:
                raise EmberlineError(output.error)
            timing = output.timing or timing
    assert timing is not None
    return timing


def _measure_copies(region: DeviceRegion, rounds: int) -> dict[str, float]:
    """Return the best GB/s of plain copies of the same size, which are the limits of the two transports.

    `tcp` is a copy to main memory and back, `cuda` a copy within the GPU.
    """
    size = MOVED_BLOCKS * region.layout.block_bytes
    device = torch.empty(size, dtype=torch.uint8, device=region.device)
    second_copy, host = torch.empty_like(device), torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def best_rate(*copies: tuple[torch.Tensor, torch.Tensor]) -> float:
        rates = []
        for _ in range(rounds + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for to, source in copies:
                to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rates.append(size / 1e9 / (time.perf_counter() - began))
        return max(rates)

    return {"tcp": best_rate((host, device), (device, host)), "cuda": best_rate((second_copy, device))}


# -- the other process -------------------------------------------------------------------------------------------------


def _publish_blocks(pipe: Connection) -> None:
    """Main function of the sending process: publish the same blocks each time the parent process asks for them."""
    dock = _open_endpoint("there", _make_region())
    pipe.send("ready")
    while pipe.recv() is not None:
        dock.sender.collect_ended_leases()
        pipe.send(dock.sender.publish(_random_block_ids(2), TRANSFER_TIMEOUT_S).as_dict())
    dock.close()


def _compute_prompts(pipe: Connection) -> None:
    """Main function of the computing process: compute the prompts that the parent process sends.

    For each prompt it sends the first ticket (the right to pull the prompt's KV blocks) and the time of the first
    token.
    """
    engine = _make_engine("there")
    pipe.send("ready")
    while True:
        while engine.needs_polling and not pipe.poll(0.002):
            engine.step()
        submission = pipe.recv()
        if submission is None:
            break
        has_ticket = False
        engine.add(replace(submission, publish=True))
        while not engine.idle:
            for output in engine.step():
                if output.ticket is not None and not has_ticket:
                    pipe.send(output.ticket)
                    has_ticket = True
                if output.finish is not None:
                    pipe.send(time.monotonic())
    engine.close()


@contextmanager
def _running_child_process(child_main: Callable[[Connection], None]) -> Iterator[Connection]:
    """Run `child_main` in a child process while the context is open, and yield the connection to that process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=child_main, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process closes the pipe
    try:
        _receive_message(ours)
        yield ours
        ours.send(None)
        process.join(TRANSFER_TIMEOUT_S)
    finally:
        process.kill()


def _receive_message(pipe: Connection) -> Any:
    if not pipe.poll(2 * TRANSFER_TIMEOUT_S):
        raise EmberlineError(f"the child process sent no message for {2 * TRANSFER_TIMEOUT_S:.0f} s")
    return pipe.recv()


def _make_region() -> DeviceRegion:
    device, settings = CudaDevice(), EngineConfig.build("").with_gpu_defaults()
    shape = KVShape(CONFIG.layers, CONFIG.kv_heads, CONFIG.head_dim, settings.scheduler.block_size, torch.bfloat16)
    cache = KVCache(shape, CACHE_FACTOR * MOVED_BLOCKS, str(device.torch_device))
    torch.cuda.synchronize()
    return DeviceRegion(shape.layout("bench", transposed_keys=False), cache, device)


def _make_engine(name: str) -> Engine:
    settings = EngineConfig.build(
        "", max_running=8, max_batch_tokens=CHUNK_TOKENS, kv_memory=KV_MEMORY_BYTES, transfer=TransferConfig(name)
    ).with_gpu_defaults()
    weights = RandomWeights("cuda", torch.bfloat16)
    context = PROMPT_TOKENS + 256
    return boot_gpu(
        CONFIG, weights, context=context, settings=settings, build_endpoint=partial(_open_endpoint, name)
    ).engine


def _open_endpoint(name: str, region: DeviceRegion) -> TransferEndpoint:
    transfer_options = TransferOptions(crc=select_crc(find_library()))
    return TransferEndpoint.open(TransferConfig(name), region, ipc.make_ipc_transport(region), transfer_options)


def _random_block_ids(seed: int) -> list[int]:
    return random.Random(seed).sample(range(CACHE_FACTOR * MOVED_BLOCKS), MOVED_BLOCKS)
