"""PoolWorkers: the workers of one pool by state, from the router's status and the fleet's list of workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emberline.autoscaler.fleet import FleetWorker

StatusRow = Mapping[str, Any]  # the row of one worker in /cluster/status


@dataclass(slots=True)
class PoolWorkers:
    ready: list[StatusRow] = field(default_factory=list)
    starting: list[str] = field(default_factory=list)  # names, also those of lost workers
    lost: set[str] = field(default_factory=set)  # names of managed workers that a router knows, without heartbeats
    draining: list[StatusRow] = field(default_factory=list)
    stuck: list[StatusRow] = field(default_factory=list)  # workers that have requests, but whose engines make no step
    asleep: list[StatusRow] = field(default_factory=list)  # a request wakes them
    managed: dict[str, int] = field(default_factory=dict)  # removal rank of the workers that the fleet can stop
    placeholders: set[str] = field(default_factory=set)  # starting workers that have no name yet
    stopping: set[str] = field(default_factory=set)  # names of managed workers that were asked to end
    num_ordered: int = 0  # workers that were started or woken after the pool was observed

    @property
    def serving_count(self) -> int:
        """The number of workers that serve requests now, or will when they have started."""
        return len(self.ready) + len(self.starting)

    def count_awake(self) -> int:
        """Return how many workers have GPUs: all except those that sleep."""
        rows = (*self.ready, *self.draining, *self.stuck)
        return len({*self.starting, *self.stopping, *(row["name"] for row in rows)}) + self.num_ordered

    def choose_removals(self, count: int) -> list[str]:
        """Return the names of up to `count` managed workers to remove.

        Workers with the highest removal rank (in `managed`) come first. Of workers with equal ranks, those that are
        starting come first, then those with the fewest requests."""
        requests = dict.fromkeys(self.starting, -1) | {row["name"]: row["open"] for row in self.ready}
        names = sorted((name for name in requests if name in self.managed), reverse=True)
        return sorted(names, key=lambda name: (-self.managed[name], requests[name]))[:count]


def group_workers(
    status: Mapping[str, Any],
    fleet_workers: Sequence[FleetWorker],
    roles: Sequence[str],
    models: Collection[str] = (),
) -> dict[str, PoolWorkers]:
    """Return the workers of each pool.

    A worker of the fleet counts as starting if the router does not know it, or reports it as starting or as lost. Lost
    workers outside the fleet are in no list, because they may be dead.

    `models`: the models of the pools. Workers outside the fleet that serve none of these are left out. If `models` is
    empty, the models are not known, and no worker is left out."""
    pools = {role: PoolWorkers() for role in roles}
    managed = {worker.name for worker in fleet_workers}
    rows = {
        row["name"]: row
        for row in status["workers"]
        if not models or row["name"] in managed or not set(models).isdisjoint(row["models"])
    }
    for worker in fleet_workers:
        if (pool := pools.get(worker.role)) is None:
            continue
        pool.managed[worker.name] = worker.removal_rank
        if worker.is_placeholder:
            pool.placeholders.add(worker.name)
        row = rows.get(worker.name)
        if worker.is_stopping:
            pool.stopping.add(worker.name)
        elif row is None or row["health"] == "lost":
            pool.starting.append(worker.name)
            if row is not None and not _is_of_earlier_process(row, worker):
                pool.lost.add(worker.name)
    for name, row in rows.items():
        if (pool := pools.get(row["role"])) is None or name in pool.stopping:
            continue
        match row["health"]:
            case "ready":
                # The router still reports a worker as asleep after a request woke it, until its next heartbeat.
                (pool.asleep if row.get("asleep") and not row["open"] else pool.ready).append(row)
            case "starting":
                pool.starting.append(name)
            case "draining":
                pool.draining.append(row)
            case "stuck":
                pool.stuck.append(row)
    return pools


def _is_of_earlier_process(row: StatusRow, worker: FleetWorker) -> bool:
    """Whether the fleet's process has started after the last heartbeat in the row.

    Then the heartbeat came from an earlier process of the same name: a StatefulSet gives a new pod the name of the one
    that it replaces, and a restarted container keeps the name of its pod."""
    return worker.age_s is not None and worker.age_s < row["seconds_since_beat"]
