"""LocalCluster: starts a router and workers on this machine, as `emberline cluster up` does, and reads their status."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from emberline.bench.connection import HTTPRequestFailed, MinimalHTTPConnection
from emberline.cluster.cluster_health import describe_held_resources, find_unavailable_workers, wait_until_no_problem
from emberline.cluster.supervisor import SupervisedProcess, Supervisor, build_processes
from emberline.core.config import Role
from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port

START_TIMEOUT_S = 120.0  # seconds until all processes are ready
STATUS_TIMEOUT_S = 5.0  # seconds for a status request


class LocalCluster:
    def __init__(
        self,
        worker_counts: Mapping[Role, int],
        worker_arguments: Sequence[str],
        log_dir: Path,
        *,
        router_arguments: Sequence[str] = (),
        pin_workers_to_cores: bool = False,
    ) -> None:
        """Prepare the processes; entering the context manager starts them.

        `worker_arguments` are the model and the options of every worker. With `pin_workers_to_cores`, each worker runs
        on its own CPU core if there are enough cores.
        """
        log_dir.mkdir(parents=True, exist_ok=True)
        self.logs, self._pinned = log_dir, pin_workers_to_cores
        self.url, self.key = f"http://127.0.0.1:{(port := free_port())}", secrets.token_hex(16)
        made = build_processes(
            ["--port", str(port), *router_arguments],
            worker_counts,
            worker_arguments,
            router_url=self.url,
            cluster_keys=(self.key,),
            log_dir=log_dir,
        )
        self.router, self.workers = made[0], made[1:]
        self._urls = {child.name: f"http://127.0.0.1:{free_port()}" for child in self.workers}
        for child in self.workers:
            child.arguments += ["--port", self._urls[child.name].rpartition(":")[2]]
        self._supervisor = Supervisor(lambda process, event: None)

    async def __aenter__(self) -> LocalCluster:
        try:
            await self._supervisor.start(self.router)
            cores = sorted(os.sched_getaffinity(0)) if self._pinned and hasattr(os, "sched_setaffinity") else []
            for i, child in enumerate(self.workers):
                await self._supervisor.start(child)
                if cores and child.process is not None:  # before it starts threads or children
                    os.sched_setaffinity(child.process.pid, {cores[i % len(cores)]})
            if missing := await self.wait_until_ready():
                raise EmberlineError(
                    f"the benchmark's cluster did not become ready in {START_TIMEOUT_S:.0f} s: {missing}",
                    hint=f"see the logs in {self.logs}",
                )
        except BaseException:
            await self._supervisor.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._supervisor.stop()

    # -- status --------------------------------------------------------------------------------------------------------

    async def fetch_router_status(self) -> dict[str, Any] | None:
        """Return the router's status document, or None if it does not answer."""
        return await _fetch_json(self.url, "/cluster/status")

    async def fetch_worker_stats(self, worker: SupervisedProcess) -> dict[str, Any] | None:
        return await _fetch_json(self._urls[worker.name], "/stats")

    async def describe_missing_workers(self) -> str:
        """Return a text that names a worker that is not ready or not connected to its peers, or "" if there is none."""
        return next(
            iter(
                find_unavailable_workers(
                    await self.fetch_router_status(), await self._fetch_all_worker_stats()
                ).values()
            ),
            "",
        )

    async def wait_until_ready(self) -> str:
        """Wait until all workers are ready, at most START_TIMEOUT_S.

        Return "" or, after the timeout, a text that names a worker that is not ready.
        """
        return await wait_until_no_problem(self.describe_missing_workers, START_TIMEOUT_S)

    async def describe_held_resources(self) -> str:
        """Return a text that lists the KV blocks, leases and requests that workers still hold, or "" if there are none.

        A worker should hold nothing while no request is open.
        """
        return describe_held_resources(await self.fetch_router_status(), await self._fetch_all_worker_stats())

    async def wait_until_idle(self) -> str:
        """Wait until no worker holds KV blocks, leases or requests, at most START_TIMEOUT_S.

        Return "" or, after the timeout, a text that lists what is still held.
        """
        return await wait_until_no_problem(self.describe_held_resources, START_TIMEOUT_S)

    async def _fetch_all_worker_stats(self) -> dict[str, dict[str, Any] | None]:
        return {child.name: await self.fetch_worker_stats(child) for child in self.workers}


async def _fetch_json(url: str, path: str) -> dict[str, Any] | None:
    with suppress(HTTPRequestFailed, TimeoutError, ValueError):
        connection = MinimalHTTPConnection(url)
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                document: dict[str, Any] = msgspec.json.decode(await connection.fetch(path))
                return document
        finally:
            connection.close()
    return None
