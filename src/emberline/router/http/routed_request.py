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
from emberline.router.http.stream_resumption import StreamResumption
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
    """The reason why an attempt at a worker failed.

    `status`, `headers` and `body` hold the worker's error reply, if it sent one."""

    reason: str  # also a metric label
    is_crash: bool = False  # the worker may have crashed because of the request
    status: int = 0
    headers: Mapping[str, str] | None = None
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker that failed while serving the request. Its process may have died, or only the connection broke."""

    worker: Worker
    engine_ids: Mapping[str, str]  # incarnations of its engines at that time, by model

    @property
    def process_identity(self) -> tuple[str, frozenset[str]]:
        return self.worker.id, frozenset(self.engine_ids.values())

    @property
    def counts_as_crash(self) -> bool:
        """Whether the worker's process is assumed to have crashed.

        The assumption ends when a later heartbeat of the same process shows that it is healthy."""
        worker = self.worker
        return worker.failed_since_heartbeat or not worker.is_ready or worker.engine_ids != self.engine_ids

    @property
    def awaits_heartbeat(self) -> bool:
        """Whether it is still unknown if the worker crashed: no heartbeat has arrived since it failed."""
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
    arrived_at: float = 0.0  # on the event loop's clock
    resumption: StreamResumption | None = None  # the stream of an earlier connection, which this request continues
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

    def __post_init__(self) -> None:
        if self.resumption is not None:
            self.tracker = self.resumption.make_tracker()
            self.output_worker = self.resumption.worker
            self.can_split_prefill = False  # the prompt is in the cache of the worker that computed it

    def handle_event(self, event: RequestEvent) -> None:
        """Change the request's state to the next one for `event`. Raises IllegalTransition if there is none."""
        self.state = next_state(self.state, event)

    @property
    def needs_output_timeout(self) -> bool:
        """Whether the router limits the time until the worker's next output.

        It does not for a reply that arrives only when it is complete, if the worker itself ends stalled requests."""
        return self.summary.stream or not self.is_generation or not self.worker_times_out_itself

    @property
    def has_reply_started(self) -> bool:
        """Whether the client has received the start of the reply, and the request is still open."""
        return self.state.has_reply_started

    @property
    def may_try_another_worker(self) -> bool:
        """Whether the limits of attempts, migrations and crashes allow one more attempt now."""
        return (
            self.attempts_since_output < self.max_attempts and self._has_retries_left and not self.exceeds_crash_limit
        )

    @property
    def crash_count(self) -> int:
        """The number of worker processes that crashed during this request. Each process counts once."""
        return len({failure.process_identity for failure in self.worker_failures if failure.counts_as_crash})

    @property
    def suspicion(self) -> Suspicion:
        """How strongly the request is suspected of crashing the workers that serve it.

        The suspicion falls when a heartbeat shows that a worker had not crashed."""
        return assess_suspicion(self.crash_count, is_known_suspect=self.is_known_suspect)

    @property
    def is_suspect(self) -> bool:
        return self.suspicion is not Suspicion.CLEAR

    @property
    def exceeds_crash_limit(self) -> bool:
        """Whether so many workers crashed during this request that it must not be sent to any worker again."""
        return self.suspicion is Suspicion.BLOCKED

    @property
    def _has_retries_left(self) -> bool:
        """Whether the retry limits allow one more attempt.

        Before the reply has started, worker failures are limited; after that, migrations of the stream are limited."""
        if not self.has_reply_started:
            return len(self.worker_failures) <= self.max_attempts
        return self._is_stream_movable and self.migration_count <= self.max_migrations

    @property
    def _is_stream_movable(self) -> bool:
        return self.tracker.has_output and self.tracker.is_movable

    @property
    def can_migrate_on_drain(self) -> bool:
        """Whether the request may move to a different worker because its worker is drained.

        The last allowed migration is reserved for a failure of a worker: a drain can instead wait until the request
        ends."""
        return self.summary.stream and self.is_generation and self.migration_count < self.max_migrations

    def can_wait_for_worker(self, max_wait_s: float, now: float) -> bool:
        """Whether the request may wait until a worker is available, if it has waited less than `max_wait_s`.

        A started stream may wait for a worker that continues it. A request without output may wait if workers were
        unavailable, or if it is suspected of crashing workers. It may not wait if a worker replied that it is full or
        that its engine failed. A request that exceeds the crash limit may wait only for a heartbeat that lowers its
        crash count."""
        was_unavailable = self.last_failure is None or self.last_failure.status in (0, 502, 503)
        if self.exceeds_crash_limit and not any(failure.awaits_heartbeat for failure in self.worker_failures):
            return False
        return (
            (self.has_reply_started or was_unavailable or self.is_suspect)
            and self._has_retries_left
            and now - self.interrupted_at < max_wait_s
        )

    def allow_tried_workers_again(self) -> None:
        """Allow workers that were already tried to be chosen again.

        Workers that failed stay excluded until their next heartbeat."""
        self.tried_worker_ids = {
            failure.worker.id for failure in self.worker_failures if failure.worker.failed_since_heartbeat
        }
        self.attempts_since_output = 0 if self.has_reply_started else self.max_attempts - 1

    def record_output_from(self, worker: Worker) -> None:
        """Record that a worker has sent output for the client, and reset the count of attempts.

        Workers that failed during this request stay excluded."""
        self.output_worker = worker
        self.attempts_since_output, self.migration_reason, self.drained_decision = 0, "", None
        self.tried_worker_ids = {failure.worker.id for failure in self.worker_failures}

    def record_worker_failure(self, worker: Worker) -> None:
        """Record that a worker failed while serving this request, unless it is shutting down."""
        if not worker.is_leaving:
            self.worker_failures.append(WorkerFailure(worker, worker.engine_ids))
            worker.failed_since_heartbeat = True

    def record_failed_attempt(self, failure: AttemptFailure, decision: RoutingDecision, now: float) -> None:
        """Record a failed attempt. If the stream can be continued, prepare it for the next worker."""
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
            self.tracker = StreamTracker() if self.resumption is None else self.resumption.make_tracker()
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
        """Return the dialect that writes this request in the format of the worker's software."""
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
        """The number of output tokens that the client has received, summed over all choices."""
        return sum(len(group.tokens) for group in self._output_groups())

    async def build_worker_request(self, worker: Worker, now: float) -> UpstreamRequest | None:
        """Return the HTTP request for the next worker.

        Before the reply has started, it is the client's request. After that, it is a request to continue the stream;
        None if servers of the worker's kind cannot continue one."""
        remaining_s, ticket = self.deadline - now, self._ticket_for(worker)
        if self.has_reply_started:
            handoff = replace(self.tracker.build_handoff(), source=ticket)
            return self.dialect_for(worker).build_resume_request(
                handoff, remaining_s, *self.tracker.reply_id_and_created()
            )
        if (resumption := self.resumption) is not None:
            return self.dialect_for(worker).build_resume_request(
                resumption.handoff, remaining_s, resumption.reply_id, resumption.created
            )
        if not self.is_generation:
            return self._client_request_for(worker)
        if self.prefill is None or ticket is None:
            return await self.run_dialect_method(self.dialect_for(worker).build_plain_request, self.summary.stream)
        return await self.run_dialect_method(self.prefill.dialect.build_decode_request, ticket, remaining_s)

    async def run_dialect_method(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of a dialect, in a child process if the method has to decode a large body.

        Only the dialects of vLLM and SGLang decode the body. Emberline's own workers get the client's bytes unchanged.
        """
        is_native = isinstance(getattr(method, "__self__", None), NativeDialect)
        size = 0 if is_native else len(self.client_request.body)
        return await offload.run_inline_if_small(size, method, *args, **kwargs)

    def _client_request_for(self, worker: Worker) -> UpstreamRequest:
        """Return the client's request, with the API key that is configured for vLLM and SGLang servers, if any."""
        if worker.dialect == "native" or self.foreign_key is None:
            return self.client_request
        return self.client_request.with_headers({"authorization": f"Bearer {self.foreign_key}"})

    def _ticket_for(self, worker: Worker) -> Ticket | None:
        """Return the ticket with which the worker fetches the prompt's KV blocks, or None if it cannot fetch them."""
        prefill = self.prefill
        if prefill is None or prefill.failure or not worker.can_fetch_blocks_from(prefill.worker, self.summary.model):
            return None
        return None if self.has_reply_started and prefill.is_released else prefill.ticket

    async def close_prefill(self) -> None:
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
        """Add the request's final attributes to its trace span, which ends with the HTTP exchange."""
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
