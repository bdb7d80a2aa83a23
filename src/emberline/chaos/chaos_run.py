"""ChaosRun: injects faults, several at a time, into a cluster that serves requests.

The faults never make all workers unavailable at the same time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import islice

from emberline.chaos.chaos_cluster import RESTART_TIMEOUT_S, SERVED_MODEL_NAME, ChaosCluster
from emberline.chaos.chaos_process import ChaosProcess
from emberline.chaos.chaos_report import ChaosReport
from emberline.chaos.client import ChaosClient, RequestOutcome, Verdict
from emberline.chaos.fault_scheduler import FaultScheduler, ScheduledFault, draw_faults
from emberline.chaos.fault_table import FAULTS
from emberline.chaos.faults import Fault, FaultContext
from emberline.chaos.reference_case import ReferenceCase, ReferenceCases
from emberline.chaos.request_progress import RequestProgress, RequestStage
from emberline.core.errors import EmberlineError
from emberline.router.policy import rendezvous_hash

BACKGROUND_CLIENTS = 2
# Seconds between two requests of a background client, or the duration of its last request, if that is longer: restarts
# need CPU time too.
REQUEST_PAUSE_S = 0.2
CONCURRENT_FAULTS = 3
POLL_INTERVAL_S = 0.2
FAULTS_PER_LEAK_CHECK = 40
FIRST_CASES = 6
MAX_STAGE_ATTEMPTS = 4  # requests sent until one reaches the stage of a fault
MAX_MISSED_FAULTS = 100


@dataclass(slots=True)
class ChaosRun:
    cluster: ChaosCluster
    cases: ReferenceCases
    rng: random.Random
    report_line: Callable[[str], None]
    report: ChaosReport
    fault_names: Collection[str] = ()  # kinds of faults to inject; empty: all
    _clients_may_send: asyncio.Event = field(default_factory=asyncio.Event)
    _schedule_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _last_fault: tuple[str, str] = ("nothing", "")
    _moves_seen: int = 0  # as of the last fault

    async def run(self, fault_count: int) -> None:
        cluster = self.cluster
        if missing := await cluster.wait_until_healthy():
            raise EmberlineError(
                f"the cluster did not become healthy after its start: {missing}",
                hint=f"see the log files in {cluster.directory}",
            )
        await self._prepare_cluster_and_cases()
        self._clients_may_send.set()
        background = [asyncio.create_task(self._run_background_client()) for _ in range(BACKGROUND_CLIENTS)]
        try:
            await self._inject_faults(fault_count)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    async def _inject_faults(self, fault_count: int) -> None:
        scheduler = FaultScheduler(self.cluster.workers, self.rng)
        kinds = [fault for fault in FAULTS if fault.is_possible(self.cluster)]
        if self.fault_names:
            kinds = [fault for fault in kinds if fault.name in self.fault_names]
        faults = draw_faults(kinds, self.rng)
        while fault_count and not self.report.unrecovered:
            next_faults = islice(faults, min(FAULTS_PER_LEAK_CHECK, fault_count))
            # Other faults run during the restarts.
            scheduler.pending = sorted(next_faults, key=lambda item: not item[0].needs_restart)
            fault_count -= len(scheduler.pending)
            async with asyncio.TaskGroup() as injectors:
                for _ in range(CONCURRENT_FAULTS):
                    injectors.create_task(self._inject_scheduled_faults(scheduler))
            await self._check_leaks()
            self.report_line(self.report.format_summary())

    async def _inject_scheduled_faults(self, scheduler: FaultScheduler) -> None:
        while (scheduled := await self._next_fault(scheduler)) is not None:
            try:
                was_hit = await self._run_scheduled_fault(scheduled)
            finally:
                scheduler.finish_fault(scheduled)
            if not was_hit:
                stages = scheduled.fault.stages
                # Try another stage.
                scheduler.pending.insert(0, (scheduled.fault, stages[stages.index(scheduled.stage) - 1]))
                if self.report.missed_faults > MAX_MISSED_FAULTS:
                    self.report.record_failed_recovery(
                        f"requests did not reach the stage of {MAX_MISSED_FAULTS} faults"
                    )
                    scheduler.pending.clear()

    async def _next_fault(self, scheduler: FaultScheduler) -> ScheduledFault | None:
        """Return the next fault to inject, or None if none is left or the cluster has not recovered in time."""
        now = asyncio.get_running_loop().time
        end = now() + RESTART_TIMEOUT_S
        while scheduler.pending:
            async with self._schedule_lock:
                active = {*scheduler.active_claims}
                unavailable = await self.cluster.find_unavailable_processes(active)
                unchecked = active - scheduler.active_claims.keys()  # their faults ended during the check
                if (scheduled := scheduler.next_fault({*unavailable, *unchecked})) is not None:
                    return scheduled
                await asyncio.sleep(POLL_INTERVAL_S)
            if scheduler.active_claims:
                end = now() + RESTART_TIMEOUT_S
            elif now() > end:
                self.report.record_failed_recovery(f"after {self._last_fault[0]}, {self._last_fault[1]}: {unavailable}")
                scheduler.pending.clear()
        return None

    async def _prepare_cluster_and_cases(self) -> None:
        pool = self.cluster.pool
        async with asyncio.timeout(120):
            while not await self.cluster.is_ready(self.cluster.reference):
                await asyncio.sleep(0.2)
        await self.cases.measure_token_length(pool)
        for i in range(FIRST_CASES):
            await self.cases.create_case(pool, is_long=i % 2 == 0, is_stream=i % 3 != 0)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _run_background_client(self) -> None:
        """Send requests one after another until cancelled, also when requests fail."""
        while True:
            await self._clients_may_send.wait()
            progress = self.cluster.observer.track_request()
            case = self.cases.pick_case()
            outcome = await self._new_client().run(case, progress)
            self._record_background_outcome(outcome)
            pause = 1.0 if outcome.verdict in (Verdict.ERROR, Verdict.CUT) else REQUEST_PAUSE_S
            await asyncio.sleep(max(pause, outcome.duration_s))

    def _record_background_outcome(self, outcome: RequestOutcome) -> None:
        self.report.record_background_request(
            outcome, self._last_fault[0], is_error_expected=self.cluster.was_router_degraded_since(outcome.started_at)
        )

    def _new_client(self) -> ChaosClient:
        cluster = self.cluster
        return ChaosClient(
            cluster.pool,
            cluster.client_url,
            cluster.observer,
            cluster.settings.deadline,
            reconnects=cluster.has_several_routers,
        )

    async def _pick_case(self, fault: Fault, stage: RequestStage) -> ReferenceCase:
        def is_case_suitable(case: ReferenceCase) -> bool:
            return (case.is_stream or stage < RequestStage.FIRST) and (case.has_long_prompt or not fault.reuses_prompt)

        known_cases = [case for case in self.cases.cases if is_case_suitable(case)]
        is_new = stage in (RequestStage.PREFILL, RequestStage.TRANSFER) or self.rng.random() < 0.5
        if known_cases and (fault.reuses_prompt or not is_new):
            return self.rng.choice(known_cases)
        is_stream, is_long = stage >= RequestStage.FIRST or self.rng.random() < 0.7, is_new or self.rng.random() < 0.5
        return await self.cases.create_case(self.cluster.pool, is_long=is_long, is_stream=is_stream)

    # -- faults --------------------------------------------------------------------------------------------------------

    async def _run_scheduled_fault(self, scheduled_fault: ScheduledFault) -> bool:
        """Inject a fault when a request reaches the fault's stage. Return False if no request reached that stage."""
        for _ in range(MAX_STAGE_ATTEMPTS):
            if await self._inject_fault_into_request(
                scheduled_fault.fault, scheduled_fault.stage, scheduled_fault.answering_worker
            ):
                return True
        self.report.missed_faults += 1
        return False

    async def _inject_fault_into_request(
        self, fault: Fault, stage: RequestStage, answering_worker: ChaosProcess
    ) -> bool:
        cluster, progress = self.cluster, self.cluster.observer.track_request()
        case = await self._pick_case(fault, stage)
        request = self._new_client().run(case, progress, _find_session_preferring(answering_worker, cluster, self.rng))
        context = FaultContext(cluster, progress, self.rng, answering_worker)
        # Find the pids before the fault.
        await asyncio.to_thread(lambda: [process.engine_pid for process in cluster.workers])
        before = await cluster.count_detected_faults(fault.counter_label) if fault.counter_label else Counter[str]()
        if fault.starts_before_request:
            self._last_fault = fault.name, (stage_hit := str(stage))
            async with fault.inject(context):
                outcome = await request
        else:
            started_at, task = asyncio.get_running_loop().time(), asyncio.create_task(request)
            if not await self._wait_for_stage(task, progress, stage) or context.decode_worker is not answering_worker:
                self._record_background_outcome(await task)
                return False
            self._last_fault = fault.name, (stage_hit := str(progress.stage))
            async with fault.inject(context):
                if fault.disconnects_client:
                    task.cancel()
                await asyncio.gather(
                    asyncio.wait((task,), timeout=fault.max_duration_s), asyncio.sleep(fault.min_duration_s)
                )
            outcome = await (_wait_for_outcome(task, started_at) if fault.disconnects_client else task)
        detected = (
            await cluster.count_detected_faults(fault.counter_label) - before if fault.counter_label else before
        ).total()
        await self._record_fault(fault, stage_hit, outcome, detected)
        return True

    async def _record_fault(self, fault: Fault, stage_name: str, outcome: RequestOutcome, detection_count: int) -> None:
        moves = await self._count_migrations_and_retries()
        moved, self._moves_seen = max(0, moves - self._moves_seen), moves
        excused = self.cluster.was_router_degraded_since(outcome.started_at)
        self.report.record_fault(
            fault.name,
            stage_name,
            outcome,
            migration_count=moved,
            detection_count=detection_count,
            is_error_expected=excused,
        )
        if outcome.verdict not in (Verdict.ANSWERED, Verdict.LEFT):
            self.report_line(
                f"{fault.name}, {stage_name}: {outcome.verdict} after {outcome.duration_s:.1f} s, {outcome.detail}"
            )

    async def _wait_for_stage(
        self, task: asyncio.Task[RequestOutcome], progress: RequestProgress, stage: RequestStage
    ) -> bool:
        """Wait until the request reaches the stage, and return True. Return False if the request ends before that."""
        reached = asyncio.create_task(progress.wait_for_stage(stage))
        await asyncio.wait((task, reached), return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        if stage is RequestStage.QUEUED:
            await asyncio.sleep(self.rng.choice((0.0, 0.001, 0.005)))
        elif stage is RequestStage.DECODE:
            await asyncio.sleep(self.rng.uniform(0.0, 0.05))
        return not task.done() and progress.stage is not RequestStage.ENDED

    async def _count_migrations_and_retries(self) -> int:
        """Return how many times the router retried a request or continued a stream at a different worker."""
        total = 0
        for router in self.cluster.routers:
            status = await self.cluster.fetch_json(f"{router.url}/cluster/status", timeout_s=1.0)
            if status is not None:
                total += sum(row["count"] for row in status["migrations"] if row["outcome"] == "went on")
                total += sum(status["retries"].values())
        return total

    async def _check_leaks(self) -> None:
        """Check that the cluster holds no requests, leases or blocks once no client sends requests.

        Before that, requests must run until all workers are healthy, because a circuit breaker closes only after a
        successful request."""
        if missing := await self.cluster.wait_until_healthy():
            self.report.record_failed_recovery(missing)
        self._clients_may_send.clear()
        self.report.leak_check_count += 1
        if held_resources := await self.cluster.wait_until_idle():
            self.report.record_leak(*self._last_fault, held_resources)
        self._clients_may_send.set()


async def _wait_for_outcome(task: asyncio.Task[RequestOutcome], started_at: float) -> RequestOutcome:
    """Wait until the request ends, and return its outcome.

    The outcome is LEFT if the fault disconnected the client before the end of the reply."""
    await asyncio.wait((task,))
    if not task.cancelled():
        return task.result()
    return RequestOutcome(Verdict.LEFT, "", started_at, asyncio.get_running_loop().time() - started_at)


def _find_session_preferring(answering_worker: ChaosProcess, cluster: ChaosCluster, rng: random.Random) -> str:
    """Return a random session id that the router's session affinity assigns to `answering_worker`."""
    names = [worker.name for worker in cluster.workers_with_role("decode")]
    while True:
        session = f"{rng.getrandbits(48):x}"
        if max(names, key=lambda name: rendezvous_hash(session, name)) == answering_worker.name:
            return session


async def run_chaos(
    cluster: ChaosCluster,
    report: ChaosReport,
    fault_count: int,
    seed: int,
    print_line: Callable[[str], None],
    fault_names: Collection[str] = (),
) -> None:
    rng = random.Random(seed)
    try:
        await cluster.start()
        await ChaosRun(
            cluster,
            ReferenceCases(cluster.reference.url, SERVED_MODEL_NAME, rng),
            rng,
            print_line,
            report,
            fault_names,
        ).run(fault_count)
    finally:
        await cluster.stop()
