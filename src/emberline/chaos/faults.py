"""The faults: what goes wrong for a while with a process or connection that serves a request."""

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

from emberline.chaos.network import HERE, Harm
from emberline.chaos.place import Place
from emberline.chaos.scene import Scene
from emberline.chaos.sight import Sight, Stage
from emberline.cluster.supervisor import Child, Supervisor
from emberline.core.errors import EmberlineError

EARLY = (Stage.QUEUED, Stage.PREFILL, Stage.TRANSFER)
ALL = (*EARLY, Stage.FIRST, Stage.DECODE)
MOVING = (Stage.PREFILL, Stage.TRANSFER)
FIRST = (Stage.QUEUED,)
HICCUP = 0.3
GONE = 3.0  # so long that the router counts the worker as lost
DISK, STORE = 'tier="disk"', 'tier="store"'
BLOCK = 1 << 12

Whom = Literal["prefill", "decode", "router", "store"]


@dataclass(frozen=True, slots=True)
class Victims:
    """The request at which a fault is aimed, and the processes that serve it."""

    scene: Scene
    sight: Sight
    dice: random.Random
    home: Place  # the worker that should answer

    @property
    def prefill(self) -> Place:
        return self.scene.named(self.sight.prefill) or self.dice.choice(self.scene.of("prefill"))

    @property
    def decode(self) -> Place:
        return self.scene.named(self.sight.decode) or self.home

    def of(self, role: Whom) -> Place:
        match role:
            case "prefill":
                return self.prefill
            case "decode":
                return self.decode
            case "router":
                return self.scene.router
            case "store":
                assert self.scene.store is not None
                return self.scene.store


