"""Fault: a temporary failure of a process, connection or disk, and the functions that inject such failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from emberline.chaos.chaos_cluster import ChaosCluster
from emberline.chaos.chaos_process import ChaosProcess
from emberline.chaos.fault_proxy import FaultProxy
from emberline.chaos.network import LOOPBACK_ADDRESS, LinkDisturbance
from emberline.chaos.request_progress import RequestProgress, RequestStage
from emberline.cluster.supervisor import SupervisedProcess, Supervisor
from emberline.core.errors import EmberlineError

STAGES_BEFORE_OUTPUT = (RequestStage.QUEUED, RequestStage.PREFILL, RequestStage.TRANSFER)
ALL_STAGES = (*STAGES_BEFORE_OUTPUT, RequestStage.FIRST, RequestStage.DECODE)
TRANSFER_STAGES = (RequestStage.PREFILL, RequestStage.TRANSFER)
QUEUED_STAGE = (RequestStage.QUEUED,)
SHORT_FAULT_S = 0.3
LOST_WORKER_FAULT_S = 3.0  # so long that the router counts the worker as lost
DISK_COUNTER_LABEL, STORE_COUNTER_LABEL = 'tier="disk"', 'tier="store"'
FULL_DISK_FILE_BYTES = 1 << 12

FaultTarget = Literal["prefill", "decode", "router", "store"]


@dataclass(frozen=True, slots=True)
class FaultContext:
    """The request at which a fault is aimed, and the processes that serve it."""

    cluster: ChaosCluster
    progress: RequestProgress
    rng: random.Random
    answering_worker: ChaosProcess  # the worker that should answer

    @property
    def prefill_worker(self) -> ChaosProcess:
        return self.cluster.find_worker(self.progress.prefill_worker) or self.rng.choice(
            self.cluster.workers_with_role("prefill")
        )

    @property
    def decode_worker(self) -> ChaosProcess:
        return self.cluster.find_worker(self.progress.decode_worker) or self.answering_worker

    def process_at(self, target: FaultTarget) -> ChaosProcess:
        match target:
            case "prefill":
                return self.prefill_worker
            case "decode":
                return self.decode_worker
            case "router":
                return self.cluster.router_of(self.progress)
            case "store":
                assert self.cluster.store is not None
                return self.cluster.store


FaultInjector = Callable[[FaultContext], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    target: FaultTarget
    inject: FaultInjector
    stages: tuple[RequestStage, ...] = ALL_STAGES
    max_duration_s: float = 20.0  # the fault ends earlier when the request ends
    min_duration_s: float = 0.0
    weight: float = 1.0  # relative frequency
    needs_tcp_transfer: bool = False  # the answering worker must fetch blocks over TCP
    needs_links: bool = False  # workers must have their own network links
    starts_before_request: bool = False  # the fault begins before the request is sent
    disconnects_client: bool = False  # the client disconnects
    reuses_prompt: bool = False  # the request repeats a prompt, whose blocks may be on disk
    counter_label: str = ""  # part of the name or labels of the worker's counter that detects the fault
    keeps_workers_available: bool = False  # no process becomes unavailable
    needs_restart: bool = False  # a process must be restarted

    def is_possible(self, cluster: ChaosCluster) -> bool:
        return (cluster.store is not None or self.target != "store") and (
            cluster.settings.links or not self.needs_links
        )


def kill_process(target: FaultTarget, *, engine_only: bool = False) -> FaultInjector:
    @asynccontextmanager
    async def inject_fault(context: FaultContext) -> AsyncIterator[None]:
        process = context.process_at(target)
        if engine_only:
            process.send_signal(signal.SIGKILL, engine_only=True)
        else:
            context.cluster.kill_process(process)
        yield

    return inject_fault


def freeze_process(target: FaultTarget, *, engine_only: bool = False) -> FaultInjector:
    @asynccontextmanager
    async def inject_fault(context: FaultContext) -> AsyncIterator[None]:
        process = context.process_at(target)
        pids = [process.engine_pid] if engine_only else [process.pid, process.engine_pid]
        _send_signal(signal.SIGSTOP, pids)
        try:
            yield
        finally:
            _send_signal(signal.SIGCONT, pids)

    return inject_fault


def _send_signal(signal_number: signal.Signals, pids: Iterable[int | None]) -> None:
    for pid in filter(None, pids):
        with contextlib.suppress(ProcessLookupError):  # the server may have restarted a frozen engine
            os.kill(pid, signal_number)


def disturb_connections(connection_kind: str, target: FaultTarget, disturbance: str) -> FaultInjector:
    """Return an injector that disturbs the connections of a process.

    `disturbance` is "cut" (reset), "hold" (forward nothing), "slow" or "spoil" (corrupt bytes)."""

    @asynccontextmanager
    async def inject_fault(context: FaultContext) -> AsyncIterator[None]:
        process = context.process_at(target)
        found: FaultProxy | list[FaultProxy] | None = getattr(process, connection_kind)
        proxies = found if isinstance(found, list) else [found] if found is not None else []
        assert proxies
        for proxy in proxies:
            _disturb(proxy, disturbance)
        try:
            yield
        finally:
            for proxy in proxies:
                proxy.end_faults()

    return inject_fault


def _disturb(proxy: FaultProxy, disturbance: str) -> None:
    match disturbance:
        case "cut":
            proxy.refuse_connections()
        case "hold":
            proxy.pause_forwarding()
        case "slow":
            proxy.bytes_per_s = 20e3
        case "spoil":
            proxy.bytes_to_corrupt = 4


def disturb_link(disturbance: LinkDisturbance, target: FaultTarget) -> FaultInjector:
    """Return an injector that disturbs the virtual network link which carries all traffic of a worker."""

    @asynccontextmanager
    async def inject_fault(context: FaultContext) -> AsyncIterator[None]:
        link = context.process_at(target).link
        assert link is not None
        await asyncio.to_thread(link.apply_disturbance, disturbance)
        try:
            yield
        finally:
            await asyncio.to_thread(link.end_disturbance)

    return inject_fault


@asynccontextmanager
async def fill_disk(context: FaultContext) -> AsyncIterator[None]:
    """Limit the size of files that the engine can write to one page, so that writes fail as on a full disk."""
    pid = context.answering_worker.engine_pid
    if pid is None:
        yield
        return
    old_limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_DISK_FILE_BYTES, old_limits[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, old_limits)


def damage_files(damage: str) -> FaultInjector:
    @asynccontextmanager
    async def inject_fault(context: FaultContext) -> AsyncIterator[None]:
        assert context.answering_worker.disk is not None
        await asyncio.to_thread(_damage_files_in, context.answering_worker.disk, damage)
        yield

    return inject_fault


def _damage_files_in(directory: Path, damage: str) -> None:
    for file in directory.glob("*/??/*"):
        with contextlib.suppress(OSError):  # the engine may have deleted the file
            size = file.stat().st_size
            if damage == "tear":
                os.truncate(file, size // 2 // FULL_DISK_FILE_BYTES * FULL_DISK_FILE_BYTES)
            elif damage == "spoil":
                with file.open("r+b") as opened:
                    opened.seek(size // 2)
                    if byte := opened.read(1):  # a truncated file may be empty
                        opened.seek(size // 2)
                        opened.write(bytes((byte[0] ^ 0x10,)))
            else:  # opening a link to itself is an I/O error
                file.unlink()
                file.symlink_to(file)


@asynccontextmanager
async def disconnect_client(context: FaultContext) -> AsyncIterator[None]:
    yield  # the caller of the request cancels it


@asynccontextmanager
async def start_duplicate_worker(context: FaultContext) -> AsyncIterator[None]:
    """Start a second worker with the same name, which must be refused while the first is alive."""
    process, cluster = context.decode_worker, context.cluster
    supervisor = Supervisor(lambda name, event: cluster.supervisor_events.append(f"second {name}: {event}"))
    arguments = cluster.worker_arguments(
        process,
        LOOPBACK_ADDRESS,
        cluster.network.find_free_port(),
        LOOPBACK_ADDRESS,
        [router.url for router in cluster.routers],
    )
    child = SupervisedProcess(
        process.name, arguments, cluster.directory / f"{process.name}-twin.log", process.child.environment
    )
    first_incarnation = await _fetch_registered_incarnation(cluster, process)
    await supervisor.start(child)
    try:
        async with asyncio.timeout(60):
            while "is alive at" not in child.log_file.read_text(errors="replace"):
                await asyncio.sleep(0.1)
        if await _fetch_registered_incarnation(cluster, process) != first_incarnation:
            raise EmberlineError(
                f"the router accepted a second worker named {process.name!r} although the first one is alive"
            )
        yield
    finally:
        assert child.process is not None
        child.process.kill()  # without announcing a shutdown
        await supervisor.stop()


async def _fetch_registered_incarnation(cluster: ChaosCluster, process: ChaosProcess) -> str | None:
    status = await cluster.fetch_json(f"{cluster.routers[0].url}/cluster/status")
    rows = status["workers"] if status else []
    return next((str(row["incarnation"]) for row in rows if row["name"] == process.name), None)


def shift_clock(target: FaultTarget) -> FaultInjector:
    @asynccontextmanager
    async def inject_fault(context: FaultContext) -> AsyncIterator[None]:
        context.process_at(target).clock.set_offset(context.rng.choice((-1, 1)) * context.rng.uniform(60, 1e6))
        yield

    return inject_fault


def make_block_transfer_fault(disturbance: str, max_duration_s: float = 20.0, weight: float = 1.0) -> Fault:
    """Return a fault that disturbs the connections over which workers fetch KV blocks from each other."""
    injector = disturb_connections("blocks", "prefill", disturbance)
    return Fault(
        f"{disturbance} blocks",
        "prefill",
        injector,
        TRANSFER_STAGES,
        max_duration_s,
        weight=weight,
        needs_tcp_transfer=True,
        counter_label="kv_transfer",
    )


def make_disk_fault(name: str, injector: FaultInjector, weight: float, *, reuses_prompt: bool = True) -> Fault:
    """Return a fault in the directory in which the answering worker stores evicted KV blocks."""
    return Fault(
        name,
        "decode",
        injector,
        QUEUED_STAGE,
        weight=weight,
        reuses_prompt=reuses_prompt,
        starts_before_request=True,
        counter_label=DISK_COUNTER_LABEL,
        keeps_workers_available=True,
    )
