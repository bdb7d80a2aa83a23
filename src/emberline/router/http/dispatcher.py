"""Dispatcher: chooses a worker for each request, and records load, token counts and cached prompts of each attempt."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from emberline.cluster.membership import WorkerHealth
from emberline.core.clock import Clock
from emberline.core.config import RouterConfig
from emberline.core.errors import EngineUnavailable, ModelNotFound, Overloaded
from emberline.core.numerics import describe_difference
from emberline.router.destination import select_destination
from emberline.router.http.router_metrics import FORGOTTEN_WORKER
from emberline.router.http.worker_attempt import WorkerAttempt
from emberline.router.http.worker_registry import WorkerRegistry
from emberline.router.policy import RoutingDecision, RoutingReason, RoutingRules, choose_worker
from emberline.router.prefill_policy import choose_prefill_worker
from emberline.router.prefix_block_map import BlockPosition
from emberline.router.request_summary import RequestSummary
from emberline.router.token_estimator import TokenEstimator
from emberline.router.worker import RequestLoad, Worker

MIN_HANDOVER_TOKENS = 64  # fewer are recomputed by the next worker rather than fetched


class Dispatcher(WorkerRegistry):
    """The router's state: its workers, estimates of request sizes, and which worker has which prompt prefix cached."""

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        super().__init__(config, clock)
        self._rules = RoutingRules(
            config.affinity_slack, config.decode_weight, config.split_tokens, config.split_patience
        )
        self._attempt_ids = itertools.count()
        self._detached_tasks: set[asyncio.Task[None]] = set()

    @property
    def open_attempt_count(self) -> int:
        return sum(map(len, self._open_attempts.values()))

    def choose_worker(
        self,
        summary: RequestSummary,
        excluded_worker_ids: set[str],
        *,
        ignore_capacity_limits: bool = False,
        is_suspect: bool = False,
    ) -> RoutingDecision:
        """Return the worker for a request, chosen by `policy.choose_worker` from all registered workers.

        A sleeping worker, which the request wakes, is chosen only if no other can take the request."""
        options = ignore_capacity_limits, is_suspect
        if self.sleeping_worker_ids:
            with suppress(EngineUnavailable, Overloaded):
                return self._choose_worker(summary, excluded_worker_ids | self.sleeping_worker_ids, *options)
        decision = self._choose_worker(summary, excluded_worker_ids, *options)
        self.sleeping_worker_ids.discard(decision.worker.id)  # further requests may follow this one
        return decision

    def _choose_worker(
        self,
        summary: RequestSummary,
        excluded_worker_ids: set[str],
        ignore_capacity_limits: bool,
        is_suspect: bool,
    ) -> RoutingDecision:
        workers, now = list(self.workers.values()), self._clock.now()
        if summary.endpoints:
            workers = select_destination(workers, summary.endpoints, summary.model, now)
        shared = not self.prefixes.continues_conversation(summary.prefixes)
        try:
            return choose_worker(
                summary,
                workers,
                *self._cached_bytes_and_estimator(summary),
                self._rules,
                now,
                excluded_worker_ids,
                ignore_capacity_limits,
                is_suspect,
                shared,
            )
        except ModelNotFound as e:
            if self.expected_models.expects(summary.model, now):
                message = f"the model {summary.model[:200]!r} has no worker yet"
                raise EngineUnavailable(message, hint="retry when its worker has started") from e
            raise

    def describe_numerics_difference(self, model: str, origin_worker: Worker) -> str:
        """Return the difference in numerics (dtype etc.) that keeps a stream from moving to any other worker.

        `origin_worker`: the worker that began the stream. Return "" if a ready worker has the same numerics as
        `origin_worker`, or if no other worker is ready."""
        now, others = self._clock.now(), (w for w in self.workers.values() if w.id != origin_worker.id)
        ready = [w for w in others if w.accepts_requests_for(model, now) and w.dialect == "native"]
        differences = [
            describe_difference(origin_worker.numerics.get(model), other.numerics.get(model)) for other in ready
        ]
        return differences[0] if differences and all(differences) else ""

    def reuse_decision_if_available(self, decision: RoutingDecision) -> RoutingDecision | None:
        """Return the same decision if its worker is ready or draining and its circuit breaker allows it, else None."""
        worker = decision.worker
        is_available = self.workers.get(worker.name) is worker and self.health(worker) in (
            WorkerHealth.READY,
            WorkerHealth.DRAINING,
        )
        return decision if is_available and worker.breaker.allows_request(self._clock.now()) else None

    def choose_kv_source_for_moved_stream(
        self, summary: RequestSummary, output_token_count: int, answer_decision: RoutingDecision, origin_worker: Worker
    ) -> RoutingDecision | None:
        """Return a decision for `origin_worker`, if a moved stream's new worker should fetch the KV blocks from it.

        `origin_worker`: the worker that generated the stream so far. `answer_decision`: the decision for the new
        worker. `output_token_count`: tokens that the stream has generated. Return None if the blocks cannot be fetched,
        or if they are so few that fetching them saves no time."""
        is_worthwhile = (
            summary.is_single_sequence
            and answer_decision.load.prefill_tokens + output_token_count >= MIN_HANDOVER_TOKENS
        )
        is_available = self.workers.get(
            origin_worker.name
        ) is origin_worker and answer_decision.worker.can_fetch_blocks_from(origin_worker, summary.model)
        if not is_worthwhile or not is_available:
            return None
        return RoutingDecision(
            origin_worker,
            RequestLoad(0.0, 0.0),
            RoutingReason.SPLIT,
            self.estimators[summary.model].estimate_prompt_tokens(summary.prompt_bytes),
        )

    def choose_prefill_worker(
        self, summary: RequestSummary, answer_decision: RoutingDecision, *, is_required: bool
    ) -> RoutingDecision | None:
        """Return the prefill worker that computes the prompt, or None if the answering worker computes it itself."""
        return choose_prefill_worker(
            summary,
            answer_decision,
            list(self.workers.values()),
            *self._cached_bytes_and_estimator(summary),
            self._rules,
            self._clock.now(),
            is_required,
        )

    def engine_peer_address(self, worker: Worker, model: str) -> dict[str, Any]:
        """Return the address at which other workers fetch KV blocks from this worker's engine, or {} if it has none."""
        member = self.membership.get(worker.name)
        models = member.registration.models if member is not None else ()
        return next((each.peer for each in models if each.name == model and each.peer is not None), {})

    def keep_task_alive(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a task that no code awaits; asyncio could otherwise garbage-collect it."""
        self._detached_tasks.add(task)
        task.add_done_callback(self._detached_tasks.discard)

    def fill_in_default_model(self, summary: RequestSummary) -> RequestSummary:
        """Return the summary with the cluster's only model filled in, if the request names no model."""
        if summary.model:
            return summary
        served = [
            model
            for member in self.membership
            for model in member.registration.models
            if member.registration.name in self.workers
        ]
        served += self.expected_models.list_announced(self._clock.now()).values()
        models = {model.name for model in served if model.max_running} or {model.name for model in served}
        return replace(summary, model=next(iter(models))) if len(models) == 1 else summary

    def _cached_bytes_and_estimator(self, summary: RequestSummary) -> tuple[Mapping[str, int], TokenEstimator]:
        is_served = any(summary.model in worker.models for worker in self.workers.values())
        cached_bytes = self.prefixes.cached_bytes_by_worker(summary.prefixes)
        if self.kv_index is not None:
            cached_bytes = self.kv_index.cached_bytes_by_worker(summary.prefixes, cached_bytes)
        return cached_bytes, self.estimators[summary.model] if is_served else TokenEstimator()

    @contextmanager
    def open_attempt(self, summary: RequestSummary, decision: RoutingDecision) -> Iterator[WorkerAttempt]:
        """Open an attempt at a worker for the duration of a `with` statement.

        The attempt counts in the worker's load until the statement ends, and is recorded in the metrics."""
        worker, now = decision.worker, self._clock.now()
        attempt = WorkerAttempt(next(self._attempt_ids), summary, decision, now, now)
        worker.add_request(attempt.id, decision.load, now)
        self._open_attempts.setdefault(worker.id, {})[attempt.id] = attempt
        self.prefixes.record_prompt(summary.prefixes, worker.id)
        self.shared_routing.record_prompt(worker.id, summary.prefixes)
        self.metrics.record_decision(decision)
        try:
            yield attempt
        finally:
            self._close_attempt(attempt)

    def record_reply_bytes(self, attempt: WorkerAttempt, event_count: int) -> None:
        """Record that the worker sent bytes of its reply, which contained `event_count` events."""
        if attempt.first_byte_at is None:
            attempt.decision.worker.mark_prefilled(attempt.id)
        elif event_count:
            since_last_s = self._clock.now() - attempt.last_activity_at
            self.metrics.inter_token_seconds.observe(since_last_s / event_count, event_count)
        self.record_activity(attempt)
        attempt.decision.worker.record_generated_tokens(attempt.id, event_count)

    def record_prompt_end(self, attempt: WorkerAttempt, last_block: BlockPosition) -> None:
        """Record which KV block is the last one of the prompt, as the worker has reported."""
        attempt.prompt_end = last_block
        if self.kv_index is not None:
            self.kv_index.record_prompt_end(attempt.summary.prefixes, last_block)

    def record_activity(self, attempt: WorkerAttempt) -> None:
        """Record that the worker has just sent data for this attempt, so that it is not considered stuck."""
        attempt.last_activity_at = self._clock.now()
        if attempt.first_byte_at is None:
            attempt.first_byte_at = attempt.last_activity_at
            attempt.decision.worker.breaker.record_success()

    def _close_attempt(self, attempt: WorkerAttempt) -> None:
        worker, now, outcome = attempt.decision.worker, self._clock.now(), attempt.outcome
        duration_s = now - attempt.started_at
        worker.remove_request(attempt.id, duration_s if outcome == "answered" else None)
        open_attempts = self._open_attempts[worker.id]
        del open_attempts[attempt.id]
        if not open_attempts:
            del self._open_attempts[worker.id]
        if self.kv_index is not None and attempt.prompt_end is not None:
            # Its block events have arrived by now.
            self.kv_index.record_cached_prompt(worker.id, attempt.summary.prefixes, attempt.prompt_end)
        match outcome:
            case "answered":
                worker.breaker.record_success()
                self.estimators[attempt.summary.model].update_averages(
                    attempt.summary, attempt.usage.prompt_tokens, attempt.usage.output_tokens
                )
            case "failed":
                worker.breaker.record_failure(now)
            case _:
                worker.breaker.record_cancellation()
        metrics_name = worker.name if worker.name in self.workers else FORGOTTEN_WORKER
        self.metrics.record_attempt(
            metrics_name,
            outcome,
            duration_s,
            None if attempt.first_byte_at is None else attempt.first_byte_at - attempt.started_at,
        )
        attempt.end_trace()
