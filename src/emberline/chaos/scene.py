"""ChaosCluster: a router and workers as users start them, with proxies on their connections.

A supervisor restarts processes that die. A reference server beside them gets no faults."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from emberline.chaos.clock import MovedClock
from emberline.chaos.network import HERE, Network
from emberline.chaos.place import Place
from emberline.chaos.sight import Sights
from emberline.chaos.wire import Ear, Line, Wire
from emberline.cluster.muster import absences, holdings, until_nothing
from emberline.cluster.supervisor import Child, Supervisor
from emberline.core.config import Role, environment

CLUSTER_KEY_HEADER = "x-emberline-cluster-key"  # workers accept direct calls only with the cluster key
SERVED = "chaos"
REGISTER = b"POST /cluster/register"
SHM, NO_SHM = b'"shm":"', b'"off":"'
NOTICED = re.compile(
    r"^(emberline:kv_(?:tier_damaged_blocks|tier_errors|transfer_pull_failures)_total\{.*\}) (\S+)$", re.M
)
STORE_ON = re.compile(r'^emberline:kv_tier_on\{.*tier="store".*\} 1', re.M)
STORE = Path(sys.executable).with_name("mooncake_master")
RESTART = 120.0  # for a killed process to be ready again
QUIET = 30.0  # for an idle cluster to release all resources


@dataclass(frozen=True, slots=True)
class Settings:
    model: str
    prefill: int = 1
    decode: int = 2
    kv_memory: str = "48M"
    disk: str = "64M"
    links: bool = False  # each worker has its own network namespace
    deadline: float = 60.0  # seconds per request
    router: Sequence[str] = (
        "--split-tokens",
        "64",
        "--stuck-after",
        "12",  # longer than a lease: a worker whose blocks wait for a dead worker's fetch is not stuck
        "--lost-after",
        "2.5",
        "--ticket-timeout",
        "4",
        "--migration-wait",
        "30",
    )
    worker: Sequence[str] = ("--embedder", "none", "--threads", "1", "--device", "cpu", "--max-running", "4",
                             "--max-batch-tokens", "64", "--stall-timeout", "15")  # fmt: skip


class Scene:
    def __init__(self, settings: Settings, home: Path) -> None:
        self.settings, self.home = settings, home
        self.sights = Sights()
        self._key = secrets.token_hex(16)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), headers={CLUSTER_KEY_HEADER: self._key}
        )
        self.history: list[str] = []
        self._tasks: set[asyncio.Future[Any]] = set()
        self._supervisor = Supervisor(lambda name, event: self.history.append(f"{name} {event}"))
        self.network = Network(links=settings.links)
        self._transfer = re.compile(rb'"incarnation":"(\w+)".*?"tcp":"%b:(\d+)"' % self.network.hub.encode(), re.DOTALL)
        self.router = self._place("router")
        self.reference = self._place("reference")
        self.store = self._place("store") if STORE.exists() else None
        self.workers: list[Place] = []

    def of(self, role: Role) -> list[Place]:
        return [worker for worker in self.workers if worker.role == role]

    def named(self, name: str | None) -> Place | None:
        return next((worker for worker in self.workers if worker.name == name), None)

    # -- starting and stopping -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        settings = self.settings
        self.reference.child.arguments += ["serve", settings.model, "--served-name", SERVED, "--port",
                                           str(self.reference.port), "--embedder", "none", "--threads", "1",
                                           "--device", "cpu", "--kv-memory", "256M"]  # fmt: skip
        self.router.child.arguments += ["router", "--allowed-hosts", self.network.hub, "--port", str(self.router.port),
                                        "--request-timeout",
                                        str(settings.deadline), *settings.router]  # fmt: skip
        for process in filter(None, (self.router, self.reference, self._started_store())):
            await self._supervisor.start(process.child)
        counts: dict[Role, int] = {"prefill": settings.prefill, "decode": settings.decode}
        for role, count in counts.items():
            for i in range(count):
                uses_shared_memory = role == "decode" and i % 2 == 1 and not settings.links
                self.workers.append(await self._worker(f"{role}-{i + 1}", role, mapped=uses_shared_memory))
        for process in self.workers:
            await self._supervisor.start(process.child)

    def _started_store(self) -> Place | None:
        if self.store is not None:
            self.store.host, self.store.child.program = self.network.hub, (str(STORE),)
            self.store.child.arguments += [f"--rpc_address={self.store.host}", f"--rpc_port={self.store.port}",
                                           f"--metrics_port={self.network.free_port()}", f"--metrics_host={HERE}",
                                           "--logtostderr", "--minloglevel=2"]  # fmt: skip
        return self.store

    async def stop(self) -> None:
        for process in filter(None, (*self.workers, self.router, self.store)):
            if process.child.process is not None:
                process.signal(signal.SIGCONT, both=True)
            if process.link is not None:
                process.link.mend()
            for proxy in process.wires():
                proxy.mend()
        await self._supervisor.stop()
        for process in self.workers:
            for proxy in process.wires():
                proxy.stop()
        self.network.close()
        await self.session.close()

    async def _worker(self, name: str, role: Role, *, mapped: bool) -> Place:
        process = self._place(name, role)
        process.disk, process.mapped, process.link = self.home / "disk" / name, mapped, self.network.join()
        if process.link is not None:
            process.host, process.child.program = process.link.host, (*process.link.inside, *process.child.program)
        process.disk.mkdir(parents=True)
        hub, router = self.network.hub, (HERE, self.router.port)
        process.beats = await Wire(hub, 0, router, self._beats_ear(process)).start()
        process.requests = await Wire(
            hub, process.port, (process.host, process.port), self._requests_ear(process)
        ).start()
        process.child.arguments += self.arguments(
            process, process.host, process.port, hub, f"{hub}:{process.beats.port}"
        )
        return process

    def arguments(self, place: Place, host: str, port: int, found: str, router: str) -> list[str]:
        """Return a worker's command line. `public_host`: where others reach it."""
        settings, store = self.settings, self.store
        store_options = (
            ["--kv-store", f"{store.host}:{store.port}", "--kv-store-memory", "32M"] if store is not None else []
        )
        if store is not None and not store.host.startswith("127."):
            store_options += ["--kv-mooncake-host", store.host if host == HERE else host]
        return ["worker", settings.model, "--served-name", SERVED, "--role", str(place.role),
                "--worker-name", place.name, "--host", host, "--port", str(port), "--worker-url", f"http://{found}:{port}",
                "--router", f"http://{router}", "--kv-memory", settings.kv_memory, "--kv-disk", str(place.disk),
                "--kv-disk-size", settings.disk, *store_options, *settings.worker]  # fmt: skip

    def _place(self, name: str, role: Role | None = None) -> Place:
        clock = MovedClock(self.home / "clocks" / name)
        base_environment = environment(self._key)
        path = (
            f"{clock.path}:{base_environment['PYTHONPATH']}" if base_environment.get("PYTHONPATH") else str(clock.path)
        )
        supervised = Child(name, [], self.home / f"{name}.log", {**base_environment, "PYTHONPATH": path})
        return Place(name, role, self.network.free_port(), supervised, clock)

    # -- traffic filters -----------------------------------------------------------------------------------------------

    def _beats_ear(self, place: Place) -> Ear:
        def filter_heartbeats(connection: Line, is_to_server: bool, data: bytes) -> bytes:
            if is_to_server and data.startswith(REGISTER):
                connection.tail = b"registers"
            if is_to_server and connection.tail and (found := self._transfer.search(data)) is not None:
                connection.tail = b""
                place.incarnation = found[1].decode()
                self._appeared(place, int(found[2]))
            return data if place.mapped or is_to_server else data.replace(SHM, NO_SHM)

        return filter_heartbeats

    def _requests_ear(self, place: Place) -> Ear:
        observe = self.sights.ear(place.name)

        def filter_requests(connection: Line, is_to_server: bool, data: bytes) -> bytes:
            data = observe(connection, is_to_server, data)
            return data.replace(SHM, NO_SHM) if is_to_server and not place.mapped else data

        return filter_requests

    def _appeared(self, place: Place, port: int) -> None:
        """Handle the registration of a new process: it has a new port for blocks."""
        if place.blocks is None or place.blocks.port != port:
            if place.blocks is not None:
                place.blocks.stop()
            place.blocks = Wire(self.network.hub, port, (place.host, port))
            self._later(place.blocks.start())
        assert place.requests is not None
        self._later(place.requests.start())

    def _later(self, work: Any) -> None:
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._tasks.discard)

    # -- faults --------------------------------------------------------------------------------------------------------

    def kill(self, place: Place) -> None:
        """Kill a process; its proxies refuse connections until it is restarted."""
        place.child.pause = 0.5  # an intended death must not lengthen the pause
        place.incarnation = None
        place.absences.append([asyncio.get_running_loop().time()])
        place.signal(signal.SIGKILL)
        if place.requests is not None:
            place.requests.stop()
        if place.blocks is not None:
            place.blocks.stop()
            place.blocks = None

    # -- health --------------------------------------------------------------------------------------------------------

    async def ask(self, url: str, timeout: float = 5.0) -> Any:
        """Return the JSON reply; None if there is none or an error, as from a loading server."""
        try:
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(timeout)) as reply:
                return await reply.json() if reply.ok else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None

    async def missing(self) -> str:
        """Return the first problem that keeps the cluster from being healthy, or ""."""
        absent = await self.absent()
        return next(iter(absent.values()), "")

    async def absent(self, without: Collection[str] = ()) -> dict[str, str]:
        """Return the unavailable processes and the reasons, without the `excluded` ones."""
        started_at = asyncio.get_running_loop().time()
        status = await self.ask(f"{self.router.url}/cluster/status")
        if status is None:
            return {"router": "the router does not answer"}
        workers = [worker for worker in self.workers if worker.name not in without]
        unavailable, rows = absences(status, await self._told(workers)), {row["name"]: row for row in status["workers"]}
        problems = {
            worker.name: _unwell(worker, rows[worker.name]) for worker in workers if worker.name not in unavailable
        }
        if self.store is not None and self.store.name not in without:
            problems[self.store.name] = await self._store_absence(
                [worker for worker in workers if worker.name not in unavailable]
            )
        unavailable |= {name: problem for name, problem in problems.items() if problem}
        for outage in self.router.absences[-1:]:
            if not unavailable and len(outage) == 1 and outage[0] < started_at:
                outage.append(asyncio.get_running_loop().time())
        return unavailable

    async def _told(self, places: Sequence[Place]) -> dict[str, Any]:
        replies = await asyncio.gather(*(self.ask(f"{worker.url}/stats") for worker in places))
        return {worker.name: stats for worker, stats in zip(places, replies, strict=True)}

    async def _store_absence(self, workers: Sequence[Place]) -> str:
        assert self.store is not None
        if not self.store.runs:
            return "the store is not running"
        unused_by = [worker.name for worker in workers if STORE_ON.search(await self._metrics(worker)) is None]
        return f"the store is not used by {', '.join(unused_by)}" if unused_by else ""

    async def is_ready(self, place: Place) -> bool:
        health = await self.ask(f"{place.url}/health/ready")
        return bool(health) and health["status"] == "ready"

    def routerless(self, since: float) -> bool:
        """Whether the router was down, or did not know all workers yet, at some time since then."""
        return any(len(outage) == 1 or outage[1] >= since for outage in self.router.absences)

    async def full_strength(self) -> str:
        """Wait until the cluster is healthy, and return the problem that is left, or ""."""
        return await until_nothing(self.missing, RESTART)

    async def held(self) -> str:
        """Return the resources that an idle cluster holds, or ""."""
        return holdings(await self.ask(f"{self.router.url}/cluster/status"), await self._told(self.workers))

    async def quiet(self) -> str:
        return await until_nothing(self.held, QUIET)

    async def noticed(self, what: str) -> Counter[str]:
        """Return the faults that workers have counted, for counters whose name or label contains `label`."""
        counts: Counter[str] = Counter()
        for worker in self.workers:
            for name, count in NOTICED.findall(await self._metrics(worker)):
                counts[f"{worker.incarnation} {name}"] += int(float(count)) if what in name else 0
        return counts

    async def _metrics(self, place: Place) -> str:
        """Return the worker's metrics; "" if it does not answer."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self.session.get(f"{place.url}/metrics", timeout=aiohttp.ClientTimeout(5)) as reply:
                return await reply.text()
        return ""


def _unwell(place: Place, row: dict[str, Any]) -> str:
    """Return the problem in the router's view of a running worker, or ""."""
    if row["incarnation"] != place.incarnation:
        return f"the router knows an older process of {place.name}: {row['incarnation']}"
    return f"the circuit breaker of {place.name} is {row['breaker']}" if row["breaker"] != "closed" else ""
