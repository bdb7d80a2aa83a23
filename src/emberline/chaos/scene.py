"""Scene: a router and workers as users start them, each in processes of its own, with wires between them; a supervisor
starts again what dies. Also a server beside them that nothing happens to."""

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

CLUSTER_KEY_HEADER = "x-emberline-cluster-key"  # with it workers answer others than their router
SERVED = "chaos"  # the model's name
REGISTER = b"POST /cluster/register"
SHM, NO_SHM = b'"shm":"', b'"off":"'
NOTICED = re.compile(
    r"^(emberline:kv_(?:tier_damaged_blocks|tier_errors|transfer_pull_failures)_total\{.*\}) (\S+)$", re.M
)
STORE_ON = re.compile(r'^emberline:kv_tier_on\{.*tier="store".*\} 1', re.M)
STORE = Path(sys.executable).with_name("mooncake_master")
RESTART = 120.0  # seconds until a process that was killed must be ready again
QUIET = 30.0  # seconds until nothing may be held for anybody


@dataclass(frozen=True, slots=True)
class Settings:
    model: str
    prefill: int = 1
    decode: int = 2
    kv_memory: str = "48M"
    disk: str = "64M"
    links: bool = False  # workers are in networks of their own
    deadline: float = 60.0  # seconds for a request
    router: Sequence[str] = (
        "--split-tokens",
        "64",
        "--stuck-after",
        "12",  # longer than a lease: who waits for blocks that nobody fetches any more is not stuck
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
        self.history: list[str] = []  # what the supervisor said
        self._tasks: set[asyncio.Future[Any]] = set()
        self._supervisor = Supervisor(lambda who, what: self.history.append(f"{who} {what}"))
        self.network = Network(links=settings.links)
        self._transfer = re.compile(rb'"incarnation":"(\w+)".*?"tcp":"%b:(\d+)"' % self.network.hub.encode(), re.DOTALL)
        self.router = self._place("router")
        self.reference = self._place("reference")
        self.store = self._place("store") if STORE.exists() else None
        self.workers: list[Place] = []

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
        self.router.child.arguments += ["router", "--allowed-hosts", self.network.hub, "--port", str(self.router.port),
                                        "--request-timeout",
                                        str(given.deadline), *given.router]  # fmt: skip
        for place in filter(None, (self.router, self.reference, self._started_store())):
            await self._supervisor.start(place.child)
        counts: dict[Role, int] = {"prefill": given.prefill, "decode": given.decode}
        for role, count in counts.items():
            for i in range(count):
                mapped = role == "decode" and i % 2 == 1 and not given.links
                self.workers.append(await self._worker(f"{role}-{i + 1}", role, mapped=mapped))
        for place in self.workers:
            await self._supervisor.start(place.child)

    def _started_store(self) -> Place | None:
        if self.store is not None:
            self.store.host, self.store.child.program = self.network.hub, (str(STORE),)
            self.store.child.arguments += [f"--rpc_address={self.store.host}", f"--rpc_port={self.store.port}",
                                           f"--metrics_port={self.network.free_port()}", f"--metrics_host={HERE}",
                                           "--logtostderr", "--minloglevel=2"]  # fmt: skip
        return self.store

    async def stop(self) -> None:
        for place in filter(None, (*self.workers, self.router, self.store)):
            if place.child.process is not None:
                place.signal(signal.SIGCONT, both=True)
            if place.link is not None:
                place.link.mend()
            for wire in place.wires():
                wire.mend()
        await self._supervisor.stop()
        for place in self.workers:
            for wire in place.wires():
                wire.stop()
        self.network.close()
        await self.session.close()

    async def _worker(self, name: str, role: Role, *, mapped: bool) -> Place:
        place = self._place(name, role)
        place.disk, place.mapped, place.link = self.home / "disk" / name, mapped, self.network.join()
        if place.link is not None:
            place.host, place.child.program = place.link.host, (*place.link.inside, *place.child.program)
        place.disk.mkdir(parents=True)
        hub, router = self.network.hub, (HERE, self.router.port)
        place.beats = await Wire(hub, 0, router, self._beats_ear(place)).start()
        place.requests = await Wire(hub, place.port, (place.host, place.port), self._requests_ear(place)).start()
        place.child.arguments += self.arguments(place, place.host, place.port, hub, f"{hub}:{place.beats.port}")
        return place

    def arguments(self, place: Place, host: str, port: int, found: str, router: str) -> list[str]:
        """`found`: the host where others look for it."""
        given, store = self.settings, self.store
        shared = ["--kv-store", f"{store.host}:{store.port}", "--kv-store-memory", "32M"] if store is not None else []
        if store is not None and not store.host.startswith("127."):
            shared += ["--kv-mooncake-host", store.host if host == HERE else host]
        return ["worker", given.model, "--served-name", SERVED, "--role", str(place.role), "--worker-name", place.name,
                "--host", host, "--port", str(port), "--worker-url", f"http://{found}:{port}",
                "--router", f"http://{router}", "--kv-memory", given.kv_memory, "--kv-disk", str(place.disk),
                "--kv-disk-size", given.disk, *shared, *given.worker]  # fmt: skip

    def _place(self, name: str, role: Role | None = None) -> Place:
        clock = MovedClock(self.home / "clocks" / name)
        given = environment(self._key)
        path = f"{clock.path}:{given['PYTHONPATH']}" if given.get("PYTHONPATH") else str(clock.path)
        child = Child(name, [], self.home / f"{name}.log", {**given, "PYTHONPATH": path})
        return Place(name, role, self.network.free_port(), child, clock)

    # -- what wires hear -----------------------------------------------------------------------------------------------

    def _beats_ear(self, place: Place) -> Ear:
        def hear(line: Line, out: bool, data: bytes) -> bytes:
            if out and data.startswith(REGISTER):
                line.tail = b"registers"
            if out and line.tail and (found := self._transfer.search(data)) is not None:
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
            place.blocks = Wire(self.network.hub, port, (place.host, port))
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
        """Return the answer, or None where there is none or it is an error, as from a server that loads its model."""
        try:
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(timeout)) as reply:
                return await reply.json() if reply.ok else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None

    async def missing(self) -> str:
        """What keeps it from full strength; "" if nothing does."""
        absent = await self.absent()
        return next(iter(absent.values()), "")

    async def absent(self, without: Collection[str] = ()) -> dict[str, str]:
        """Who is not there as it should be, and why; but for some, who cannot be."""
        began = asyncio.get_running_loop().time()
        status = await self.ask(f"{self.router.url}/cluster/status")
        if status is None:
            return {"router": "no router"}
        here = [place for place in self.workers if place.name not in without]
        absent, rows = absences(status, await self._told(here)), {row["name"]: row for row in status["workers"]}
        unwell = {place.name: _unwell(place, rows[place.name]) for place in here if place.name not in absent}
        if self.store is not None and self.store.name not in without:
            unwell[self.store.name] = await self._store_absence([place for place in here if place.name not in absent])
        absent |= {name: why for name, why in unwell.items() if why}
        for absence in self.router.absences[-1:]:
            if not absent and len(absence) == 1 and absence[0] < began:
                absence.append(asyncio.get_running_loop().time())
        return absent

    async def _told(self, places: Sequence[Place]) -> dict[str, Any]:
        told = await asyncio.gather(*(self.ask(f"{place.url}/stats") for place in places))
        return {place.name: stats for place, stats in zip(places, told, strict=True)}

    async def _store_absence(self, workers: Sequence[Place]) -> str:
        assert self.store is not None
        if not self.store.runs:
            return "no store"
        without = [place.name for place in workers if STORE_ON.search(await self._metrics(place)) is None]
        return f"no store for {', '.join(without)}" if without else ""

    async def is_ready(self, place: Place) -> bool:
        health = await self.ask(f"{place.url}/health/ready")
        return bool(health) and health["status"] == "ready"

    def routerless(self, since: float) -> bool:
        """Whether there was no router, or one that does not know all workers yet, at some time since then."""
        return any(len(absence) == 1 or absence[1] >= since for absence in self.router.absences)

    async def full_strength(self) -> str:
        """Waits for it. What is missing in the end."""
        return await until_nothing(self.missing, RESTART)

    async def held(self) -> str:
        """What is held for somebody, when nobody wants anything; "" if nothing is."""
        return holdings(await self.ask(f"{self.router.url}/cluster/status"), await self._told(self.workers))

    async def quiet(self) -> str:
        return await until_nothing(self.held, QUIET)

    async def noticed(self, what: str) -> Counter[str]:
        """Faults that workers have counted since each was started, where a counter's name or label has this."""
        found: Counter[str] = Counter()
        for place in self.workers:
            for name, count in NOTICED.findall(await self._metrics(place)):
                found[f"{place.incarnation} {name}"] += int(float(count)) if what in name else 0
        return found

    async def _metrics(self, place: Place) -> str:
        """ "" if it does not answer."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self.session.get(f"{place.url}/metrics", timeout=aiohttp.ClientTimeout(5)) as reply:
                return await reply.text()
        return ""


def _unwell(place: Place, row: dict[str, Any]) -> str:
    """What the router says of somebody who is there."""
    if row["incarnation"] != place.incarnation:
        return f"{place.name} is known as {row['incarnation']}"
    return f"{place.name}'s breaker is {row['breaker']}" if row["breaker"] != "closed" else ""
