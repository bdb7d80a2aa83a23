"""Supervisor: starts processes on this machine and restarts those that end.

The first restarts of a process are immediate; later restarts wait, each time twice as long. On stop, the first process
(the router) ends before the other processes. If the supervisor itself is killed, its processes end too
(core/parent_death.py)."""

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
from typing import Protocol

from emberline.core.config import Role
from emberline.core.engine_config import KV_PORT_COUNT
from emberline.core.environment import supervised_environment
from emberline.core.keys import CLUSTER_KEY_VARIABLE, make_key_environment

MAX_RESTART_PAUSE_S = 30.0
FIRST_RESTART_PAUSE_S = 0.5
STABLE_AFTER_S = 60.0  # a process that ran this long gets immediate restarts again
IMMEDIATE_RESTARTS = 3  # clients retry for about one second in all
STOP_TIMEOUT_S = 20.0  # seconds from SIGTERM to SIGKILL


class RunningProcess(Protocol):
    """The part of asyncio.subprocess.Process that the Supervisor uses."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(slots=True)
class SupervisedProcess:
    name: str
    arguments: list[str]
    log_file: Path
    environment: Mapping[str, str] = field(repr=False)
    program: Sequence[str] = (sys.executable, "-m", "emberline.cli")
    inherited_fds: tuple[int, ...] = ()  # file descriptors that keep their numbers
    start_elsewhere: Callable[[], RunningProcess] | None = None  # starts it on another machine; None: on this one
    process: RunningProcess | None = None
    restarts: int = 0
    immediate_restarts_left: int = IMMEDIATE_RESTARTS
    restart_pause_s: float = FIRST_RESTART_PAUSE_S  # seconds before the first restart that is not immediate
    watch_task: asyncio.Task[None] | None = field(default=None, repr=False)


class Supervisor:
    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report  # takes a process name and an event
        self._children: list[SupervisedProcess] = []
        # A pipe without data: children see its end when the supervisor dies.
        self._lifeline: tuple[int, int] | None = None

    async def start(self, child: SupervisedProcess) -> None:
        await self._spawn(child)
        self._children.append(child)
        child.watch_task = asyncio.create_task(self._restart_whenever_ended(child))

    async def stop(self) -> None:
        """Stop the first process (the router, which accepts requests), then the other processes (the workers)."""
        for child in self._children:
            if child.watch_task is not None:
                child.watch_task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await child.watch_task
        for group in (self._children[:1], self._children[1:]):
            await asyncio.gather(*map(self._stop_process, group))
        if self._lifeline is not None:
            for end in self._lifeline:
                os.close(end)
            self._lifeline = None

    async def _restart_whenever_ended(self, child: SupervisedProcess) -> None:
        while True:
            assert child.process is not None
            started_at = time.monotonic()
            exit_status = await child.process.wait()
            if time.monotonic() - started_at > STABLE_AFTER_S:
                child.immediate_restarts_left, child.restart_pause_s = IMMEDIATE_RESTARTS, FIRST_RESTART_PAUSE_S
            when = "now" if child.immediate_restarts_left else f"in {child.restart_pause_s:g} s"
            self._report(child.name, f"{_describe_exit(exit_status)}; restarts {when}, see {child.log_file}")
            while not await self._restart_after_pause(child):
                pass
            child.restarts += 1

    async def _restart_after_pause(self, child: SupervisedProcess) -> bool:
        """Wait for the pause before the next restart, start the process, and return whether it could be started."""
        if child.immediate_restarts_left:
            child.immediate_restarts_left -= 1
        else:
            await asyncio.sleep(child.restart_pause_s)
            child.restart_pause_s = min(2 * child.restart_pause_s, MAX_RESTART_PAUSE_S)
        try:
            await self._spawn(child)
        except OSError as e:  # a lack of memory, file descriptors or disk space, which may be temporary
            self._report(child.name, f"start failed: {e}")
            return False
        return True

    async def _spawn(self, child: SupervisedProcess) -> None:
        if child.start_elsewhere is not None:
            child.process = await asyncio.to_thread(child.start_elsewhere)
            self._report(child.name, "starts on a node of the cluster")
            return
        child.log_file.parent.mkdir(parents=True, exist_ok=True)  # the system may have deleted the temporary folder
        if self._lifeline is None:
            self._lifeline = os.pipe()
        # In a new session, because Ctrl-C in the terminal must only reach the supervisor, which stops them in order.
        with child.log_file.open("ab") as out:
            child.process = await asyncio.create_subprocess_exec(
                *child.program,
                *child.arguments,
                stdin=self._lifeline[0],
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=child.inherited_fds,
                env=supervised_environment(child.environment),
            )
        self._report(child.name, f"started, pid {child.process.pid}")

    async def _stop_process(self, child: SupervisedProcess) -> None:
        process = child.process
        assert process is not None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):  # it may have just ended
                    process.kill()
                await process.wait()
        self._report(child.name, "stopped")


def _describe_exit(exit_status: int) -> str:
    if exit_status >= 0:
        return f"ended with status {exit_status}"
    signal_names = {each.value: each.name for each in signal.Signals}
    return f"ended by {signal_names.get(-exit_status, f'signal {-exit_status}')}"  # real-time signals have no name


def build_processes(
    router_arguments: Sequence[str],
    worker_counts: Mapping[Role, int],
    worker_arguments: Sequence[str],
    *,
    router_url: str,
    cluster_keys: tuple[str, ...],
    log_dir: Path,
    kv_port: int = 0,
    listen_fd: int | None = None,
    gpus: Sequence[str] = (),
    api_keys: Sequence[str] = (),
) -> list[SupervisedProcess]:
    """Return the processes of a cluster, the router first.

    Each process gets the cluster keys and the API keys in its environment, which only processes of the same user can
    read. `worker_arguments` are added to every worker's command line. `kv_port`: the first port for KV transfers,
    from which on each worker gets its own range of ports; 0 means any free port. `listen_fd`: a bound socket for the
    router. The supervisor keeps that socket open while the router restarts, so that new connections wait and are not
    refused. `gpus`: the names of the GPUs; each worker gets the next one in turn."""
    key_environment = {
        **os.environ,
        **make_key_environment(cluster_keys, CLUSTER_KEY_VARIABLE),
        **make_key_environment(api_keys),
    }
    listen_options = () if listen_fd is None else ("--listen-fd", str(listen_fd))
    processes = [
        SupervisedProcess(
            "router", ["router", *router_arguments, *listen_options], log_dir / "router.log", key_environment
        )
    ]
    processes[0].inherited_fds = () if listen_fd is None else (listen_fd,)
    for role, count in worker_counts.items():
        for i in range(count):
            name = f"{'worker' if role == 'both' else role}-{i + 1}"
            options = ["--role", role, "--router", router_url, "--worker-name", name]
            if kv_port:
                options += ["--kv-port", str(kv_port + (len(processes) - 1) * KV_PORT_COUNT)]
            device = {"CUDA_VISIBLE_DEVICES": gpus[(len(processes) - 1) % len(gpus)]} if gpus else {}
            processes.append(
                SupervisedProcess(
                    name,
                    ["worker", *worker_arguments, *options],
                    log_dir / f"{name}.log",
                    {**key_environment, **device},
                )
            )
    return processes
