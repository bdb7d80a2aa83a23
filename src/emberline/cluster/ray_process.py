"""RayProcess: a worker process on a node of a Ray cluster, for the Supervisor.

An actor of Ray runs the process on its node. If the node is lost, the process counts as ended, and the Supervisor
starts another one, which Ray places on a node with free resources. If there is no such node, the process starts when
one joins the cluster. Ray ends the actors when the process that started them ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

POLL_INTERVAL_S = 0.2
LOST_STATUS = 1  # exit status of a process whose actor was lost


class RayProcess:
    pid = 0  # it runs on another machine

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._end = actor.wait_for_end.remote()
        self.returncode: int | None = None

    async def wait(self) -> int:
        while self.returncode is None:
            ended, _ = await asyncio.to_thread(self._ray.wait, [self._end], timeout=0)
            if ended:
                self.returncode = await asyncio.to_thread(self._read_exit_status)
            else:
                await asyncio.sleep(POLL_INTERVAL_S)
        return self.returncode

    def terminate(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._actor.stop.remote()

    def kill(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)

    def _read_exit_status(self) -> int:
        try:
            return int(self._ray.get(self._end))
        except self._ray.exceptions.RayError:
            return LOST_STATUS


def make_ray_starter(
    ray: Any, actor_class: type, command: Sequence[str], environment: Mapping[str, str], resources: Mapping[str, float]
) -> Callable[[], RayProcess]:
    """Return a function that starts `command` on any node with free resources (num_cpus, num_gpus).

    `ray`: the module, connected to a cluster. `actor_class`: the class of the actor, which runs the command. Processes
    are spread over the nodes."""
    options = {"max_restarts": 0, "max_concurrency": 2, "scheduling_strategy": "SPREAD", **resources}

    def start() -> RayProcess:
        return RayProcess(ray, ray.remote(actor_class).options(**options).remote(list(command), dict(environment)))

    return start
