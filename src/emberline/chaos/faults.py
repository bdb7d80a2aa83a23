"""Fault: one thing that goes wrong, for a while, with whoever has to do with a request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from emberline.chaos.scene import HERE, Place, Scene, free_port
from emberline.chaos.sight import Sight, Stage
from emberline.cluster.supervisor import Child, Supervisor

EARLY = (Stage.QUEUED, Stage.PREFILL, Stage.TRANSFER)
ALL = (*EARLY, Stage.FIRST, Stage.DECODE)
MOVING = (Stage.PREFILL, Stage.TRANSFER)
FIRST = (Stage.QUEUED,)
HICCUP = 0.3  # seconds
GONE = 3.5  # seconds: a router takes who is away for so long for lost
BLOCK = 1 << 12  # bytes that a full disk still takes


@dataclass(frozen=True, slots=True)
class Victims:
    """Of a fault: the request it is aimed at, and who has to do with it."""

    scene: Scene
    sight: Sight
    dice: random.Random
    home: Place  # who is to answer it

    @property
    def prefill(self) -> Place:
        return self.scene.named(self.sight.prefill) or self.dice.choice(self.scene.of("prefill"))

    @property
    def decode(self) -> Place:
        return self.scene.named(self.sight.decode) or self.home

    def of(self, role: str) -> Place:
        return {"prefill": lambda: self.prefill, "decode": lambda: self.decode, "router": lambda: self.scene.router}[
            role
        ]()


Strike = Callable[[Victims], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    strike: Strike
    stages: tuple[Stage, ...] = ALL
    hold: float = 20.0  # seconds after which it is over, unless the request has ended before
    least: float = 0.0  # seconds that it lasts in any case
    weight: float = 1.0  # how often, beside others
    wired: bool = False  # the request must be answered by a worker that gets blocks through a wire
    first: bool = False  # it comes before the request
    leaves: bool = False  # the client goes
    old: bool = False  # a request that was asked before: its blocks may be on disk
    shows: str = ""  # in which of the workers' counters
    gentle: bool = False  # nobody is missing because of it: it may come while somebody is


def kill(role: str, *, engine: bool = False) -> Strike:
    @asynccontextmanager
    async def strike(v: Victims) -> AsyncIterator[None]:
        place = v.of(role)
        if engine:
            place.signal(signal.SIGKILL, engine=True)
        else:
            v.scene.kill(place)
        yield

    return strike


def freeze(role: str, *, engine: bool = False) -> Strike:
    @asynccontextmanager
    async def strike(v: Victims) -> AsyncIterator[None]:
        place = v.of(role)
        pids = [place.engine] if engine else [place.pid, place.engine]
        for pid in filter(None, pids):
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in filter(None, pids):
                with contextlib.suppress(ProcessLookupError):  # its server may have lost patience
                    os.kill(pid, signal.SIGCONT)

    return strike


def wire(which: str, role: str, what: str) -> Strike:
    """`what`: cut, hold, slow or spoil."""

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


@asynccontextmanager
async def disk_full(v: Victims) -> AsyncIterator[None]:
    """No file of the engine's may grow beyond a page: what it writes is cut short, as on a disk that fills up."""
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
        with contextlib.suppress(OSError):  # it may be gone
            size = file.stat().st_size
            if how == "tear":
                os.truncate(file, size // 2 // BLOCK * BLOCK)
            elif how == "spoil":
                with file.open("r+b") as opened:
                    opened.seek(size // 2)
                    byte = opened.read(1)
                    opened.seek(size // 2)
                    opened.write(bytes((byte[0] ^ 0x10,)))
            else:  # an I/O error for who opens it
                file.unlink()
                file.symlink_to(file)


@asynccontextmanager
async def client_gone(v: Victims) -> AsyncIterator[None]:
    yield  # whoever runs the request ends it


@asynccontextmanager
async def twin(v: Victims) -> AsyncIterator[None]:
    """A second process takes a worker's name, and dies. The first has lost it for good: it is started again."""
    place, scene = v.decode, v.scene
    supervisor = Supervisor(lambda who, what: scene.history.append(f"twin of {who} {what}"))
    arguments = scene.arguments(place, free_port(), scene.router.port, HERE)
    child = Child(place.name, arguments, scene.home / f"{place.name}-twin.log", place.child.environment)
    before = await _incarnation(scene, place)
    await supervisor.start(child)
    try:
        async with asyncio.timeout(60):
            while await _incarnation(scene, place) in (before, None):
                await asyncio.sleep(0.1)
        yield
    finally:
        await supervisor.stop()
        scene.kill(place)


async def _incarnation(scene: Scene, place: Place) -> str | None:
    status = await scene.ask(f"{scene.url}/cluster/status")
    rows = status["workers"] if status else []
    return next((str(row["incarnation"]) for row in rows if row["name"] == place.name), None)


def clock_jump(role: str) -> Strike:
    @asynccontextmanager
    async def strike(v: Victims) -> AsyncIterator[None]:
        v.of(role).clock.move(v.dice.choice((-1, 1)) * v.dice.uniform(60, 1e6))
        yield

    return strike


def blocks(what: str, hold: float = 20.0, weight: float = 1.0) -> Fault:
    """Of the wire over which they come."""
    strike = wire("blocks", "prefill", what)
    return Fault(f"{what} blocks", strike, MOVING, hold, weight=weight, wired=True, shows="kv_transfer")


FAULTS = (
    Fault("kill prefill", kill("prefill"), weight=2),
    Fault("kill decode", kill("decode"), weight=3),
    Fault("kill router", kill("router")),
    Fault("kill engine of prefill", kill("prefill", engine=True)),
    Fault("kill engine of decode", kill("decode", engine=True)),
    Fault("freeze prefill", freeze("prefill"), least=GONE, weight=2),
    Fault("freeze decode", freeze("decode"), least=GONE, weight=2),
    Fault("freeze prefill shortly", freeze("prefill"), hold=HICCUP, weight=2),
    Fault("freeze decode shortly", freeze("decode"), hold=HICCUP, weight=3),
    Fault("freeze engine of decode", freeze("decode", engine=True)),
    Fault("freeze router", freeze("router"), hold=1.0, least=1.0, weight=2),
    Fault("cut requests to prefill", wire("requests", "prefill", "cut"), hold=HICCUP, weight=8),
    Fault("cut requests to decode", wire("requests", "decode", "cut"), hold=HICCUP, weight=10),
    Fault("hold requests to prefill", wire("requests", "prefill", "hold"), hold=12.0),
    Fault("hold requests to decode", wire("requests", "decode", "hold"), hold=12.0),
    Fault("slow requests to decode", wire("requests", "decode", "slow"), hold=1.0, weight=2),
    Fault("cut beats of prefill", wire("beats", "prefill", "cut"), hold=GONE, least=GONE),
    Fault("cut beats of decode", wire("beats", "decode", "cut"), hold=GONE, least=GONE),
    blocks("cut", hold=HICCUP, weight=10),
    blocks("hold", hold=8.0),
    blocks("slow", hold=2.0, weight=3),
    blocks("spoil", weight=10),
    Fault("disk full", disk_full, FIRST, weight=0.5, first=True, shows="kv_tier"),
    Fault("torn files", damage("tear"), FIRST, weight=2, old=True, first=True, shows="kv_tier"),
    Fault("spoiled files", damage("spoil"), FIRST, weight=2, old=True, first=True, shows="kv_tier"),
    Fault("unreadable files", damage("block"), FIRST, weight=0.5, old=True, first=True, shows="kv_tier"),
    Fault("client gone", client_gone, weight=30, leaves=True, gentle=True),
    Fault("two of one name", twin, FIRST, weight=0.3, first=True),
    Fault("clock jump of router", clock_jump("router"), weight=3, gentle=True),
    Fault("clock jump of prefill", clock_jump("prefill"), weight=3, gentle=True),
    Fault("clock jump of decode", clock_jump("decode"), weight=3, gentle=True),
)
