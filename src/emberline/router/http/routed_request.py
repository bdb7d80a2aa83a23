"""RoutedRequest: one client's request across all attempts at workers.

It holds the state of the request (`router/request_state.py`), the workers tried, their failures, and the part of the
reply that the client has received."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ParamSpec, TypeVar

from emberline.core.handoff import TokenGroup
from emberline.core.offload import offload
from emberline.router.dialect import Ticket, WorkerDialect
from emberline.router.http.remote_prefill import RemotePrefill
from emberline.router.http.worker_attempt import WorkerAttempt
from emberline.router.native import NativeDialect
from emberline.router.policy import RoutingDecision
from emberline.router.request_state import RequestEvent, RequestState, Suspicion, assess_suspicion, next_state
from emberline.router.request_summary import RequestSummary
from emberline.router.sglang import SGLangDialect
from emberline.router.stream_tracker import StreamTracker
from emberline.router.upstream_request import UpstreamRequest
from emberline.router.vllm import VLLMDialect
from emberline.router.worker import Worker
from emberline.server.exchange import Exchange

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Why an attempt failed, so that another worker is tried.

    `status`, `headers` and `body` are those of the worker's reply, if there was one."""

    reason: str  # also a metric label
    is_crash: bool = False  # the worker may have crashed because of the request
    status: int = 0
    headers: Mapping[str, str] | None = None
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker that failed during the request: its process died, or only the connection broke."""

    worker: Worker
    engine_ids: Mapping[str, str]  # incarnations of its engines at that time, by model

    @property
    def processes(self) -> tuple[str, frozenset[str]]:
        return self.worker.id, frozenset(self.engine_ids.values())

    @property
    def counts_as_crash(self) -> bool:
        """Whether the process must be assumed dead.

        It is, until a heartbeat of the same processes shows that they are healthy."""
        worker = self.worker
        return worker.failed_since_heartbeat or not worker.is_ready or worker.engine_ids != self.engine_ids

    @property
    def awaits_heartbeat(self) -> bool:
        """Whether only the next heartbeat will tell if the worker survived."""
        return self.worker.failed_since_heartbeat and self.worker.is_ready


@dataclass(slots=True)
class RoutedRequest:
    exchange: Exchange
    summary: RequestSummary
    client_request: UpstreamRequest  # without hop-by-hop headers
    seed: int
    created: int  # Unix time of the reply's `created` field
    cluster_key: str | None
    deadline: float  # of the whole request, on the event loop's clock; inf: none
    max_attempts: int  # attempts in a row without output
    max_migrations: int  # times that another worker may continue the stream
    is_generation: bool  # the path generates tokens
    is_known_suspect: bool  # the same prompt was abandoned recently because workers failed while serving it
    foreign_key: str | None = None  # API key for vLLM and SGLang servers
    state: RequestState = RequestState.CHOOSING  # changed by `handle_event` alone
    tracker: StreamTracker = field(default_factory=StreamTracker)
    prefill: RemotePrefill | None = None
    can_split_prefill: bool = True  # a prefill worker may compute the prompt for the next attempt
    last_failure: AttemptFailure | None = None
    no_worker_error: Exception | None = None  # why no worker could be chosen the last time
    migration_reason: str = ""  # why the stream must move to another worker; "" once that worker has sent output
    interrupted_at: float = 0.0  # start of the current wait for a worker
    loss_message: str = ""  # description of the last interruption, for the client
    tried_worker_ids: set[str] = field(default_factory=set)  # since the last output
    worker_failures: list[WorkerFailure] = field(default_factory=list)
    migration_count: int = 0
    attempts_since_output: int = 0
    total_attempts: int = 0
    output_worker: Worker | None = None  # the worker that generated the output which the client has
    drained_decision: RoutingDecision | None = None  # the attempt that a drain interrupted
    output_timeout: asyncio.Timeout | None = None  # for the next part of the reply
    timeout_extended_at: float = 0.0
    worker_times_out_itself: bool = False  # the current worker itself ends requests that make no progress

    def handle_event(self, event: RequestEvent) -> None:
        """Change the state as the table of transitions says; raise IllegalTransition if it lists no such event."""
        self.state = next_state(self.state, event)

    @property
    def has_visible_progress(self) -> bool:
        """Whether the router can see that tokens are generated.

        A reply without a stream arrives only at its end."""
        return self.summary.stream or not self.is_generation or not self.worker_times_out_itself

    @property
    def has_reply_started(self) -> bool:
        """Whether the client has received the start of the reply, and the request is still open."""
        return self.state.has_reply_started

    @property
    def can_try_worker(self) -> bool:
        """Whether another worker may be tried now."""
        return (
            self.attempts_since_output < self.max_attempts and self._has_retries_left and not self.exceeds_crash_limit
        )

    @property
    def crash_count(self) -> int:
        """Worker processes that failed; one whose connections broke twice counts once."""
        return len({failure.processes for failure in self.worker_failures if failure.counts_as_crash})

    @property
    def suspicion(self) -> Suspicion:
        """How likely it is that the request crashes workers; a heartbeat of a worker that survived can lower it."""
        return assess_suspicion(self.crash_count, is_known_suspect=self.is_known_suspect)

    @property
    def is_suspect(self) -> bool:
        return self.suspicion is not Suspicion.CLEAR

    @property
    def exceeds_crash_limit(self) -> bool:
        """Whether the request has probably crashed several workers and must not be tried again."""
        return self.suspicion is Suspicion.BLOCKED

    @property
    def _has_retries_left(self) -> bool:
        """Whether the limits allow one more attempt, if a worker can be found."""
        if not self.has_reply_started:
            return len(self.worker_failures) <= self.max_attempts
        return self._is_stream_movable and self.migration_count <= self.max_migrations

    @property
    def _is_stream_movable(self) -> bool:
        return self.tracker.has_output and self.tracker.is_movable

    @property
    def can_migrate_on_drain(self) -> bool:
        """Whether a drain may move the request to another worker.

        The last migration is kept for failures: a drain can also wait."""
        return self.summary.stream and self.is_generation and self.migration_count < self.max_migrations

    def can_wait_for_worker(self, max_wait_s: float, now: float) -> bool:
        """Whether the request may wait for a worker, at most `max_wait_s`.

        It may wait to continue a stream, and to start if workers were unavailable or none may take a suspect. It may
        not after a reply that all workers are full or that an engine failed, nor beyond the crash limit."""
        was_unavailable = self.last_failure is None or self.last_failure.status in (0, 502, 503)
        if self.exceeds_crash_limit and not any(failure.awaits_heartbeat for failure in self.worker_failures):
            return False
        return (
            (self.has_reply_started or was_unavailable or self.is_suspect)
            and self._has_retries_left
            and now - self.interrupted_at < max_wait_s
        )

    def allow_retries_after_wait(self) -> None:
        """Allow all workers once more, except those that failed and have sent no heartbeat since."""
        self.tried_worker_ids = {
            failure.worker.id for failure in self.worker_failures if failure.worker.failed_since_heartbeat
        }
        self.attempts_since_output = 0 if self.has_reply_started else self.max_attempts - 1

    def record_output_from(self, worker: Worker) -> None:
        """Record that a worker has sent output.

        Earlier failed attempts no longer count; workers that failed are still excluded."""
        self.output_worker = worker
        self.attempts_since_output, self.migration_reason, self.drained_decision = 0, "", None
        self.tried_worker_ids = {failure.worker.id for failure in self.worker_failures}

    def record_worker_failure(self, worker: Worker) -> None:
        """Record that a worker failed while serving this request, unless it is shutting down."""
        if not worker.is_leaving:
            self.worker_failures.append(WorkerFailure(worker, worker.engine_ids))
            worker.failed_since_heartbeat = True

    def record_failed_attempt(self, failure: AttemptFailure, decision: RoutingDecision, now: float) -> None:
        """Record a failed attempt, and prepare the stream for another worker if one can continue it."""
        self._trace_failure(failure, decision.worker)
        was_relaying = self.state is RequestState.RELAYING
        self.handle_event(RequestEvent.ATTEMPT_FAILED)
        self.last_failure = failure
        if failure.reason == "drained":
            self.drained_decision = None if self.tracker.has_ended else decision
        elif failure.reason != "unable" or self.has_reply_started:
            self.tried_worker_ids.add(decision.worker.id)
        if failure.is_crash:
            self.record_worker_failure(decision.worker)
        if (prefill := self.prefill) is not None and prefill.may_have_crashed_worker:
            prefill.may_have_crashed_worker = False  # counted once
            self.record_worker_failure(prefill.worker)
        if not self.has_reply_started:
            self.tracker = StreamTracker()
            self.interrupted_at = now if failure.is_crash or not self.interrupted_at else self.interrupted_at
        elif was_relaying:
            self.loss_message = (
                f"worker {decision.worker.name} was lost ({failure.reason}) before the reply was complete"
            )
        if self._is_stream_movable:
            self.tracker.discard_partial_group()
            if was_relaying:
                self.migration_count += 1
                self.can_split_prefill = True
                self.interrupted_at = now
                self.migration_reason = failure.reason

    def dialect_for(self, worker: Worker) -> WorkerDialect:
        """Return the dialect that writes this request for the worker."""
        match worker.dialect:
            case "vllm":
                return VLLMDialect(self._client_request_for(worker))
            case "sglang":
                return SGLangDialect(self._client_request_for(worker), secrets.randbits(63))
        return NativeDialect(self.client_request, self.seed, self.cluster_key, self.created, self._output_groups())

    def _output_groups(self) -> tuple[TokenGroup, ...]:
        return self.tracker.build_handoff().groups if self.has_reply_started else ()

    @property
    def output_token_count(self) -> int:
        """Tokens of the reply so far, all choices together."""
        return sum(len(group.tokens) for group in self._output_groups())

    async def build_worker_request(self, worker: Worker, now: float) -> UpstreamRequest | None:
        """Return the request for the next worker.

        It is the client's own, or one that continues after the client's output; None if this kind of server cannot
        continue a stream."""
        remaining_s, ticket = self.deadline - now, self._ticket_for(worker)
        if self.has_reply_started:
            handoff = replace(self.tracker.build_handoff(), source=ticket)
            return self.dialect_for(worker).build_resume_request(
                handoff, remaining_s, *self.tracker.reply_id_and_created()
            )
        if not self.is_generation:
            return self._client_request_for(worker)
        if self.prefill is None or ticket is None:
            return await self.run_dialect(self.dialect_for(worker).build_plain_request, self.summary.stream)
        return await self.run_dialect(self.prefill.dialect.build_decode_request, ticket, remaining_s)

    async def run_dialect(self, build: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a dialect's method, in another process if it has to decode a large body.

        Only dialects of foreign servers decode the body; Emberline's own workers get the client's bytes."""
        is_native = isinstance(getattr(build, "__self__", None), NativeDialect)
        size = 0 if is_native else len(self.client_request.body)
        return await offload.run_by_size(size, build, *args, **kwargs)

    def _client_request_for(self, worker: Worker) -> UpstreamRequest:
        """Return the client's request, with the API key of foreign servers where one is configured."""
        if worker.dialect == "native" or self.foreign_key is None:
            return self.client_request
        return self.client_request.with_headers({"authorization": f"Bearer {self.foreign_key}"})

    def _ticket_for(self, worker: Worker) -> Ticket | None:
        """Return the ticket with which the worker fetches the prompt's blocks, if it can use one."""
        prefill = self.prefill
        if prefill is None or prefill.failure or not worker.can_fetch_from(prefill.worker, self.summary.model):
            return None
        return None if self.has_reply_started and prefill.is_released else prefill.ticket

    async def close(self) -> None:
        if self.prefill is not None:
            await self.prefill.close()

    def start_attempt_trace(self, attempt: WorkerAttempt, kind: str) -> None:
        if (span := self.exchange.span) is not None:
            attempt.start_trace(span, kind, self.total_attempts)

    def _trace_failure(self, failure: AttemptFailure, worker: Worker) -> None:
        if (span := self.exchange.span) is not None:
            name = "emberline.migration" if self.has_reply_started else "emberline.retry"
            span.add_event(name, worker=worker.name, reason=failure.reason, status=failure.status or None)

    def end_trace(self) -> None:
        """Add the final attributes to the span, which the exchange ends."""
        if (span := self.exchange.span) is not None:
            span.attributes |= {
                "gen_ai.request.model": self.summary.model or None,
                "emberline.worker": str(self.exchange.log_fields["worker"])
                if "worker" in self.exchange.log_fields
                else None,
                "emberline.split": self.prefill is not None,
                "emberline.attempts": self.total_attempts,
                "emberline.migrations": self.migration_count,
                "emberline.stream": self.summary.stream,
            }
