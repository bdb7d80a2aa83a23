"""Supervisor: starts processes on this machine and restarts those that end.

The first restarts are immediate, the next ones follow a pause that doubles. On stop, the first process ends before the
others. If the supervisor itself is killed, its processes end too (core/lifeline.py)."""

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
STEADY = 60.0  # a process that ran this long gets immediate restarts again
IMMEDIATE_RESTARTS = 3  # clients retry for about one second in all
GRACE = 20.0  # between SIGTERM and SIGKILL


@dataclass(slots=True)
class Child:
    name: str
    arguments: list[str]
    log: Path
    environment: Mapping[str, str] = field(repr=False)
    program: Sequence[str] = (sys.executable, "-m", "emberline.cli")
    inherited: tuple[int, ...] = ()  # file descriptors that keep their numbers
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    immediate: int = IMMEDIATE_RESTARTS
    pause: float = FIRST_PAUSE  # before the restart after the immediate ones
    keeper: asyncio.Task[None] | None = field(default=None, repr=False)


class Supervisor:
    def __init__(self, say: Callable[[str, str], None]) -> None:
        self._say = say  # takes a process name and an event
        self._children: list[Child] = []
        # A pipe without data: children see its end when the supervisor dies.
        self._lifeline: tuple[int, int] | None = None

    async def start(self, child: Child) -> None:
        await self._spawn(child)
        self._children.append(child)
        child.keeper = asyncio.create_task(self._keep(child))

    async def stop(self) -> None:
        """Stop the first process, which takes requests, then all others, which serve them."""
        for child in self._children:
            if child.keeper is not None:
                child.keeper.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await child.keeper
        for group in (self._children[:1], self._children[1:]):
            await asyncio.gather(*map(self._end, group))
        if self._lifeline is not None:
            for end in self._lifeline:
                os.close(end)
            self._lifeline = None

    async def _keep(self, child: Child) -> None:
        while True:
            assert child.process is not None
            started_at = time.monotonic()
            exit_status = await child.process.wait()
            if time.monotonic() - started_at > STEADY:
                child.immediate, child.pause = IMMEDIATE_RESTARTS, FIRST_PAUSE
            when = "now" if child.immediate else f"in {child.pause:g} s"
            self._say(child.name, f"{_ending(exit_status)}; restarts {when}, see {child.log}")
            while not await self._respawned(child):
                pass
            child.restarts += 1

    async def _respawned(self, child: Child) -> bool:
        """Wait as long as necessary, start the process, and return whether that succeeded."""
        if child.immediate:
            child.immediate -= 1
        else:
            await asyncio.sleep(child.pause)
            child.pause = min(2 * child.pause, LONGEST_PAUSE)
        try:
            await self._spawn(child)
        except OSError as e:  # a lack of memory, file descriptors or disk space, which may be temporary
            self._say(child.name, f"start failed: {e}")
            return False
        return True

    async def _spawn(self, child: Child) -> None:
        child.log.parent.mkdir(parents=True, exist_ok=True)  # the system may have deleted the temporary folder
        if self._lifeline is None:
            self._lifeline = os.pipe()
        # In a new session, because Ctrl-C in the terminal must only reach the supervisor, which stops them in order.
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
                with contextlib.suppress(ProcessLookupError):  # it may have just ended
                    process.kill()
                await process.wait()
        self._say(child.name, "stopped")


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    signal_names = {each.value: each.name for each in signal.Signals}
    return f"ended by {signal_names.get(-status, f'signal {-status}')}"  # real-time signals have no name


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
    """Return the processes of a cluster, the router first.

    All get the cluster key in their environment, which only their user can read. `kv_port`: first port for KV
    transfers, of which each worker gets its own range; 0: any. `listen_fd`: a bound socket for the router. It stays
    open while the router restarts, so that clients which connect meanwhile wait instead of being refused. `gpus`: names
    of GPUs that the workers use in turn."""
    key_environment = environment(key)
    listen_options = () if listener is None else ("--listen-fd", str(listener))
    processes = [Child("router", ["router", *router, *listen_options], logs / "router.log", key_environment)]
    processes[0].inherited = () if listener is None else (listener,)
    for role, count in workers.items():
        for i in range(count):
            name = f"{'worker' if role == 'both' else role}-{i + 1}"
            options = ["--role", role, "--router", url, "--worker-name", name]
            if kv_port:
                options += ["--kv-port", str(kv_port + (len(processes) - 1) * KV_PORTS)]
            device = {"CUDA_VISIBLE_DEVICES": gpus[(len(processes) - 1) % len(gpus)]} if gpus else {}
            processes.append(
                Child(name, ["worker", *worker, *options], logs / f"{name}.log", {**key_environment, **device})
            )
    return processes
