"""Autoscaler: observes the cluster, asks the policy how many workers each pool needs, and starts or removes workers.

A worker is drained before it is stopped: the router moves its streams to other workers. All state that matters is in
the cluster (which workers run, which are draining), so the autoscaler can be killed and started again at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from emberline.autoscaler.fleet import FleetError, WorkerFleet
from emberline.autoscaler.hang_detector import HangDetector, WorkerProbe
from emberline.autoscaler.metrics import AutoscalerMetrics
from emberline.autoscaler.observer import StatusObserver, count_open
from emberline.autoscaler.policy import PolicyState, ScalingDecision, decide_scaling
from emberline.autoscaler.pool_workers import PoolWorkers, StatusRow, group_workers
from emberline.autoscaler.router_client import RouterUnavailable
from emberline.autoscaler.router_group import ClusterRouters
from emberline.autoscaler.settings import MAX_POOL_WORKERS, AutoscalerSettings
from emberline.autoscaler.start_tracker import StartTracker
from emberline.autoscaler.worker_probe import probe_worker
from emberline.core.clock import Clock
from emberline.core.errors import EmberlineError, WrongClusterKey

log = logging.getLogger("emberline.autoscaler")

STUCK_TIMEOUT_S = 150.0  # a worker restarts its stuck engine itself after --stall-timeout, by default 120 s
MIN_ANNOUNCEMENT_S = 60.0  # time for which a router at least expects the models of an autoscaler that is gone


class Autoscaler:
    def __init__(
        self,
        settings: AutoscalerSettings,
        router: ClusterRouters,
        fleet: WorkerFleet,
        clock: Clock,
        models: Collection[str] = (),
        probe: WorkerProbe = probe_worker,
    ) -> None:
        """`models`: names of the pools' models. The models of workers that the fleet starts are added to them."""
        self._settings = settings
        self._models, self._embedders = set(models), set[str]()
        self._router = router
        self._fleet = fleet
        self._clock = clock
        self._observer = StatusObserver()
        self._state = PolicyState()
        self._starts = StartTracker(settings.start_seconds)
        self._hangs = HangDetector(settings.lost_timeout, probe)
        self._draining_since: dict[str, float] = {}
        self._stuck_since: dict[str, float] = {}
        self._logged_problem = ""
        self.metrics = AutoscalerMetrics()

    async def run(self, stop: asyncio.Event) -> None:
        """Make decisions until `stop` is set. When the router or the fleet fails, log the failure and continue."""
        while not stop.is_set():
            await self.step()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.interval):
                    await stop.wait()

    async def step(self) -> None:
        """Observe, decide_scaling and act once. If the router or the fleet does not answer, nothing is changed."""
        problems: list[str] = []
        try:
            status = await self._router.fetch_status()
            workers = await self._fleet.list_workers()
            await self._announce_models(status, {worker.name for worker in workers})
            pools = group_workers(status, workers, [pool.role for pool in self._settings.pools], self._models)
            now = self._clock.now()
            self._starts.update(pools, now)
            self._hangs.update(status, pools, now)
            names = {worker.name for worker in workers}
            self._draining_since = {name: since for name, since in self._draining_since.items() if name in names}
            stuck = {row["name"] for pool in pools.values() for row in pool.stuck}
            self._stuck_since = {name: since for name, since in self._stuck_since.items() if name in stuck}
            observations = self._observer.observe(status, pools, now, self._models)
            settings = replace(self._settings, start_seconds=max(self._starts.usual_start_s, 0.1))
            decision = decide_scaling(observations, self._state, now, settings)
            self._state = decision.state
            self.metrics.record_decision(decision, observations)
            self.metrics.failed_starts, self.metrics.usual_start_s = self._starts.failed_starts, settings.start_seconds
            for role in pools:
                try:
                    await self._scale_pool(role, pools, decision, now)
                except FleetError as e:  # other pools may need no new worker, or even free what this one lacks
                    problems.append(self._count_error(e))
            problems.append(self._describe_unreachable_slo(decision))
        except (RouterUnavailable, WrongClusterKey, FleetError) as e:
            problems.append(self._count_error(e))
            if not isinstance(e, FleetError):
                self._hangs.forget_losses()
        self.metrics.silent_routers = self._router.silent_count
        self._log_problem_once("; ".join(filter(None, problems)))

    def _count_error(self, error: EmberlineError) -> str:
        self.metrics.errors[error.code] += 1
        return str(error)

    async def _scale_pool(
        self, role: str, pools: Mapping[str, PoolWorkers], decision: ScalingDecision, now: float
    ) -> None:
        await self._stop_finished_workers(pools[role], self._settings.pool(role).sleep, now)
        await self._replace_hanging_workers(role, pools[role], now)
        await self._replace_stuck_workers(role, pools[role], now)
        await self._reconcile(role, pools, decision, now)

    async def _announce_models(self, status: Mapping[str, Any], managed: Collection[str]) -> None:
        """Announce to the router the models for which workers are started when needed, so that their requests wait."""
        for row in status["workers"]:
            if row["name"] in managed:
                # Workers of other pools may serve the same embedding model, so it does not identify a pool.
                embedders = set(row.get("embedders", ()))
                self._models |= set(row["models"]) - embedders
                self._embedders |= embedders
        if names := self._models | self._embedders:
            await self._router.announce_models(names, max(MIN_ANNOUNCEMENT_S, 6 * self._settings.interval))

    async def _reconcile(
        self, role: str, pools: Mapping[str, PoolWorkers], decision: ScalingDecision, now: float
    ) -> None:
        """Start or drain workers until the pool has the desired number of them.

        Workers that are stuck or shutting down serve no requests, but still count towards the pool's maximum."""
        pool = pools[role]
        limit = self._settings.pool(role).max_workers - len(pool.stuck) - len(pool.stopping)
        reason = decision.reasons[role]
        desired = min(decision.desired[role], max(limit, pool.serving_count))
        missing = desired - pool.serving_count
        if missing > 0:
            missing -= await self._undo_drains(pool, missing)
            missing = min(missing, self._count_affordable(role, pools))
        if missing > 0:
            missing -= await self._wake_workers(role, pool, missing, reason)
        if missing > 0 and self._starts.may_start(role, now):
            log.info("Starting workers: pool=%s count=%d desired=%d reason=%s", role, missing, desired, reason)
            await self._fleet.start_workers(role, missing)
            self._starts.record_order(role, missing, now)
            pool.num_ordered += missing
            self.metrics.record_change(role, "up", reason, missing)
        elif missing < 0 and (names := pool.choose_removals(-missing)):
            log.info("Draining workers: pool=%s workers=%s desired=%d", role, ",".join(names), desired)
            self._draining_since |= dict.fromkeys(names, now)
            await asyncio.gather(*map(self._drain, names))
            self.metrics.record_change(role, "down", reason, len(names))

    def _count_affordable(self, role: str, pools: Mapping[str, PoolWorkers]) -> int:
        """Return how many more workers of the pool the setting `max_gpus` allows.

        Workers that are draining, stuck or shutting down keep their GPUs until they have ended."""
        each, limit = self._settings.pool(role).gpus, self._settings.max_gpus
        if limit is None or not each:
            return MAX_POOL_WORKERS
        used = sum(pool.count_awake() * self._settings.pool(name).gpus for name, pool in pools.items())
        return max((limit - used) // each, 0)

    async def _drain(self, name: str) -> None:
        if not await self._router.drain(name):  # it has not registered yet, so it has no requests
            self._starts.forget(name)
            await self._fleet.stop_worker(name)

    async def _undo_drains(self, pool: PoolWorkers, count: int) -> int:
        """Let up to `count` draining workers serve again, which is faster than a start. Return how many do."""
        names = [row["name"] for row in pool.draining if row["name"] in pool.managed.keys() - pool.stopping]
        for name in names[:count]:
            log.info("Ending the drain of a worker: worker=%s", name)
            await self._router.drain(name, on=False)
            self._draining_since.pop(name, None)
        return min(len(names), count)

    async def _wake_workers(self, role: str, pool: PoolWorkers, count: int, reason: str) -> int:
        """Wake up to `count` sleeping workers, which is faster than a start. Return how many were woken."""
        names = [row["name"] for row in pool.asleep if row["name"] in pool.managed.keys() - pool.stopping][:count]
        for name in names:
            log.info("Waking a worker: worker=%s reason=%s", name, reason)
            await self._router.set_asleep(name, on=False)
        pool.num_ordered += len(names)
        self.metrics.record_change(role, "up", reason, len(names))
        return len(names)

    async def _put_to_sleep(self, name: str) -> bool:
        """Put a drained worker to sleep and end its drain, so that routers may wake it. Return whether it can sleep."""
        if not await self._router.set_asleep(name):
            log.warning("Worker cannot sleep, stopping it: worker=%s (hint: start workers with --can-sleep)", name)
            return False
        log.info("Putting a drained worker to sleep: worker=%s", name)
        await self._router.drain(name, on=False)
        self._draining_since.pop(name, None)
        return True

    async def _stop_finished_workers(self, pool: PoolWorkers, sleep: int, now: float) -> None:
        """Stop the draining workers that have no more requests, or that have drained for too long.

        Workers without requests are put to sleep instead, as long as fewer than `sleep` workers sleep."""
        too_many = [row["name"] for row in pool.asleep[sleep:] if row["name"] in pool.managed]
        await asyncio.gather(*map(self._drain, too_many))  # an earlier autoscaler kept more
        for row in list(pool.draining):
            if (name := row["name"]) not in pool.managed:
                continue
            drained_s = now - self._draining_since.setdefault(name, now)
            if _has_finished(row, drained_s) or drained_s > self._settings.drain_timeout:
                is_idle = drained_s <= self._settings.drain_timeout
                if is_idle and len(pool.asleep) < sleep and await self._put_to_sleep(name):
                    pool.draining.remove(row)
                    pool.asleep.append(row)
                    continue
                log.info("Stopping drained worker: worker=%s open=%d drained_s=%.1f", name, count_open(row), drained_s)
                await self._fleet.stop_worker(name)
                pool.stopping.add(name)

    async def _replace_hanging_workers(self, role: str, pool: PoolWorkers, now: float) -> None:
        """Replace workers that take too long to become ready, and lost workers that do not react to a call."""
        processes = [name for name in pool.starting if name in pool.managed and name not in pool.placeholders]
        overdue = [name for name in processes if self._starts.is_hanging(name, now)]
        hanging = await self._hangs.find_hanging(pool, overdue, now)
        for name in hanging:
            reason = "lost" if name in pool.lost else "start"
            log.warning("Replacing a worker that hangs: worker=%s reason=%s", name, reason)
            if not await self._fleet.replace_worker(name):
                pool.starting.remove(name)
                pool.stopping.add(name)  # it has its place and GPUs until it is gone
            self.metrics.record_replacement(role, reason)
        for name in {*hanging, *overdue}:  # one that answers gets as much time again
            self._starts.forget(name)

    async def _replace_stuck_workers(self, role: str, pool: PoolWorkers, now: float) -> None:
        """Replace the workers whose engines have been stuck for more than STUCK_TIMEOUT_S."""
        for row in list(pool.stuck):
            name = row["name"]
            if name in pool.managed and now - self._stuck_since.setdefault(name, now) > STUCK_TIMEOUT_S:
                log.warning("Replacing a worker whose engine is stuck: worker=%s", name)
                (pool.starting.append if await self._fleet.replace_worker(name) else pool.stopping.add)(name)
                self.metrics.record_replacement(role, "stuck")
                del self._stuck_since[name]
                pool.stuck.remove(row)

    def _describe_unreachable_slo(self, decision: ScalingDecision) -> str:
        roles = [role for role, pool in decision.state.pools.items() if pool.is_slo_unreachable]
        if not roles:
            return ""
        return (
            f"pool {' and '.join(roles)} misses the SLO {self._settings.slo} with at most one request per worker, so"
            " more workers do not help (hint: raise --slo, or use faster workers)"
        )

    def _log_problem_once(self, problem: str) -> None:
        """Log when a problem begins and when it ends, but not at each decision in between."""
        if problem == self._logged_problem:
            return
        if problem:
            log.warning("Autoscaler problem: reason=%s", problem)
        else:
            log.info("Autoscaler works again: decisions=%d", self.metrics.decisions)
        self._logged_problem = problem


def _has_finished(row: StatusRow, drained_s: float) -> bool:
    """Whether a draining worker has no requests, and no other worker still has to copy its KV blocks."""
    leases = (row["transfer"] or {}).get("leases", 0)
    return not count_open(row) and not leases and row["seconds_since_beat"] < drained_s
