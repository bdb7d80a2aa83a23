"""WorkerRegistry: the workers registered with the router, their health, and the open attempts at each worker."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from emberline.cluster.address import is_url_of_listener
from emberline.cluster.membership import ClusterMember, HealthTimeouts, Membership, WorkerHealth
from emberline.cluster.registration import Heartbeat, WorkerRegistration
from emberline.core.breaker import CircuitBreaker
from emberline.core.clock import Clock
from emberline.core.config import RouterConfig
from emberline.core.errors import EngineUnavailable, InvalidRequest, NotFound, Superseded
from emberline.core.numerics import Numerics, can_exchange_blocks, describe_difference
from emberline.router.destination import endpoint_of_url
from emberline.router.http.expected_models import ExpectedModels
from emberline.router.http.router_metrics import RouterMetrics
from emberline.router.http.shared_routing import SharedRouting
from emberline.router.http.worker_attempt import WorkerAttempt
from emberline.router.kvindex import KVIndex
from emberline.router.prefixmap import PrefixMap
from emberline.router.token_estimator import TokenEstimator
from emberline.router.worker import Worker

log = logging.getLogger("emberline.router")

TICK_INTERVAL_S = 0.25
PAUSE_THRESHOLD_S = 2 * TICK_INTERVAL_S  # a longer gap between ticks means that the router itself was paused


class WorkerRegistry:
    """The base class of Dispatcher, with the state that registrations and heartbeats change."""

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self.membership = Membership(HealthTimeouts(config.lost_after, config.stuck_after))
        self.workers: dict[str, Worker] = {}  # by name
        self.sleeping_worker_ids: set[str] = set()
        self.expected_models = ExpectedModels(clock.now())
        self.estimators: defaultdict[str, TokenEstimator] = defaultdict(TokenEstimator)  # by model
        self.kv_index = KVIndex(config.kv_blocks, config.prefixes) if config.kv_events else None
        self.metrics = RouterMetrics()
        self.prefixes = PrefixMap(config.prefixes)
        self.shared_routing = SharedRouting(self.prefixes)
        self._open_attempts: dict[str, dict[int, WorkerAttempt]] = {}  # by worker id, then by attempt id
        # Replaced workers with open attempts: by id, the seconds of silence allowed.
        self._retired_worker_timeouts: dict[str, float] = {}
        self._last_run_at = clock.now()

    def register(self, registration: WorkerRegistration) -> None:
        """Add or update a worker.

        Raises InvalidRequest if the worker's URL leads to this router, and Superseded if a live worker has the same
        name."""
        now = self._extend_deadlines_after_pause()
        if is_url_of_listener(registration.url, self._config.host, self._config.port):
            raise InvalidRequest(
                f"worker {registration.name!r} registered the URL of this router, {registration.url}",
                hint="start the worker with another --port",
            )
        self.expected_models.record_registration(registration.models)
        previous = self.membership.get(registration.name)
        if previous is not None and self._is_name_taken(previous, registration, now):
            raise Superseded(
                f"another worker named {registration.name!r} is alive at {previous.registration.url}",
                hint="start this worker with another --worker-name",
            )
        if not self.membership.register(registration, now):
            raise Superseded(
                f"a newer process has registered under the worker name {registration.name!r}",
                hint="start this worker with another --worker-name",
            )
        if previous is not None and previous.registration.incarnation == registration.incarnation:
            # Its engine may have been restarted.
            self.workers[registration.name].engine_ids = _engine_ids_by_model(registration)
            self.workers[registration.name].numerics = _numerics_by_model(registration)
            return
        if previous is not None:
            log.info("Worker replaced by another process: worker=%s", registration.name)
            self._stop_sending_requests_to(
                self.workers[registration.name], is_lost=self.membership.health(previous, now) is WorkerHealth.LOST
            )
        max_running = max(1, sum(model.max_running for model in registration.models))
        breaker = CircuitBreaker(self._config.breaker_failures, self._config.breaker_pause)
        self.workers[registration.name] = Worker(
            id=f"{registration.name}/{registration.incarnation}",
            name=registration.name,
            models=frozenset(model.name for model in registration.models),
            max_running=max_running,
            max_requests=max_running + int(max_running * self._config.queue),
            breaker=breaker,
            dialect=registration.dialect,
            endpoint=endpoint_of_url(registration.url),
            role=registration.role,
            engine_ids=_engine_ids_by_model(registration),
            kv_capacity_tokens=_kv_capacity_tokens(registration),
            numerics=_numerics_by_model(registration),
        )
        # A process may register again after it was replaced.
        self._retired_worker_timeouts.pop(self.workers[registration.name].id, None)
        log.info(
            "Worker registered: worker=%s url=%s models=%s",
            registration.name,
            registration.url,
            ",".join(model.name for model in registration.models),
        )
        self._warn_of_different_numerics(self.workers[registration.name])

    def _is_name_taken(self, current_member: ClusterMember, registration: WorkerRegistration, now: float) -> bool:
        """Whether a different live process owns the worker name of `registration`.

        A process that registered the same URL does not count: it must have ended, because only one process can listen
        at a URL. A process that sends no heartbeats, is shutting down, or has failed since its last heartbeat does not
        count as live."""
        if (
            current_member.registration.incarnation == registration.incarnation
            or current_member.registration.url == registration.url
            or current_member.is_leaving
        ):
            return False
        return (
            self.membership.health(current_member, now) is not WorkerHealth.LOST
            and not self.workers[registration.name].failed_since_heartbeat
        )

    def _warn_of_different_numerics(self, worker: Worker) -> None:
        """Warn that streams cannot move between this worker and others, because they compute a model differently.

        The warning is logged once for each registration and model."""
        for model in worker.models:
            for other in self.workers.values():
                if other is worker or model not in other.models or "native" not in (worker.dialect, other.dialect):
                    continue
                ours, theirs = worker.numerics.get(model), other.numerics.get(model)
                if difference := describe_difference(ours, theirs):
                    what = "started streams" if can_exchange_blocks(ours, theirs) else "streams or KV blocks"
                    log.warning(
                        "Workers compute a model differently, no %s move between them:"
                        " model=%s worker=%s other=%s difference=%s",
                        what,
                        model,
                        worker.name,
                        other.name,
                        difference,
                    )
                    break

    def record_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Update a worker from its heartbeat.

        Raises Superseded if a newer process has the worker's name, and NotFound if the worker is not registered."""
        if self.membership.is_replaced(heartbeat.incarnation):
            raise Superseded(
                f"a newer process has registered under the worker name {heartbeat.name!r}",
                hint="start this worker with another --worker-name",
            )
        if not self.membership.record_heartbeat(heartbeat, self._extend_deadlines_after_pause()):
            raise NotFound(
                f"no worker {heartbeat.name[:200]!r} with incarnation {heartbeat.incarnation[:200]!r} is registered",
                hint="register again",
            )
        worker = self.workers[heartbeat.name]
        worker.failed_since_heartbeat, worker.paired_engine_ids = False, frozenset(heartbeat.paired)
        worker.record_heartbeat_counters(heartbeat.prompt_tokens, heartbeat.busy_seconds, heartbeat.kv_usage)
        (self.sleeping_worker_ids.add if heartbeat.asleep else self.sleeping_worker_ids.discard)(worker.id)
        self.shared_routing.record_reports(worker, heartbeat)
        self._update_readiness(worker)

    def peers_by_model(self, worker_name: str) -> dict[str, list[dict[str, Any]]]:
        """Return the addresses of the engines from which this worker may fetch KV blocks, by model.

        These are the engines of prefill workers and of draining workers."""
        member = self.membership.get(worker_name)
        assert member is not None
        peers: dict[str, list[dict[str, Any]]] = {}
        if member.registration.role != "prefill":
            models = {model.name for model in member.registration.models}
            for other in self._workers_offering_blocks(member.registration):
                for model in other.registration.models:
                    if model.name not in models or model.peer is None:
                        continue
                    if other.is_leaving and model.peer.get("incarnation") not in member.heartbeat.paired:
                        continue  # only already paired workers still fetch from a worker that shuts down
                    peers.setdefault(model.name, []).append(model.peer)
        return peers

    def _workers_offering_blocks(self, receiver: WorkerRegistration) -> Iterator[ClusterMember]:
        now = self._clock.now()
        for member in self.membership:
            registration, is_lost = member.registration, self.membership.health(member, now) is WorkerHealth.LOST
            # A draining worker's streams move to other workers together with their blocks.
            offers_blocks = registration.role == "prefill" or member.is_draining
            if (
                offers_blocks
                and registration.dialect == receiver.dialect
                and registration.name != receiver.name
                and not is_lost
            ):
                yield member

    def mark_leaving(self, name: str, incarnation: str) -> None:
        if self.membership.mark_leaving(name, incarnation):
            log.info("Worker shutting down: worker=%s", name)
            self.workers[name].is_leaving = True
            self._update_readiness(self.workers[name])

    def set_draining(self, name: str, is_draining: bool, move_streams: bool = False) -> None:
        """Start or end the draining of a worker, which then gets no new requests. Raises NotFound for an unknown name.

        With `move_streams`, each open stream of the worker moves at once to a worker that can continue it, if there is
        one."""
        if not self.membership.set_draining(name, is_draining):
            known = ", ".join(self.workers) or "none"
            raise NotFound(f"no worker is named {name[:200]!r}", hint=f"registered workers: {known}")
        log.info("Worker draining: worker=%s" if is_draining else "Worker accepts requests again: worker=%s", name)
        self._update_readiness(self.workers[name])
        if is_draining and move_streams:
            for attempt in list(self._open_attempts.get(self.workers[name].id, {}).values()):
                if attempt.is_movable and self._can_other_worker_take_over(attempt):
                    attempt.abort("drained")

    def are_streams_ready_to_move_from(self, worker_name: str) -> bool:
        """Whether every worker that could take over this worker's streams can already fetch its KV blocks."""
        if (worker := self.workers.get(worker_name)) is None:
            return True
        models = {
            attempt.summary.model for attempt in self._open_attempts.get(worker.id, {}).values() if attempt.is_movable
        }
        return all(
            other.can_fetch_blocks_from(worker, model)
            for model in models & worker.engine_ids.keys()
            for other in self.workers.values()
            if other.is_ready
            and other.role != "prefill"
            and other.engine_ids.get(model)
            and self._can_stream_move_between(worker, other, model)
        )

    def _can_stream_move_between(self, source: Worker, destination: Worker, model: str) -> bool:
        return source.dialect == destination.dialect == "native" and source.numerics.get(
            model
        ) == destination.numerics.get(model)

    def ids_of_workers_unable_to_continue(self, model: str, origin_worker: Worker) -> set[str]:
        """Return the ids of the workers that cannot continue a stream of `origin_worker`.

        These are vLLM and SGLang servers, and workers with different numerics (dtype, weight format etc.)."""
        numerics = origin_worker.numerics.get(model)
        return {w.id for w in self.workers.values() if w.dialect != "native" or w.numerics.get(model) != numerics}

    def _can_other_worker_take_over(self, attempt: WorkerAttempt) -> bool:
        """Whether a different worker could take over this attempt.

        It continues the attempt's stream, or starts again if there is no output yet."""
        model, now = attempt.summary.model, self._clock.now()
        excluded = (
            self.ids_of_workers_unable_to_continue(model, attempt.decision.worker)
            if attempt.first_byte_at is not None
            else ()
        )
        return any(
            worker.accepts_requests_for(model, now) and worker.id not in excluded for worker in self.workers.values()
        )

    def health(self, worker: Worker) -> WorkerHealth:
        member = self.membership.get(worker.name)
        assert member is not None
        return self.membership.health(member, self._clock.now())

    def worker_url(self, worker: Worker) -> str:
        """Return the worker's URL. Raises EngineUnavailable if a newer process has taken the worker's name."""
        member = self.membership.get(worker.name)
        if member is None or f"{worker.name}/{member.registration.incarnation}" != worker.id:
            raise EngineUnavailable(f"worker {worker.name} was replaced by another process", hint="retry the request")
        return member.registration.url.rstrip("/")

    def check_workers(self) -> None:
        """Update the health of all workers, abort the attempts at lost or stuck workers, and remove expired workers."""
        now = self._extend_deadlines_after_pause()
        for worker in self.workers.values():
            self._update_readiness(worker)
        for name in self.membership.remove_expired_workers(now):
            log.info("Worker removed: worker=%s", name)
            self._stop_sending_requests_to(self.workers.pop(name), is_lost=True)
            self._remove_worker_statistics(name)
        for worker_id in [
            worker_id for worker_id in self._retired_worker_timeouts if worker_id not in self._open_attempts
        ]:
            del self._retired_worker_timeouts[worker_id]
        for worker_id, timeout_s in self._retired_worker_timeouts.items():
            for attempt in self._open_attempts[worker_id].values():
                if now - attempt.last_activity_at > timeout_s:
                    attempt.abort(WorkerHealth.STUCK.value)

    def _extend_deadlines_after_pause(self) -> float:
        """Extend the workers' deadlines if the router itself was paused, and return the current time.

        While the router does not run (stopped, without CPU time, machine suspended), it receives no heartbeats. The
        deadlines therefore move by the length of the pause minus `TICK_INTERVAL_S`. Without that subtraction, a dead
        worker would never be detected if the router is paused again and again."""
        now = self._clock.now()
        paused_s, self._last_run_at = now - self._last_run_at, now
        if paused_s > PAUSE_THRESHOLD_S:
            log.log(logging.WARNING if paused_s > 1.0 else logging.DEBUG, "Router was paused: seconds=%.1f", paused_s)
            self.membership.extend_deadlines(paused_s - TICK_INTERVAL_S, now)
            for attempt in (attempt for attempts in self._open_attempts.values() for attempt in attempts.values()):
                attempt.last_activity_at = min(attempt.last_activity_at + paused_s - TICK_INTERVAL_S, now)
        return now

    def _remove_worker_statistics(self, name: str) -> None:
        """Remove the metrics and estimates that are kept for a removed worker and for its models."""
        self.metrics.merge_removed_worker(name)
        for model in self.estimators.keys() - {model for worker in self.workers.values() for model in worker.models}:
            del self.estimators[model]

    def _update_readiness(self, worker: Worker) -> None:
        health = self.health(worker)
        ready = health is WorkerHealth.READY
        if ready != worker.is_ready:
            level = logging.INFO if ready else logging.WARNING
            log.log(level, "Worker health changed: worker=%s health=%s", worker.name, health.value)
        worker.is_ready = ready
        if health in (WorkerHealth.LOST, WorkerHealth.STUCK):
            self._abort_attempts(worker, health)

    def _abort_attempts(self, worker: Worker, health: WorkerHealth) -> None:
        """Abort the open attempts at a lost or stuck worker.

        Streams of a lost worker that still deliver output are kept, because heartbeats can be late on a busy
        machine."""
        active_since = self._clock.now() - self._config.lost_after
        for attempt in self._open_attempts.get(worker.id, {}).values():
            is_active = attempt.first_byte_at is not None and attempt.last_activity_at >= active_since
            if health is WorkerHealth.STUCK or not is_active:
                attempt.abort(health.value)

    def _stop_sending_requests_to(self, worker: Worker, *, is_lost: bool) -> None:
        """Stop sending new requests to a worker that was replaced or removed.

        Unless the worker is lost, its open attempts may finish, as in a rolling restart."""
        worker.is_ready = False
        self.sleeping_worker_ids.discard(worker.id)
        self.shared_routing.remove_worker(worker.id)
        if self.kv_index is not None:
            self.kv_index.remove_worker(worker.id)
        self._retired_worker_timeouts[worker.id] = self._config.lost_after if is_lost else self._config.stuck_after
        if is_lost:
            self._abort_attempts(worker, WorkerHealth.LOST)


def _kv_capacity_tokens(registration: WorkerRegistration) -> int:
    """Return the size of the worker's KV cache in tokens, or 0 if the worker has several models.

    With several models, heartbeats report only the combined usage of their caches."""
    caches = [model.kv_tokens for model in registration.models if model.max_running]
    return caches[0] if len(caches) == 1 else 0


def _numerics_by_model(registration: WorkerRegistration) -> dict[str, Numerics | None]:
    return {model.name: model.numerics for model in registration.models}


def _engine_ids_by_model(registration: WorkerRegistration) -> dict[str, str]:
    return {model.name: str(model.peer.get("incarnation")) for model in registration.models if model.peer is not None}
