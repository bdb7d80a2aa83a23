"""HangDetector: finds workers to replace, which send no router heartbeats and do not react to calls.

Missing heartbeats do not prove that a worker hangs: the router or the network may be broken. So a lost worker is
replaced only if two things are true. For some time, each router that answers and knows the worker counts it as lost.
And a call of the autoscaler gets no reaction, not even a refused connection: a worker that refuses it may be starting.

If the routers have lost all workers at once, the fault is probably not the workers', and the time is longer. Kubernetes
also evicts no pods when all nodes of a cluster are unreachable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from emberline.autoscaler.pool_workers import PoolWorkers
from emberline.autoscaler.settings import MAX_LOST_TIMEOUT_S
from emberline.autoscaler.worker_probe import ProbeResult

log = logging.getLogger("emberline.autoscaler")

WorkerProbe = Callable[[str], Awaitable[ProbeResult]]  # function from a worker's URL to the result of a call


class HangDetector:
    """Decides which workers of the fleet hang, from the routers' status and from calls to the workers."""

    def __init__(self, lost_timeout_s: float, probe: WorkerProbe) -> None:
        self._lost_timeout_s = lost_timeout_s
        self._probe = probe
        self._timeout_s = lost_timeout_s
        self._lost_since: dict[str, float] = {}  # times by worker name
        self._urls: dict[str, str] = {}  # URLs by the name of a worker of the fleet, as it registered last
        self._reporting: set[str] = set()  # names of the workers whose heartbeats a router gets

    def update(self, status: Mapping[str, Any], pools: Mapping[str, PoolWorkers], now: float) -> None:
        """Record which workers of the fleet the routers have lost."""
        managed = {name for pool in pools.values() for name in pool.managed}
        self._urls = {name: url for name, url in self._urls.items() if name in managed}
        # A router of an earlier release does not report URLs.
        self._urls |= {row["name"]: row["url"] for row in status["workers"] if row["name"] in managed and "url" in row}
        self._reporting = {row["name"] for row in status["workers"] if row["health"] != "lost"}
        lost = {name for pool in pools.values() for name in pool.lost}
        self._lost_since = {name: self._lost_since.get(name, now) for name in lost}
        are_all_lost = not self._reporting and len(lost) > 1
        self._timeout_s = MAX_LOST_TIMEOUT_S if are_all_lost else self._lost_timeout_s

    def forget_losses(self) -> None:
        """Start again to measure for how long workers are lost, because no router answers now."""
        self._lost_since.clear()

    async def find_hanging(self, pool: PoolWorkers, overdue: Iterable[str], now: float) -> list[str]:
        """Return the names of the workers of the pool to replace.

        `overdue`: workers that have taken too long to become ready. Overdue workers, and workers that have been lost
        for too long, are called if no router gets their heartbeats. A worker that answers is kept. Any other overdue
        worker is replaced. A lost worker is replaced only if the call gets no reaction (`ProbeResult.SILENT`)."""
        lost = [name for name in pool.lost if now - self._lost_since.get(name, now) > self._timeout_s]
        names = list(dict.fromkeys((*overdue, *lost)))
        results = await asyncio.gather(*map(self._probe_if_silent, names))
        hanging = []
        for name, result in zip(names, results, strict=True):
            if result is ProbeResult.ANSWERED:
                log.warning("Worker answers but sends no heartbeats to a router, keeping it: worker=%s", name)
                self._lost_since[name] = now
            elif name in overdue or result is ProbeResult.SILENT:
                hanging.append(name)
        return hanging

    async def _probe_if_silent(self, name: str) -> ProbeResult | None:
        """Probe a worker. Return None if its URL is not known, or if a router gets its heartbeats."""
        url = self._urls.get(name)
        return None if url is None or name in self._reporting else await self._probe(url)
