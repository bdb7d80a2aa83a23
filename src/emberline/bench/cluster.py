"""Cluster: a router and its workers on this machine as `emberline cluster up` starts them, and what they tell."""

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

from emberline.bench.connection import Connection, HTTPFailed
from emberline.cluster.muster import absences, holdings, until_nothing
from emberline.cluster.supervisor import Child, Supervisor, children
from emberline.core.config import Role
from emberline.core.errors import EmberlineError
from emberline.core.freeport import free_port

PATIENCE = 120.0  # seconds until all are there
ANSWER = 5.0  # seconds for what they tell


class Cluster:
    def __init__(
        self,
        workers: Mapping[Role, int],
        worker: Sequence[str],
        logs: Path,
        *,
        router: Sequence[str] = (),
        pinned: bool = False,
    ) -> None:
        """`worker`: the model and options of each. `pinned`: each has a core of its own, as far as there are enough."""
        logs.mkdir(parents=True, exist_ok=True)
        self.logs, self._pinned = logs, pinned
        self.url, self.key = f"http://127.0.0.1:{(port := free_port())}", secrets.token_hex(16)
        made = children(["--port", str(port), *router], workers, worker, url=self.url, key=self.key, logs=logs)
        self.router, self.workers = made[0], made[1:]
        self._urls = {child.name: f"http://127.0.0.1:{free_port()}" for child in self.workers}
        for child in self.workers:
            child.arguments += ["--port", self._urls[child.name].rpartition(":")[2]]
        self._supervisor = Supervisor(lambda who, what: None)

    async def __aenter__(self) -> Cluster:
        try:
            await self._supervisor.start(self.router)
            cores = sorted(os.sched_getaffinity(0)) if self._pinned and hasattr(os, "sched_setaffinity") else []
            for i, child in enumerate(self.workers):
                await self._supervisor.start(child)
                if cores and child.process is not None:  # before it has a thread or a child of its own
                    os.sched_setaffinity(child.process.pid, {cores[i % len(cores)]})
            if missing := await self.recovers():
                raise EmberlineError(f"the cluster did not get ready: {missing}", hint=f"its logs are in {self.logs}")
        except BaseException:
            await self._supervisor.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._supervisor.stop()

    # -- what they tell ------------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any] | None:
        """Of the router; None: it does not answer."""
        return await _ask(self.url, "/cluster/status")

    async def stats(self, child: Child) -> dict[str, Any] | None:
        return await _ask(self._urls[child.name], "/stats")

    async def missing(self) -> str:
        """What keeps it from full strength; "" if nothing does."""
        return next(iter(absences(await self.status(), await self._told()).values()), "")

    async def recovers(self) -> str:
        """Waits for full strength. What is missing in the end."""
        return await until_nothing(self.missing, PATIENCE)

    async def held(self) -> str:
        """What is held for somebody, when nobody wants anything; "" if nothing is."""
        return holdings(await self.status(), await self._told())

    async def quiet(self) -> str:
        """Waits until nothing is held. What is, in the end."""
        return await until_nothing(self.held, PATIENCE)

    async def _told(self) -> dict[str, dict[str, Any] | None]:
        return {child.name: await self.stats(child) for child in self.workers}


async def _ask(url: str, path: str) -> dict[str, Any] | None:
    with suppress(HTTPFailed, TimeoutError, ValueError):
        connection = Connection(url)
        try:
            async with asyncio.timeout(ANSWER):
                told: dict[str, Any] = msgspec.json.decode(await connection.fetch(path))
                return told
        finally:
            connection.close()
    return None
