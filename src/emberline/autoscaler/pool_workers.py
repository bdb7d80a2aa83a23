"""PoolWorkers: the workers of one pool by state, from the router's status and the fleet's list of workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emberline.autoscaler.fleet import FleetWorker

StatusRow = Mapping[str, Any]  # of one worker in /cluster/status


@dataclass(slots=True)
class PoolWorkers:
    ready: list[StatusRow] = field(default_factory=list)
    starting: list[str] = field(default_factory=list)
    draining: list[StatusRow] = field(default_factory=list)
    managed: set[str] = field(default_factory=set)  # names of the workers that the fleet can stop, in any state
    stopping: set[str] = field(default_factory=set)  # names of managed workers that were told to end

    @property
    def serving_count(self) -> int:
        """The workers that serve requests now or soon."""
        return len(self.ready) + len(self.starting)

    def choose_removals(self, count: int) -> list[str]:
        """Return the names of managed workers to remove: those that start, then those with the fewest requests."""
        starting = [name for name in reversed(self.starting) if name in self.managed]
        by_requests = sorted(self.ready, key=lambda row: (row["open"], row["name"]))
        return [*starting, *(row["name"] for row in by_requests if row["name"] in self.managed)][:count]


def group_workers(
    status: Mapping[str, Any], fleet_workers: Iterable[FleetWorker], roles: Sequence[str]
) -> dict[str, PoolWorkers]:
    """Return the workers of each pool.

    A worker of the fleet that the router does not know, or counts as starting, is starting. Workers that the router has
    lost are in no list: a lost process may be dead or hang."""
    pools = {role: PoolWorkers() for role in roles}
    rows = {row["name"]: row for row in status["workers"]}
    for worker in fleet_workers:
        if (pool := pools.get(worker.role)) is None:
            continue
        pool.managed.add(worker.name)
        row = rows.get(worker.name)
        if worker.is_stopping:
            pool.stopping.add(worker.name)
        elif row is None or row["health"] == "lost":
            pool.starting.append(worker.name)
    for name, row in rows.items():
        if (pool := pools.get(row["role"])) is None or name in pool.stopping:
            continue
        match row["health"]:
            case "ready":
                pool.ready.append(row)
            case "starting":
                pool.starting.append(name)
            case "draining":
                pool.draining.append(row)
    return pools
