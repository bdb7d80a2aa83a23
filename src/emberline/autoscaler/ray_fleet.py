"""RayFleet: workers as detached actors of a Ray cluster, each with a worker process on the actor's node.

Detached actors keep running when the autoscaler ends, and the next autoscaler finds them by their names. A worker
process ends with its actor, and an actor when its node is lost. Ray is imported only when the fleet is used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from emberline.autoscaler.fleet import NAME_PREFIX, FleetError, FleetWorker
from emberline.core.environment import supervised_environment

NAMESPACE = "emberline"
CALL_TIMEOUT_S = 20.0  # limit of one call of Ray; actors are started in the background
EXIT_DELAY_S = 0.2  # time left for calls that return the exit status, before the actor ends
STOP_TIMEOUT_S = 30.0  # seconds from SIGTERM to SIGKILL of the worker process
KILL_TIMEOUT_S = STOP_TIMEOUT_S + 10.0  # seconds until an actor that has not ended is killed

Result = TypeVar("Result")


class RayWorkerActor:
    """Runs one worker process on its node; the actor ends with the process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # No data is sent through this pipe. When the actor is killed, the pipe closes, and the worker ends.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=supervised_environment({**os.environ, **environment})
        )
        threading.Thread(target=self._exit_with_process, daemon=True).start()

    def stop(self) -> None:
        """Send SIGTERM to the worker, which drains itself and ends. The actor ends after the worker."""
        self._process.send_signal(signal.SIGTERM)
        threading.Timer(STOP_TIMEOUT_S, self._process.kill).start()

    def wait_for_end(self) -> int:
        """Wait until the process has ended, and return its exit status."""
        return self._process.wait()

    def _exit_with_process(self) -> None:
        self._process.wait()
        time.sleep(EXIT_DELAY_S)
        os._exit(0)


class RayFleet:
    def __init__(
        self,
        ray: Any,
        build_command: Callable[[str, str], Sequence[str]],
        roles: Sequence[str],
        *,
        environment: Mapping[str, str],
        resources_by_role: Mapping[str, Mapping[str, float]],
    ) -> None:
        """`ray`: the imported module, already connected to a Ray cluster.

        `resources_by_role`: `num_cpus` and `num_gpus` of each worker of a role."""
        self._ray = ray
        self._build_command = build_command
        self._roles = roles
        self._environment = dict(environment)
        self._resources = resources_by_role
        self._kill_at: dict[str, float] = {}  # times by the name of an actor that was asked to end

    async def list_workers(self) -> list[FleetWorker]:
        rows = await self._call(lambda: self._ray.util.list_named_actors(all_namespaces=True))
        names = [row["name"] for row in rows if row["namespace"] == NAMESPACE]
        self._kill_at = {name: at for name, at in self._kill_at.items() if name in names}
        for name, kill_at in list(self._kill_at.items()):
            if time.monotonic() > kill_at:
                self._kill_at[name] = time.monotonic() + KILL_TIMEOUT_S
                await self._call(partial(self._kill, name))
        return [
            FleetWorker(name, role, name in self._kill_at)
            for name in names
            for role in self._roles
            if name.startswith(f"{NAME_PREFIX}-{role}-")
        ]

    async def start_workers(self, role: str, count: int) -> None:
        for _ in range(count):
            name = f"{NAME_PREFIX}-{role}-{secrets.token_hex(4)}"
            options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": 0}
            actor_class = self._ray.remote(RayWorkerActor).options(**options, **self._resources[role])
            await self._call(partial(actor_class.remote, list(self._build_command(role, name)), self._environment))

    async def stop_worker(self, name: str) -> None:
        if name in self._kill_at:
            return
        await self._call(partial(self._stop, name))
        self._kill_at[name] = time.monotonic() + KILL_TIMEOUT_S

    def _stop(self, name: str) -> None:
        with contextlib.suppress(ValueError):  # no such actor: it has ended
            self._ray.get_actor(name, NAMESPACE).stop.remote()

    def _kill(self, name: str) -> None:
        with contextlib.suppress(ValueError):
            self._ray.kill(self._ray.get_actor(name, NAMESPACE))

    async def replace_worker(self, name: str) -> bool:
        await self.stop_worker(name)
        return False

    async def close(self, *, stop_workers: bool) -> None:
        """Do nothing: detached actors belong to the Ray cluster and are not stopped when the autoscaler stops."""

    async def _call(self, function: Callable[[], Result]) -> Result:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await asyncio.to_thread(function)
        except TimeoutError as e:
            message = f"the Ray cluster did not answer within {CALL_TIMEOUT_S:g} s"
            raise FleetError(message, hint="see `ray status`") from e
        except Exception as e:  # Ray's own errors, of many classes
            raise FleetError(f"the Ray cluster refused a call: {e}", hint="see `ray status`") from e