Strike = Callable[[Victims], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    of: Whom
    strike: Strike
    stages: tuple[Stage, ...] = ALL
    hold: float = 20.0  # the fault ends earlier when the request ends
    least: float = 0.0
    weight: float = 1.0  # relative frequency
    wired: bool = False  # the answering worker must fetch blocks over TCP
    linked: bool = False  # workers must have their own network links
    first: bool = False  # the fault begins before the request is sent
    leaves: bool = False  # the client disconnects
    old: bool = False  # the request repeats a prompt, whose blocks may be on disk
    shows: str = ""  # part of the name or labels of the worker's counter that detects the fault
    gentle: bool = False  # no process becomes unavailable
    restart: bool = False  # a process must be restarted

    def possible(self, scene: Scene) -> bool:
        return (scene.store is not None or self.of != "store") and (scene.settings.links or not self.linked)


def kill(role: Whom, *, engine: bool = False) -> Strike:
    @asynccontextmanager
    async def strike(v: Victims) -> AsyncIterator[None]:
        process = v.of(role)
        if engine:
            process.signal(signal.SIGKILL, engine=True)
        else:
            v.scene.kill(process)
        yield

    return strike


def freeze(role: Whom, *, engine: bool = False) -> Strike:
    @asynccontextmanager
    async def strike(v: Victims) -> AsyncIterator[None]:
        process = v.of(role)
        pids = [process.engine] if engine else [process.pid, process.engine]
        _send(signal.SIGSTOP, pids)
        try:
            yield
        finally:
            _send(signal.SIGCONT, pids)

    return strike


def _send(number: signal.Signals, pids: Iterable[int | None]) -> None:
    for pid in filter(None, pids):
        with contextlib.suppress(ProcessLookupError):  # the server may have restarted a frozen engine
            os.kill(pid, number)


def wire(which: str, role: Whom, what: str) -> Strike:
    """Disturb the connections of a process. `disturbance`: cut, hold, slow or spoil."""

    @asynccontextmanager
    async def strike(v: Victims) -> AsyncIterator[None]:
        struck = getattr(v.of(role), which)
        assert struck is not None
        match what:
            case "cut":
                struck.cut()
            case "hold":
                struck.hold()
            case "slow":
                struck.rate = 20e3
            case "spoil":
                struck.spoil = 4
        try:
            yield
        finally:
            struck.mend()

    return strike


def link(how: Harm, role: Whom) -> Strike:
    """Disturb the network link of a worker, over which all its traffic goes."""

    @asynccontextmanager
    async def strike(v: Victims) -> AsyncIterator[None]:
        struck = v.of(role).link
        assert struck is not None
        await asyncio.to_thread(struck.harm, how)
        try:
            yield
        finally:
            await asyncio.to_thread(struck.mend)

    return strike


@asynccontextmanager
async def disk_full(v: Victims) -> AsyncIterator[None]:
    """Limit the engine's files to one page, so that writes are cut short as on a full disk."""
    pid = v.home.engine
    if pid is None:
        yield
        return
    old = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (BLOCK, old[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, old)


def damage(how: str) -> Strike:
    @asynccontextmanager
    async def strike(v: Victims) -> AsyncIterator[None]:
        assert v.home.disk is not None
        await asyncio.to_thread(_damage, v.home.disk, how)
        yield

    return strike


def _damage(disk: Path, how: str) -> None:
    for file in disk.glob("*/??/*"):
        with contextlib.suppress(OSError):  # the engine may have deleted the file
            size = file.stat().st_size
            if how == "tear":
                os.truncate(file, size // 2 // BLOCK * BLOCK)
            elif how == "spoil":
                with file.open("r+b") as opened:
                    opened.seek(size // 2)
                    if byte := opened.read(1):  # a truncated file may be empty
                        opened.seek(size // 2)
                        opened.write(bytes((byte[0] ^ 0x10,)))
            else:  # opening a link to itself is an I/O error
                file.unlink()
                file.symlink_to(file)


@asynccontextmanager
async def client_gone(v: Victims) -> AsyncIterator[None]:
    yield  # the caller of the request cancels it


@asynccontextmanager
async def twin(v: Victims) -> AsyncIterator[None]:
    """Start a second worker with the same name, which must be refused while the first is alive."""
    process, cluster = v.decode, v.scene
    supervisor = Supervisor(lambda name, event: cluster.history.append(f"second {name}: {event}"))
    arguments = cluster.arguments(process, HERE, cluster.network.free_port(), HERE, f"{HERE}:{cluster.router.port}")
    child = Child(process.name, arguments, cluster.home / f"{process.name}-twin.log", process.child.environment)
    before = await _incarnation(cluster, process)
    await supervisor.start(child)
    try:
        async with asyncio.timeout(60):
            while "is alive at" not in child.log.read_text(errors="replace"):
                await asyncio.sleep(0.1)
        if await _incarnation(cluster, process) != before:
            raise EmberlineError(f"a second worker named {process.name} was accepted although the first is alive")
        yield
    finally:
        assert child.process is not None
        child.process.kill()  # without announcing a shutdown
        await supervisor.stop()


async def _incarnation(scene: Scene, place: Place) -> str | None:
    status = await scene.ask(f"{scene.router.url}/cluster/status")
    rows = status["workers"] if status else []
    return next((str(row["incarnation"]) for row in rows if row["name"] == place.name), None)


def clock_jump(role: Whom) -> Strike:
    @asynccontextmanager
    async def strike(v: Victims) -> AsyncIterator[None]:
        v.of(role).clock.move(v.dice.choice((-1, 1)) * v.dice.uniform(60, 1e6))
        yield

    return strike


def blocks(what: str, hold: float = 20.0, weight: float = 1.0) -> Fault:
    """Return a fault of the connections over which KV blocks are fetched."""
    strike = wire("blocks", "prefill", what)
    return Fault(f"{what} blocks", "prefill", strike, MOVING, hold, weight=weight, wired=True, shows="kv_transfer")


def files(name: str, strike: Strike, weight: float, *, old: bool = True) -> Fault:
    """Return a fault of the answering worker's disk tier."""
    return Fault(name, "decode", strike, FIRST, weight=weight, old=old, first=True, shows=DISK, gentle=True)


FAULTS = (
    Fault("kill prefill", "prefill", kill("prefill"), weight=2, restart=True),
    Fault("kill decode", "decode", kill("decode"), weight=3, restart=True),
    Fault("kill router", "router", kill("router"), restart=True),
    Fault("kill store", "store", kill("store"), shows=STORE, restart=True),
    Fault("kill engine of prefill", "prefill", kill("prefill", engine=True), restart=True),
    Fault("kill engine of decode", "decode", kill("decode", engine=True), restart=True),
    Fault("freeze prefill", "prefill", freeze("prefill"), least=GONE, weight=2),
    Fault("freeze decode", "decode", freeze("decode"), least=GONE, weight=2),
    Fault("freeze store", "store", freeze("store"), least=GONE, weight=2, shows=STORE),
    Fault("freeze prefill shortly", "prefill", freeze("prefill"), hold=HICCUP, weight=2),
    Fault("freeze decode shortly", "decode", freeze("decode"), hold=HICCUP, weight=3),
    Fault("freeze engine of decode", "decode", freeze("decode", engine=True)),
    Fault("freeze router", "router", freeze("router"), hold=1.0, least=1.0, weight=2),
    Fault("cut requests to prefill", "prefill", wire("requests", "prefill", "cut"), hold=HICCUP, weight=8),
    Fault("cut requests to decode", "decode", wire("requests", "decode", "cut"), hold=HICCUP, weight=10),
    Fault("hold requests to prefill", "prefill", wire("requests", "prefill", "hold"), hold=3.0),
    Fault("hold requests to decode", "decode", wire("requests", "decode", "hold"), hold=3.0),
    Fault("slow requests to decode", "decode", wire("requests", "decode", "slow"), hold=1.0, weight=2),
    Fault("cut beats of prefill", "prefill", wire("beats", "prefill", "cut"), hold=GONE, least=GONE),
    Fault("cut beats of decode", "decode", wire("beats", "decode", "cut"), hold=GONE, least=GONE),
    Fault("link of prefill down", "prefill", link("down", "prefill"), hold=GONE, least=GONE, weight=2, linked=True),
    Fault("link of decode down", "decode", link("down", "decode"), hold=GONE, least=GONE, weight=2, linked=True),
    Fault("link of prefill mute", "prefill", link("mute", "prefill"), hold=GONE, least=GONE, weight=2, linked=True),
    Fault("link of decode mute", "decode", link("mute", "decode"), hold=GONE, least=GONE, weight=2, linked=True),
    Fault("link of prefill slow", "prefill", link("slow", "prefill"), hold=2.0, weight=3, linked=True),
    Fault("link of decode slow", "decode", link("slow", "decode"), hold=2.0, weight=3, linked=True),
    blocks("cut", hold=HICCUP, weight=10),
    blocks("hold", hold=8.0),
    blocks("slow", hold=2.0, weight=3),
    blocks("spoil", weight=10),
    files("disk full", disk_full, 0.5, old=False),
    files("torn files", damage("tear"), 2),
    files("spoiled files", damage("spoil"), 2),
    files("unreadable files", damage("block"), 0.5),
    Fault("client gone", "decode", client_gone, weight=30, leaves=True, gentle=True),
    Fault("two of one name", "decode", twin, FIRST, weight=0.3, first=True, restart=True),
    Fault("clock jump of router", "router", clock_jump("router"), weight=3, gentle=True),
    Fault("clock jump of prefill", "prefill", clock_jump("prefill"), weight=3, gentle=True),
    Fault("clock jump of decode", "decode", clock_jump("decode"), weight=3, gentle=True),
)
