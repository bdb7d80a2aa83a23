"""LocalFleet: workers as processes of this machine.

The processes keep running when the autoscaler is killed, and the next autoscaler finds them by their command lines in
/proc. Signals are sent through pidfds, so that they cannot reach another process to which a process id now belongs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from emberline.autoscaler.fleet import NAME_PREFIX, FleetError, FleetWorker
from emberline.core.errors import InvalidRequest
from emberline.core.router_urls import normalise_router_url

STOP_TIMEOUT_S = 30.0  # seconds from SIGTERM to SIGKILL; a worker lets open requests run for 10 s, then moves them
KILL_TIMEOUT_S = 10.0  # seconds after SIGKILL; a process that waits for a device may not end
POLL_INTERVAL_S = 0.05
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"

BuildCommand = Callable[[str, str], Sequence[str]]  # function from role and worker name to the command line


@dataclass(frozen=True, slots=True)
class LocalProcess:
    pid: int
    name: str
    role: str
    gpus: tuple[str, ...]  # GPUs that the process may use; empty: no variable limits them


class LocalFleet:
    def __init__(
        self,
        build_command: BuildCommand,
        roles: Sequence[str],
        *,
        router_urls: Sequence[str],
        log_dir: Path,
        environment: Mapping[str, str],
        gpus: Sequence[str] = (),
        gpus_by_role: Mapping[str, int] | None = None,
    ) -> None:
        """Prepare to start workers, and lock the routers against other autoscalers on this machine.

        `build_command` returns a worker's command line. The worker's name and each router URL must be arguments of
        their own in it, because the fleet finds its workers by these arguments. `router_urls` are compared after
        normalisation. `gpus`: the GPUs of this machine, of which each worker gets as many as its role needs. Raises
        InvalidRequest if another autoscaler on this machine manages workers of the same router, or if the machine has
        no /proc."""
        if not Path("/proc/self/cmdline").exists():
            raise InvalidRequest(
                "adapter local needs /proc, which only Linux has",
                param="adapter",
                hint="use --adapter kubernetes or ray",
            )
        self._build_command = build_command
        self._roles = roles
        self._router_urls = {normalise_router_url(url) for url in router_urls}
        self._log_dir = log_dir
        self._environment = dict(environment)
        self._gpus, self._gpus_by_role = tuple(gpus), dict(gpus_by_role or {})
        self._children: list[tuple[subprocess.Popen[bytes], LocalProcess]] = []  # children that have not been reaped
        self._kill_at: dict[str, float] = {}  # times by the name of a worker that was asked to end
        with contextlib.ExitStack() as locks:
            # All autoscalers take the locks in the same order, so that one of them wins.
            for url in sorted(self._router_urls):
                locks.enter_context(_lock_router(url))
            self._locks = locks.pop_all()

    async def list_workers(self) -> list[FleetWorker]:
        processes = self._find_processes()
        names = {process.name for process in processes}
        self._kill_at = {name: at for name, at in self._kill_at.items() if name in names}
        for process in processes:
            if time.monotonic() > self._kill_at.get(process.name, float("inf")):
                self._send_signal(process, signal.SIGKILL)
        return [FleetWorker(each.name, each.role, each.name in self._kill_at) for each in processes]

    async def start_workers(self, role: str, count: int) -> None:
        for _ in range(count):
            name = f"{NAME_PREFIX}-{role}-{secrets.token_hex(4)}"
            gpus = self._choose_gpus(role)
            variables = {GPU_VARIABLE: ",".join(gpus)} if gpus else {}
            try:
                with (self._log_dir / f"{name}.log").open("ab") as log_file:
                    child = subprocess.Popen(
                        self._build_command(role, name),
                        stdin=subprocess.DEVNULL,
                        stdout=log_file,
                        stderr=log_file,
                        env={**os.environ, **self._environment, **variables},
                        start_new_session=True,  # Ctrl-C at the autoscaler must not reach it
                    )
            except OSError as e:
                message = f"worker {name} cannot be started: {e.strerror or e}"
                raise FleetError(message, hint=f"see {self._log_dir}, and check memory and disk space") from e
            self._children.append((child, LocalProcess(child.pid, name, role, gpus)))

    async def stop_worker(self, name: str) -> None:
        for process in self._find_processes():
            if process.name == name and name not in self._kill_at:
                self._kill_at[name] = time.monotonic() + STOP_TIMEOUT_S
                self._send_signal(process, signal.SIGTERM)

    async def replace_worker(self, name: str) -> bool:
        await self.stop_worker(name)
        return False

    async def close(self, *, stop_workers: bool) -> None:
        try:
            if stop_workers:
                for worker in await self.list_workers():
                    await self.stop_worker(worker.name)
                await self._wait_until_ended()
        finally:
            self._locks.close()

    async def _wait_until_ended(self) -> None:
        """Wait until all workers have ended. Raises FleetError if some are left after they should have got SIGKILL."""
        end = time.monotonic() + STOP_TIMEOUT_S + KILL_TIMEOUT_S
        while workers := await self.list_workers():
            if time.monotonic() > end:
                names = ", ".join(worker.name for worker in workers)
                message = f"workers do not end within {KILL_TIMEOUT_S:g} s after SIGKILL: {names}"
                raise FleetError(message, hint="see with `ps -eo pid,stat,wchan,args` what they wait for")
            await asyncio.sleep(POLL_INTERVAL_S)

    def _choose_gpus(self, role: str) -> tuple[str, ...]:
        count = self._gpus_by_role.get(role, 0)
        if not self._gpus or not count:
            return ()
        used = {gpu for process in self._find_processes() for gpu in process.gpus}
        free = [gpu for gpu in self._gpus if gpu not in used]
        if len(free) < count:
            message = f"a worker of the pool {role} needs {count} GPUs, and {len(free)} of {len(self._gpus)} are free"
            raise FleetError(message, hint="set --max-gpus to the number of GPUs")
        return tuple(free[:count])

    def _find_processes(self) -> list[LocalProcess]:
        """Return the running workers: those in /proc, and children whose command lines are not in /proc yet.

        A new child has no command line for a moment after Popen has returned. If the child were left out, its GPUs
        would count as free and the next worker would get them."""
        self._children = [(child, process) for child, process in self._children if child.poll() is None]
        found = {process.pid: process for process in self._scan_processes()}
        return [*found.values(), *(process for _, process in self._children if process.pid not in found)]

    def _scan_processes(self) -> Iterator[LocalProcess]:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it ended, or belongs to another user
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if entry.stat().st_uid != os.getuid() or not self._names_router(arguments):
                    continue
                if os.getsid(int(entry.name)) != int(entry.name):  # a child that the worker forked
                    continue
                for role in self._roles:
                    prefix = f"{NAME_PREFIX}-{role}-"
                    if name := next((each for each in arguments if each.startswith(prefix)), ""):
                        yield LocalProcess(int(entry.name), name, role, _read_gpus(entry))

    def _names_router(self, arguments: Sequence[str]) -> bool:
        """Whether one of the arguments is the URL of a router of this fleet, however it is spelled."""
        for argument in arguments:
            if argument.lower().startswith(("http://", "https://")):
                with contextlib.suppress(InvalidRequest):  # a URL of something else
                    if normalise_router_url(argument) in self._router_urls:
                        return True
        return False

    def _send_signal(self, process: LocalProcess, number: signal.Signals) -> None:
        for child, started in self._children:  # that has not been reaped, so its process id is not reused
            if started.pid == process.pid:
                child.send_signal(number)
                return
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            descriptor = os.pidfd_open(process.pid)
            try:
                # The descriptor now keeps the process id from being reused: check that it is still the worker's.
                arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                if process.name in arguments:
                    signal.pidfd_send_signal(descriptor, number)
            except PermissionError as e:
                raise FleetError(f"worker {process.name} cannot be signalled: {e.strerror or e}") from e
            finally:
                os.close(descriptor)


def _read_gpus(process_directory: Path) -> tuple[str, ...]:
    prefix = f"{GPU_VARIABLE}="
    variables = (process_directory / "environ").read_bytes().decode(errors="replace").split("\0")
    value = next((each.removeprefix(prefix) for each in variables if each.startswith(prefix)), "")
    return tuple(filter(None, value.split(",")))


def _lock_router(router_url: str) -> socket.socket:
    """Return a socket that serves as a lock: until it is closed, no other autoscaler here can manage this router.

    `router_url` must be normalised. Raises InvalidRequest if another autoscaler has the lock."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0emberline-autoscaler-{os.getuid()}-{blake2b(router_url.encode(), digest_size=8).hexdigest()}")
    except OSError as e:
        lock.close()
        raise InvalidRequest(
            f"another autoscaler on this machine manages the workers of {router_url}",
            param="router",
            hint="stop that one first; it leaves its workers running when it is killed",
        ) from e
    return lock
