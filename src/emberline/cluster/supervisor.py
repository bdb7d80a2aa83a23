"""Supervisor: processes on this machine that belong together. A process that ends is started again: at once the first
times, then after a pause that doubles. When all are stopped, the first goes first; each by its pid. If the supervisor
itself is killed, they end with it (core/lifeline.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from emberline.core.config import KV_PORTS, Role, environment, supervised_environment

LONGEST_PAUSE = 30.0
FIRST_PAUSE = 0.5
STEADY = 60.0  # seconds: a process that ran so long is restarted as if it had never ended before
IMMEDIATE_RESTARTS = 3  # before there is a pause: clients that retry wait for a second in all
GRACE = 20.0  # seconds to end in peace


@dataclass(slots=True)
class Child:
    name: str
    arguments: list[str]  # of the program
    log: Path
    environment: Mapping[str, str] = field(repr=False)
    program: Sequence[str] = (sys.executable, "-m", "emberline.cli")
    inherited: tuple[int, ...] = ()  # file descriptors that it gets under the same numbers
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    immediate: int = IMMEDIATE_RESTARTS  # restarts without a pause that are left
    pause: float = FIRST_PAUSE  # seconds before the restart after those
    keeper: asyncio.Task[None] | None = field(default=None, repr=False)


class Supervisor:
    def __init__(self, say: Callable[[str, str], None]) -> None:
        self._say = say  # who, what
        self._children: list[Child] = []
        self._lifeline: tuple[int, int] | None = None  # a pipe: all children read it, nothing writes to it

    async def start(self, child: Child) -> None:
        await self._spawn(child)
        self._children.append(child)
        child.keeper = asyncio.create_task(self._keep(child))

    async def stop(self) -> None:
        """The one that was started first, which takes requests; then those who answer them."""
        for child in self._children:
            if child.keeper is not None:
                child.keeper.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await child.keeper
        for some in (self._children[:1], self._children[1:]):
            await asyncio.gather(*map(self._end, some))
        if self._lifeline is not None:
            for end in self._lifeline:
                os.close(end)
            self._lifeline = None

    async def _keep(self, child: Child) -> None:
        while True:
            assert child.process is not None
            began = time.monotonic()
            status = await child.process.wait()
            if time.monotonic() - began > STEADY:
                child.immediate, child.pause = IMMEDIATE_RESTARTS, FIRST_PAUSE
            when = "now" if child.immediate else f"in {child.pause:g} s"
            self._say(child.name, f"{_ending(status)}; restarts {when}, log {child.log}")
            while not await self._respawned(child):
                pass
            child.restarts += 1

    async def _respawned(self, child: Child) -> bool:
        if child.immediate:
            child.immediate -= 1
        else:
            await asyncio.sleep(child.pause)
            child.pause = min(2 * child.pause, LONGEST_PAUSE)
        try:
            await self._spawn(child)
        except OSError as e:  # no memory, no descriptors, no room for a log: what may have ended it, and may pass
            self._say(child.name, f"cannot be started: {e}")
            return False
        return True

    async def _spawn(self, child: Child) -> None:
        child.log.parent.mkdir(parents=True, exist_ok=True)  # temporary folders are tidied while processes run
        if self._lifeline is None:
            self._lifeline = os.pipe()
        # A session of its own: Ctrl-C in the terminal is for us, and we say who goes when.
        with child.log.open("ab") as out:
            child.process = await asyncio.create_subprocess_exec(
                *child.program,
                *child.arguments,
                stdin=self._lifeline[0],
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=child.inherited,
                env=supervised_environment(child.environment),
            )
        self._say(child.name, f"started, pid {child.process.pid}")

    async def _end(self, child: Child) -> None:
        process = child.process
        assert process is not None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(GRACE):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):  # it ended just now
                    process.kill()
                await process.wait()
        self._say(child.name, "stopped")


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    named = {each.value: each.name for each in signal.Signals}
    return f"ended by {named.get(-status, f'signal {-status}')}"  # those for real time have no name


def children(
    router: Sequence[str],
    workers: Mapping[Role, int],
    worker: Sequence[str],
    *,
    url: str,
    key: str,
    logs: Path,
    kv_port: int = 0,
    listener: int | None = None,
    gpus: Sequence[str] = (),
) -> list[Child]:
    """The router first. All know the cluster's key from their environment, where only their user can read it.
    `kv_port`: the first of the ports of KV transfers, of which each worker has its own; 0: any.
    `listener`: a bound socket for the router. It stays open while the router is restarted, so that clients which
    connect meanwhile wait for the new one and are not refused. `gpus`: names that workers take turns at."""
    secret = environment(key)
    listens = () if listener is None else ("--listen-fd", str(listener))
    made = [Child("router", ["router", *router, *listens], logs / "router.log", secret)]
    made[0].inherited = () if listener is None else (listener,)
    for role, count in workers.items():
        for i in range(count):
            name = f"{'worker' if role == 'both' else role}-{i + 1}"
            own = ["--role", role, "--router", url, "--worker-name", name]
            if kv_port:
                own += ["--kv-port", str(kv_port + (len(made) - 1) * KV_PORTS)]
            device = {"CUDA_VISIBLE_DEVICES": gpus[(len(made) - 1) % len(gpus)]} if gpus else {}
            made.append(Child(name, ["worker", *worker, *own], logs / f"{name}.log", {**secret, **device}))
    return made
