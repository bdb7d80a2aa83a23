"""Scene: a router and workers as users start them, each in processes of its own, with wires between them; a supervisor
starts again what dies. Also a server beside them that nothing happens to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from emberline.bench.processes import family, parent
from emberline.chaos.clock import MovedClock
from emberline.chaos.sight import Sights
from emberline.chaos.wire import Ear, Line, Wire
from emberline.cluster.supervisor import Child, Supervisor
from emberline.core.config import Role, environment

HERE = "127.0.0.1"  # where processes listen
THERE = "127.0.0.2"  # where others look for them, and find a wire
SERVED = "chaos"  # the model's name
TRANSFER = re.compile(rb'"incarnation":"(\w+)".*?"tcp":"127\.0\.0\.2:(\d+)"', re.DOTALL)
REGISTER = b"POST /cluster/register"
SHM, NO_SHM = b'"shm":"', b'"off":"'
NOTICED = re.compile(
    r"^emberline:(kv_tier_damaged_blocks|kv_tier_errors|kv_transfer_pull_failures)_total\{.*\} (\S+)$", re.M
)
RESTART = 120.0  # seconds until a process that was killed must be ready again
QUIET = 30.0  # seconds until nothing may be held for anybody


@dataclass(frozen=True, slots=True)
class Settings:
    model: str
    prefill: int = 1
    decode: int = 2
    kv_memory: str = "48M"
    disk: str = "64M"
    deadline: float = 60.0  # seconds for a request
    router: Sequence[str] = ("--split-tokens", "64", "--stuck-after", "6", "--lost-after", "2.5")
    worker: Sequence[str] = ("--embedder", "none", "--threads", "1", "--device", "cpu", "--max-running", "4",
                             "--max-batch-tokens", "64", "--stall-timeout", "8")  # fmt: skip


@dataclass(slots=True, eq=False)
class Place:
    """A process that is started again under the same name, and the ways to it."""

    name: str
    role: Role | None  # None: the router
    port: int
    child: Child
    clock: MovedClock
    beats: Wire | None = None  # to the router
    requests: Wire | None = None  # from it
    blocks: Wire | None = None  # from workers that want its blocks
    disk: Path | None = None
    mapped: bool = False  # it takes blocks through shared memory; others do through wires
    incarnation: str | None = None  # of the process that registered last; None: it was killed since
    absences: list[list[float]] = field(default_factory=list)  # since when it was dead, and until when, if it is back
    _engine: int | None = None

    @property
    def pid(self) -> int:
        assert self.child.process is not None
        return self.child.process.pid

    @property
    def engine(self) -> int | None:
        """Its child. Looking for it takes a while: the one found last is, if it is still there."""
        if self._engine is None or parent(self._engine) != self.pid:
            self._engine = family(self.pid).get("engine.process")
        return self._engine

    def signal(self, number: signal.Signals, *, engine: bool = False, both: bool = False) -> None:
        pids = [self.engine] if engine else [self.pid, self.engine] if both else [self.pid]
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wires(self) -> list[Wire]:
        return [wire for wire in (self.beats, self.requests, self.blocks) if wire is not None]


class Scene:
    def __init__(self, settings: Settings, home: Path) -> None:
        self.settings, self.home = settings, home
        self.sights = Sights()
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        self.history: list[str] = []  # what the supervisor said
        self._tasks: set[asyncio.Future[Any]] = set()
        self._key = secrets.token_hex(16)
        self._supervisor = Supervisor(lambda who, what: self.history.append(f"{who} {what}"))
        self.router = self._place("router", None, [])
        self.workers: list[Place] = []
        self.reference = self._place("reference", None, [])

    @property
    def url(self) -> str:
        return f"http://{HERE}:{self.router.port}"

    @property
    def reference_url(self) -> str:
        return f"http://{HERE}:{self.reference.port}"

    def of(self, role: Role) -> list[Place]:
        return [place for place in self.workers if place.role == role]

    def named(self, name: str | None) -> Place | None:
        return next((place for place in self.workers if place.name == name), None)

    # -- starting and stopping -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        given = self.settings
        self.reference.child.arguments += ["serve", given.model, "--served-name", SERVED, "--port",
                                           str(self.reference.port), "--embedder", "none", "--threads", "1",
                                           "--device", "cpu", "--kv-memory", "256M"]  # fmt: skip
        self.router.child.arguments += ["router", "--port", str(self.router.port), "--request-timeout",
                                        str(given.deadline), *given.router]  # fmt: skip
        await self._supervisor.start(self.reference.child)
        await self._supervisor.start(self.router.child)
        counts: dict[Role, int] = {"prefill": given.prefill, "decode": given.decode}
        for role, count in counts.items():
            for i in range(count):
                self.workers.append(await self._worker(f"{role}-{i + 1}", role, mapped=role == "decode" and i % 2 == 1))
        for place in self.workers:
            await self._supervisor.start(place.child)

    async def stop(self) -> None:
        for place in (*self.workers, self.router):
            if place.child.process is not None:
                place.signal(signal.SIGCONT, both=True)
            for wire in place.wires():
                wire.mend()
        await self._supervisor.stop()
        for place in self.workers:
            for wire in place.wires():
                wire.stop()
        await self.session.close()

    async def _worker(self, name: str, role: Role, *, mapped: bool) -> Place:
        place = self._place(name, role, [])
        place.disk, place.mapped = self.home / "disk" / name, mapped
        place.disk.mkdir(parents=True)
        place.beats = await Wire(HERE, 0, (HERE, self.router.port), self._beats_ear(place)).start()
        place.requests = await Wire(THERE, place.port, (HERE, place.port), self._requests_ear(place)).start()
        place.child.arguments += self.arguments(place, place.port, place.beats.port, THERE)
        return place

    def arguments(self, place: Place, port: int, router: int, host: str) -> list[str]:
        given = self.settings
        return ["worker", given.model, "--served-name", SERVED, "--role", str(place.role), "--worker-name", place.name,
                "--port", str(port), "--worker-url", f"http://{host}:{port}", "--router", f"http://{HERE}:{router}",
                "--kv-memory", given.kv_memory, "--kv-disk", str(place.disk), "--kv-disk-size", given.disk,
                *given.worker]  # fmt: skip

    def _place(self, name: str, role: Role | None, arguments: list[str]) -> Place:
        clock = MovedClock(self.home / "clocks" / name)
        given = environment(self._key)
        path = f"{clock.path}:{given['PYTHONPATH']}" if given.get("PYTHONPATH") else str(clock.path)
        log = self.home / f"{name}.log"
        return Place(name, role, free_port(), Child(name, arguments, log, {**given, "PYTHONPATH": path}), clock)

    # -- what wires hear -----------------------------------------------------------------------------------------------

    def _beats_ear(self, place: Place) -> Ear:
        def hear(line: Line, out: bool, data: bytes) -> bytes:
            if out and data.startswith(REGISTER):
                line.tail = b"registers"
            if out and line.tail and (found := TRANSFER.search(data)) is not None:
                line.tail = b""
                place.incarnation = found[1].decode()
                self._appeared(place, int(found[2]))
            return data if place.mapped or out else data.replace(SHM, NO_SHM)

        return hear

    def _requests_ear(self, place: Place) -> Ear:
        see = self.sights.ear(place.name)

        def hear(line: Line, out: bool, data: bytes) -> bytes:
            data = see(line, out, data)
            return data.replace(SHM, NO_SHM) if out and not place.mapped else data

        return hear

    def _appeared(self, place: Place, port: int) -> None:
        """A process that registers has a port of its own for blocks, and takes requests again."""
        if place.blocks is None or place.blocks.port != port:
            if place.blocks is not None:
                place.blocks.stop()
            place.blocks = Wire(THERE, port, (HERE, port))
            self._later(place.blocks.start())
        assert place.requests is not None
        self._later(place.requests.start())

    def _later(self, work: Any) -> None:
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._tasks.discard)

    # -- doing harm ----------------------------------------------------------------------------------------------------

    def kill(self, place: Place) -> None:
        """Nobody listens there from now on, until it is started again."""
        place.child.pause = 0.5  # it dies because we want it
        place.incarnation = None
        place.absences.append([asyncio.get_running_loop().time()])
        place.signal(signal.SIGKILL)
        if place.requests is not None:
            place.requests.stop()
        if place.blocks is not None:
            place.blocks.stop()
            place.blocks = None

    # -- how it goes ---------------------------------------------------------------------------------------------------

    async def ask(self, url: str, timeout: float = 5.0) -> Any:
        """None: nobody answers."""
        try:
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(timeout)) as reply:
                return await reply.json()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None

    async def missing(self) -> str:
        """What keeps it from full strength; "" if nothing does."""
        absent = await self.absent()
        return next(iter(absent.values()), "")

    async def absent(self) -> dict[str, str]:
        """Who is not there as it should be, and why."""
        status = await self.ask(f"{self.url}/cluster/status")
        if status is None:
            return {"router": "no router"}
        rows = {row["name"]: row for row in status["workers"]}
        prefills = sorted(place.name for place in self.of("prefill"))
        found = {place.name: await self._absence(place, rows.get(place.name, {}), prefills) for place in self.workers}
        absent = {name: why for name, why in found.items() if why}
        if not absent and self.router.absences and len(self.router.absences[-1]) == 1:
            self.router.absences[-1].append(asyncio.get_running_loop().time())
        return absent

    async def _absence(self, place: Place, row: dict[str, Any], prefills: list[str]) -> str:
        if row.get("health") != "ready" or row["incarnation"] != place.incarnation:
            return f"{place.name} is {row.get('health', 'unknown')}, incarnation {row.get('incarnation')}"
        if row["breaker"] != "closed":
            return f"{place.name}'s breaker is {row['breaker']}"
        if place.role == "decode" and row["paired"] != prefills:
            return f"{place.name} is paired with {row['paired']}, refused {row['refused']}"
        return "" if await self.is_ready(place) else f"{place.name} says it is not"

    async def is_ready(self, place: Place) -> bool:
        health = await self.ask(f"http://{HERE}:{place.port}/health/ready")
        return bool(health) and health["status"] == "ready"

    def routerless(self, since: float) -> bool:
        """Whether there was no router, or one that does not know all workers yet, at some time since then."""
        return any(len(absence) == 1 or absence[1] >= since for absence in self.router.absences)

    async def full_strength(self, seconds: float = RESTART) -> str:
        """Waits for it. What is missing in the end."""
        return await self._until(self.missing, seconds)

    async def held(self) -> str:
        """What is held for somebody, when nobody wants anything; "" if nothing is."""
        status = await self.ask(f"{self.url}/cluster/status")
        if status is None or status["open_requests"]:
            return "the router has open requests" if status else "no router"
        for place in self.workers:
            stats = await self.ask(f"http://{HERE}:{place.port}/stats")
            if stats is None:
                return f"{place.name} does not answer"
            used = stats["blocks_total"] - stats["blocks_free"] - stats["blocks_cached"]
            transfer = stats["transfer"]
            kept = {name: stats[name] for name in ("running", "waiting", "open_requests")} | {"blocks": used}
            kept |= {name: transfer[name] for name in ("leases", "pinned_blocks", "quarantined_blocks")}
            if any(kept.values()):
                return f"{place.name}: " + ", ".join(f"{name} {count}" for name, count in kept.items() if count)
        return ""

    async def quiet(self) -> str:
        return await self._until(self.held, QUIET)

    async def noticed(self, what: str) -> Counter[str]:
        """Faults of one kind that workers have counted, since each was started."""
        found: Counter[str] = Counter()
        for place in self.workers:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                url = f"http://{HERE}:{place.port}/metrics"
                async with self.session.get(url, timeout=aiohttp.ClientTimeout(5)) as reply:
                    for name, count in NOTICED.findall(await reply.text()):
                        found[f"{place.incarnation} {name}"] += int(float(count)) if name.startswith(what) else 0
        return found

    async def _until(self, what: Any, seconds: float) -> str:
        end = asyncio.get_running_loop().time() + seconds
        while (still := await what()) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.1)
        return str(still)


def free_port() -> int:
    """On both addresses."""
    while True:
        with socket.socket() as here, socket.socket() as there:
            here.bind((HERE, 0))
            port = int(here.getsockname()[1])
            with contextlib.suppress(OSError):
                there.bind((THERE, port))
                return port
