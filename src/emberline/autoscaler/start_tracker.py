"""StartTracker: measures how long workers take to become ready, and delays further starts after starts have failed.

If a worker that was ready before becomes ready again, this is not a start: the router was restarted, or had lost the
worker. A start that was under way when the tracker was created is not measured, because its beginning is not known."""

from __future__ import annotations

from collections.abc import Mapping

from emberline.autoscaler.pool_workers import PoolWorkers, StatusRow

MAX_BACKOFF_S = 60.0
MIN_TIMEOUT_S = 600.0  # a worker that is not ready after it, or after ten times the usual time, hangs
LAST_START_WEIGHT = 0.3  # weight of the last measured start, against all earlier ones, in the usual time of a start


class StartTracker:
    def __init__(self, expected_start_s: float) -> None:
        self.usual_start_s = expected_start_s
        self.failed_starts = 0  # workers that ended before they were ready
        self._since: dict[str, float] = {}  # start times by the name of a worker that is not ready yet
        self._ready: dict[str, str] = {}  # incarnations by the name of a worker that has been ready
        # Workers whose starts began at an unknown time; None: there was no update yet.
        self._unmeasured: set[str] | None = None
        # Names of starting workers by role, and whether each is a placeholder.
        self._starting: dict[str, dict[str, bool]] = {}
        self._failures_in_a_row: dict[str, int] = {}  # failed starts since the last success, by role
        self._start_again_at: dict[str, float] = {}  # earliest time of the next start, by role
        self._orders: dict[str, tuple[float, int]] = {}  # time and number of workers ordered since the update, by role
        self._managed: dict[str, frozenset[str]] = {}  # names of the fleet's workers at the last update, by role

    def update(self, pools: Mapping[str, PoolWorkers], now: float) -> None:
        """Record which workers are starting now, and which earlier starts have succeeded or failed."""
        for role, pool in pools.items():
            ordered_at, num_ordered = self._orders.pop(role, (now, 0))
            new = pool.managed.keys() - self._managed.get(role, frozenset())
            for row in pool.ready:
                began_at = ordered_at if num_ordered and row["name"] in new else None
                self._record_ready_worker(role, row, began_at, now)
            # Workers that were ordered and are not in the fleet's list have ended already.
            self._record_starting_workers(role, pool, ordered_at, max(num_ordered - len(new), 0), now)
            self._managed[role] = frozenset(pool.managed)
        known = {name for pool in pools.values() for name in (*pool.starting, *pool.managed)}
        self._unmeasured = set(self._since) & (known if self._unmeasured is None else self._unmeasured)
        self._since = {name: since for name, since in self._since.items() if name in known}
        self._ready = {name: incarnation for name, incarnation in self._ready.items() if name in known}

    def _record_ready_worker(self, role: str, row: StatusRow, began_at: float | None, now: float) -> None:
        """Record a ready worker.

        `began_at`: the time at which the worker was ordered (see `record_order`), if it was ordered after the last
        update; otherwise None."""
        name, incarnation = row["name"], row["incarnation"]
        if (since := self._since.pop(name, began_at)) is not None:
            self._failures_in_a_row[role] = 0
            if self._ready.get(name) != incarnation and name not in (self._unmeasured or ()):
                self.usual_start_s += LAST_START_WEIGHT * (now - since - self.usual_start_s)
        self._ready[name] = incarnation

    def _record_starting_workers(
        self, role: str, pool: PoolWorkers, started_at: float, num_ended: int, now: float
    ) -> None:
        """Record the workers that are starting, and the starts that have failed.

        `started_at`: the time when new workers were ordered. `num_ended`: the number of ordered workers that have
        ended before the fleet listed them."""
        before = self._starting.get(role, {})
        gone = before.keys() - {*pool.starting, *pool.managed}
        # A placeholder that is gone has become a worker with a name. Its start began when the placeholder was seen.
        ordered_at = sorted(self._since.pop(name) for name in gone if before[name] and name in self._since)
        for name in pool.starting:
            if name not in self._since:
                is_successor = ordered_at and name not in pool.placeholders
                self._since[name] = ordered_at.pop(0) if is_successor else started_at
        self._starting[role] = {name: name in pool.placeholders for name in pool.starting}
        failed = [name for name in gone & self._since.keys() if name not in self._ready]
        if num_failed := len(failed) + num_ended:
            self._record_failures(role, num_failed, now)

    def record_order(self, role: str, count: int, now: float) -> None:
        """Record that `count` workers of a pool were ordered: the fleet was asked to start them now.

        Their names are known only with the fleet's next list of workers."""
        self._orders[role] = now, count

    def may_start(self, role: str, now: float) -> bool:
        return now >= self._start_again_at.get(role, now)

    def forget(self, name: str) -> None:
        """Forget a worker that is stopped on purpose while it starts."""
        self._since.pop(name, None)

    def is_hanging(self, name: str, now: float) -> bool:
        return now - self._since.get(name, now) > max(MIN_TIMEOUT_S, 10 * self.usual_start_s)

    def _record_failures(self, role: str, count: int, now: float) -> None:
        """Record `count` starts that failed together, and delay further starts of the pool.

        The delay grows only as much as after one failed start: starts that fail together have the same cause."""
        self.failed_starts += count
        failures = self._failures_in_a_row[role] = self._failures_in_a_row.get(role, 0) + 1
        self._start_again_at[role] = now + min(2.0 ** (failures - 1), MAX_BACKOFF_S)
