"""Fault: one thing that goes wrong, for a while, with whoever has to do with a request."""

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
HICCUP = 0.3  # seconds
GONE = 3.0  # seconds: a router takes who is away for so long for lost
DISK, STORE = 'tier="disk"', 'tier="store"'  # in the names of counters
BLOCK = 1 << 12  # bytes that a full disk still takes

Whom = Literal["prefill", "decode", "router", "store"]


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
    hold: float = 20.0  # seconds after which it is over, unless the request has ended before
    least: float = 0.0  # seconds that it lasts in any case
    weight: float = 1.0  # how often, beside others
    wired: bool = False  # the request must be answered by a worker that gets blocks through a wire
    linked: bool = False  # there must be links
    first: bool = False  # it comes before the request
    leaves: bool = False  # the client goes
    old: bool = False  # a request that was asked before: its blocks may be on disk
    shows: str = ""  # in which of the workers' counters
    gentle: bool = False  # nobody is missing because of it
    restart: bool = False  # somebody must be started again

    def possible(self, scene: Scene) -> bool:
        return (scene.store is not None or self.of != "store") and (scene.settings.links or not self.linked)


def kill(role: Whom, *, engine: bool = False) -> Strike:
    @asynccontextmanager
    async def strike(v: Victims) -> AsyncIterator[None]:
        place = v.of(role)
        if engine:
            place.signal(signal.SIGKILL, engine=True)
        else:
            v.scene.kill(place)
        yield

    return strike


def freeze(role: Whom, *, engine: bool = False) -> Strike:
    @asynccontextmanager
    async def strike(v: Victims) -> AsyncIterator[None]:
        place = v.of(role)
        pids = [place.engine] if engine else [place.pid, place.engine]
        _send(signal.SIGSTOP, pids)
        try:
            yield
        finally:
            _send(signal.SIGCONT, pids)

    return strike


def _send(number: signal.Signals, pids: Iterable[int | None]) -> None:
    for pid in filter(None, pids):
        with contextlib.suppress(ProcessLookupError):  # its server may have lost patience
            os.kill(pid, number)


def wire(which: str, role: Whom, what: str) -> Strike:
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


def link(how: Harm, role: Whom) -> Strike:
    """Of the link over which all goes that this worker has to do with others."""

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
                    if byte := opened.read(1):  # of a torn one nothing may be left
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
    """A second process with a worker's name is refused as long as the first lives, and dies."""
    place, scene = v.decode, v.scene
    supervisor = Supervisor(lambda who, what: scene.history.append(f"twin of {who} {what}"))
    arguments = scene.arguments(place, HERE, scene.network.free_port(), HERE, f"{HERE}:{scene.router.port}")
    child = Child(place.name, arguments, scene.home / f"{place.name}-twin.log", place.child.environment)
    before = await _incarnation(scene, place)
    await supervisor.start(child)
    try:
        async with asyncio.timeout(60):
            while "is alive at" not in child.log.read_text(errors="replace"):
                await asyncio.sleep(0.1)
        if await _incarnation(scene, place) != before:
            raise EmberlineError(f"a second {place.name} has taken the name of the first, which lives")
        yield
    finally:
        assert child.process is not None
        child.process.kill()  # without a goodbye
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
    """Of the wire over which they come."""
    strike = wire("blocks", "prefill", what)
    return Fault(f"{what} blocks", "prefill", strike, MOVING, hold, weight=weight, wired=True, shows="kv_transfer")


def files(name: str, strike: Strike, weight: float, *, old: bool = True) -> Fault:
    """Of the disk of who answers."""
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
