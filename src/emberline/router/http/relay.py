"""Relay: passes a client's request to a worker, and the worker's reply to the client.

If a worker fails before it has sent output, the request is sent to a different worker. If a worker fails in the middle
of a stream, a different worker continues the stream where the client's output ended. If no worker can continue the
stream, it ends with an error event in the format of its API. Every request is answered exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import replace

from emberline.core.clock import WallClock
from emberline.core.config import RouterConfig
from emberline.core.errors import (
    DeadlineExceeded,
    EmberlineError,
    EngineUnavailable,
    Overloaded,
    ShuttingDown,
    WorkerLost,
    WorkersCrashed,
)
from emberline.core.handoff import EVENT_IDS_HEADER
from emberline.core.tenants import TENANT_SALT_HEADER
from emberline.router.dialect import (
    CHAIN_HEADER,
    PRIVATE_HEADER_PREFIX,
    TENANT_HEADER,
    InvalidWorkerReply,
)
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.remote_prefill import RemotePrefill
from emberline.router.http.reply_relay import HOP_BY_HOP_HEADERS, ReplyRelay, content_type_and_headers
from emberline.router.http.routed_request import AttemptFailure, RoutedRequest
from emberline.router.http.stream_resumption import StreamResumption
from emberline.router.http.waiting_requests import WaitingRequests
from emberline.router.http.worker_attempt import WorkerAttempt
from emberline.router.native import RESUME_PATH
from emberline.router.policy import RETRY_HINT, RoutingDecision, RoutingReason
from emberline.router.request_state import RequestEvent
from emberline.router.request_summary import RequestSummary
from emberline.router.suspect_requests import SuspectRequests
from emberline.router.upstream_request import UpstreamRequest
from emberline.router.worker_client import UpstreamBroken, UpstreamUnreachable, WorkerClient
from emberline.server.access import derive_tenant_id
from emberline.server.exchange import Exchange
from emberline.wire import sse
from emberline.wire.errors import render_anthropic_error, render_openai_error

log = logging.getLogger("emberline.router")

FIRST_RETRY_PAUSE_S = 0.1
MAX_RETRY_PAUSE_S = 1.0  # a worker that has just started must not wait for requests
MAX_WAITING_REQUESTS = 1024  # requests that wait for a worker at the same time
HANDOVER_TIMEOUT_S = 2.0  # for a draining worker to offer blocks that it has computed
ERROR_SEND_TIMEOUT_S = 5.0  # for sending the error event to a client that may have stopped reading
GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})


class Relay(ReplyRelay):
    def __init__(self, dispatcher: Dispatcher, client: WorkerClient, config: RouterConfig) -> None:
        super().__init__(dispatcher, config)
        self._client = client
        self._suspects = SuspectRequests()
        self.waiting_requests = WaitingRequests()

    async def run(
        self, exchange: Exchange, summary: RequestSummary, body: bytes, resumption: StreamResumption | None = None
    ) -> None:
        """Answer the client's request. `resumption`: the stream that the request continues.

        Raises an EmberlineError if the request failed. The caller replies with that error; if the reply has already
        started, the caller closes the connection instead."""
        summary = self._dispatcher.fill_in_default_model(summary)
        routed = self._create_routed_request(exchange, summary, body, resumption)
        try:
            await self._run_to_end(routed)
        finally:
            await routed.close_prefill()
            routed.end_trace()

    async def _run_to_end(self, routed: RoutedRequest) -> None:
        """Answer the request, then set its final state: done, abandoned, timed out etc."""
        x, ending = routed.exchange, RequestEvent.EXCEPTION_RAISED
        try:
            async with asyncio.timeout(None) as routed.output_timeout:
                self._extend_output_deadline(routed, force=True)
                ending = await self._try_workers(routed)
        except TimeoutError:  # no failure of the worker: the client may read slowly
            ending = RequestEvent.TIMED_OUT
            await self._end_broken_reply(routed, self._deadline_error(routed))
        except asyncio.CancelledError:
            ending = RequestEvent.CLIENT_DISCONNECTED if x.client_disconnected else RequestEvent.ROUTER_STOPPED
            if x.status is not None and not x.client_disconnected:
                error = ShuttingDown()
                x.logged_status = error.status
                with contextlib.suppress(EmberlineError):
                    await self._end_broken_reply(routed, error)
            raise
        except EmberlineError:
            ending = RequestEvent.GAVE_UP if routed.state.is_between_attempts else ending
            raise
        finally:
            routed.handle_event(ending)

    def _create_routed_request(
        self, exchange: Exchange, summary: RequestSummary, body: bytes, resumption: StreamResumption | None
    ) -> RoutedRequest:
        decoded = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in exchange.headers.items())
        headers = {
            name: value
            for name, value in decoded
            if name not in HOP_BY_HOP_HEADERS
            and (not name.startswith(PRIVATE_HEADER_PREFIX) or name == TENANT_SALT_HEADER)
        }
        if self._config.kv_events:
            headers[CHAIN_HEADER] = "1"
        if self._config.event_ids or resumption is not None:
            headers[EVENT_IDS_HEADER] = "1"
        if tenant := derive_tenant_id(exchange):
            headers[TENANT_HEADER] = f"{'checked' if self._config.api_keys else 'presented'} {tenant}"
        client_request = UpstreamRequest(
            exchange.method, exchange.path + (f"?{exchange.query}" if exchange.query else ""), headers, body
        )
        config, arrived_at = self._config, self._now()
        seed, created = secrets.randbits(64), int(WallClock.now())
        if resumption is not None:
            seed, created = resumption.seed if resumption.seed is not None else seed, resumption.created
        return RoutedRequest(
            exchange,
            summary,
            client_request,
            seed=seed,
            created=created,
            cluster_key=config.cluster_key,
            deadline=arrived_at + config.request_timeout,
            max_attempts=config.attempts,
            max_migrations=config.migrations,
            is_generation=exchange.path in GENERATION_PATHS,
            is_known_suspect=self._suspects.contains(summary.digest, self._now()),
            foreign_key=config.foreign_key,
            arrived_at=arrived_at,
            resumption=resumption,
        )

    def _deadline_error(self, routed: RoutedRequest) -> DeadlineExceeded:
        config = self._config
        if self._now() < routed.deadline:
            return DeadlineExceeded(
                f"no token arrived within {config.token_timeout:.0f} s", hint="raise --token-timeout"
            )
        return DeadlineExceeded(
            f"the request was not complete within {config.request_timeout:.0f} s", hint="raise --request-timeout"
        )

    async def _try_workers(self, routed: RoutedRequest) -> RequestEvent:
        """Send the request to one worker after another until one completes the reply.

        Return REPLY_COMPLETED, or GAVE_UP if no worker is left to try."""
        while (decision := self._choose_next_worker(routed) or await self._wait_for_worker(routed)) is not None:
            routed.handle_event(RequestEvent.WORKER_CHOSEN)
            routed.exchange.log_fields["worker"] = decision.worker.name
            failure = await self._try_worker(routed, decision)
            if failure is None:
                return RequestEvent.REPLY_COMPLETED
            log.info(
                "Attempt failed: path=%s worker=%s reason=%s",
                routed.exchange.path,
                decision.worker.name,
                failure.reason,
            )
            routed.record_failed_attempt(failure, decision, self._now())
        await self._give_up(routed)
        return RequestEvent.GAVE_UP

    def _choose_next_worker(self, routed: RoutedRequest) -> RoutingDecision | None:
        """Return the next worker to try.

        Return None if no worker is available or the limit of attempts is reached. If no attempt has failed before,
        raise any error of `choose_worker` other than EngineUnavailable, for example because the model is unknown or all
        workers are full."""
        try:
            if routed.may_try_another_worker:
                excluded = routed.tried_worker_ids
                if routed.output_worker is not None:
                    excluded = excluded | self._dispatcher.ids_of_workers_unable_to_continue(
                        routed.summary.model, routed.output_worker
                    )
                summary = routed.summary
                if routed.last_failure is not None:
                    summary = replace(summary, endpoints=())  # the picker's choice has failed
                decision = self._dispatcher.choose_worker(
                    summary,
                    excluded,
                    ignore_capacity_limits=routed.has_reply_started,
                    is_suspect=routed.is_suspect,
                )
                routed.attempts_since_output += 1
                if routed.last_failure is None:
                    return decision
                if not routed.has_reply_started:
                    self._metrics.retries[routed.last_failure.reason] += 1
                return replace(decision, reason=RoutingReason.RETRY)
        except EmberlineError as e:
            if routed.last_failure is None and not isinstance(e, EngineUnavailable):
                self._metrics.refused += isinstance(e, Overloaded)
                raise
            routed.no_worker_error, routed.interrupted_at = e, routed.interrupted_at or self._now()
        drained, routed.drained_decision = routed.drained_decision, None
        return self._dispatcher.reuse_decision_if_available(drained) if drained is not None else None

    async def _wait_for_worker(self, routed: RoutedRequest) -> RoutingDecision | None:
        """Wait up to `migration_wait` seconds until a worker is available, and return it.

        Return None if the request may not wait or no worker becomes available. The worker may be one that was already
        tried."""
        with self.waiting_requests.add(routed.summary.model):
            while self.waiting_requests.total <= MAX_WAITING_REQUESTS and routed.can_wait_for_worker(
                self._config.migration_wait, self._now()
            ):
                routed.handle_event(RequestEvent.NO_WORKER_YET)
                pause_s = FIRST_RETRY_PAUSE_S + (self._now() - routed.interrupted_at) / 4
                await asyncio.sleep(min(pause_s, MAX_RETRY_PAUSE_S))
                routed.allow_tried_workers_again()
                routed.summary = self._dispatcher.fill_in_default_model(routed.summary)
                if (decision := self._choose_next_worker(routed)) is not None:
                    return decision
            return None

    async def _try_worker(self, routed: RoutedRequest, decision: RoutingDecision) -> AttemptFailure | None:
        routed.total_attempts += 1
        routed.worker_times_out_itself = decision.worker.dialect == "native"
        self._extend_output_deadline(routed, force=True)
        with self._dispatcher.open_attempt(routed.summary, decision) as attempt:
            routed.start_attempt_trace(attempt, "resume" if routed.has_reply_started else "plain")
            attempt.is_movable = routed.can_migrate_on_drain
            try:
                had_started = routed.has_reply_started
                failure = await self._start_prefill(routed, attempt)
                if failure is not None or routed.has_reply_started != had_started:
                    return failure
                url, request = (
                    self._dispatcher.worker_url(decision.worker),
                    await routed.build_worker_request(decision.worker, self._now()),
                )
                if request is None:
                    attempt.outcome = "refused"
                    return AttemptFailure("unable")
                async with attempt.open_reply(self._client, url, request) as reply:
                    return await self._relay_reply(routed, reply, attempt, is_resume=request.target == RESUME_PATH)
            except (UpstreamUnreachable, UpstreamBroken, InvalidWorkerReply, EngineUnavailable) as e:
                log.debug("Attempt failed: worker=%s error=%s", decision.worker.name, e)
                if attempt.abort_reason in ("drained", "prefill"):  # the worker itself is healthy
                    attempt.outcome = "moved" if attempt.abort_reason == "drained" else "refused"
                    return AttemptFailure(attempt.abort_reason)
                attempt.outcome = "failed"
                if isinstance(e, UpstreamUnreachable | EngineUnavailable):
                    return AttemptFailure("unreached")
                return AttemptFailure(
                    attempt.abort_reason or ("garbled" if isinstance(e, InvalidWorkerReply) else "broken"),
                    is_crash=True,
                )

    async def _start_prefill(self, routed: RoutedRequest, attempt: WorkerAttempt) -> AttemptFailure | None:
        """Let a prefill worker compute the prompt if that is worthwhile, and wait for the ticket for its KV blocks.

        If the prefill worker rejects the request as invalid, its reply is passed to the client. Return a failure if the
        answering worker cannot compute the prompt itself and no prefill worker is available."""
        worker = attempt.decision.worker
        dialect = routed.dialect_for(worker)
        is_required = worker.role == "decode" and not dialect.decode_worker_can_prefill
        if (
            not routed.is_generation
            or not (routed.can_split_prefill or is_required)
            or (routed.has_reply_started and worker.dialect != "native")
        ):
            return None
        routed.can_split_prefill = False
        timeout_s = self._config.ticket_timeout
        decision = None
        if routed.drained_decision is not None:
            decision = self._dispatcher.choose_kv_source_for_moved_stream(
                routed.summary, routed.output_token_count, attempt.decision, routed.drained_decision.worker
            )
        if decision is not None:
            timeout_s = HANDOVER_TIMEOUT_S
        else:
            decision = self._dispatcher.choose_prefill_worker(routed.summary, attempt.decision, is_required=is_required)
        if decision is None:
            return AttemptFailure("no prefill") if is_required else None
        await routed.close_prefill()
        missing_tokens = attempt.decision.load.prefill_tokens
        worker.remove_prefill_load(attempt.id)
        deadline = min(routed.deadline, self._now() + self._config.token_timeout)
        peer = self._dispatcher.engine_peer_address(decision.worker, routed.summary.model)
        prepared = await routed.run_dialect_method(dialect.build_prefill_request, peer, deadline - self._now())
        prefill = routed.prefill = RemotePrefill(
            self._dispatcher, self._client, routed.summary, decision, dialect, prepared, deadline
        )
        routed.start_attempt_trace(prefill.attempt, "prefill")
        if is_required:
            prefill.set_dependent_attempt(attempt)
        refusal = await prefill.wait_for_ticket(decision.wait_s + timeout_s)
        if refusal is not None and not routed.has_reply_started:
            attempt.outcome = "refused"
            routed.handle_event(RequestEvent.FIRST_OUTPUT)
            await routed.exchange.reply(refusal.status, refusal.body, *content_type_and_headers(refusal.headers))
        elif prefill.ticket is None:
            worker.add_prefill_load(attempt.id, missing_tokens)
        return None

    async def _give_up(self, routed: RoutedRequest) -> None:
        failure, x = routed.last_failure, routed.exchange
        if failure is None:
            assert routed.no_worker_error is not None
            raise routed.no_worker_error
        log.info("Request abandoned: path=%s attempts=%d reason=%s", x.path, routed.total_attempts, failure.reason)
        if routed.is_suspect and routed.summary.digest:
            self._suspects.add(routed.summary.digest, self._now())
        if routed.has_reply_started:
            if routed.migration_reason and not routed.tracker.has_ended:
                self._metrics.migrations[routed.migration_reason, "given up"] += 1
            await self._end_broken_reply(
                routed,
                _workers_crashed_error(routed) if routed.exceeds_crash_limit else self._worker_lost_error(routed),
            )
        elif routed.exceeds_crash_limit:
            raise _workers_crashed_error(routed)
        elif failure.status:
            await x.reply(failure.status, failure.body, *content_type_and_headers(failure.headers or {}))
        else:
            raise _no_worker_error(routed, failure)

    def _worker_lost_error(self, routed: RoutedRequest) -> WorkerLost:
        difference = (
            self._dispatcher.describe_numerics_difference(routed.summary.model, routed.output_worker)
            if routed.output_worker is not None
            else ""
        )
        if not difference:
            return WorkerLost(routed.loss_message)
        message = f"{routed.loss_message}; the ready workers compute {routed.summary.model!r} differently: {difference}"
        return WorkerLost(message, hint="retry the request; start all workers of a model with the same settings")

    async def _end_broken_reply(self, routed: RoutedRequest, error: EmberlineError) -> None:
        """Send an error event to the client, if the reply is a stream and its last event is complete.

        Otherwise raise the error. The caller then replies with the error or, if the reply has started, closes the
        connection, so that the client sees that the reply is incomplete."""
        x, tracker = routed.exchange, routed.tracker
        if not routed.has_reply_started or not tracker.has_output or tracker.is_mid_event:
            raise error
        if not tracker.has_ended:
            self._metrics.broken += 1
            x.log_fields["error"] = error.code
        log.warning("Stream ended with an error: path=%s error=%s", x.path, error)
        try:
            async with asyncio.timeout(ERROR_SEND_TIMEOUT_S):
                await x.send(b"" if tracker.has_ended else _error_event(x.path, error, tracker.event_count), last=True)
        except TimeoutError:
            raise error from None


def _no_worker_error(routed: RoutedRequest, failure: AttemptFailure) -> EngineUnavailable:
    if routed.is_suspect:
        message = (
            f"{routed.crash_count} workers failed while serving this request, "
            "and too few healthy workers are left to try it again"
        )
        return EngineUnavailable(message, hint=RETRY_HINT)
    attempts = "1 attempt" if routed.total_attempts == 1 else f"{routed.total_attempts} attempts"
    message = f"no worker answered in {attempts}; the last attempt failed with {failure.reason!r}"
    return EngineUnavailable(message, hint="retry in a few seconds")


def _workers_crashed_error(routed: RoutedRequest) -> WorkersCrashed:
    workers = "another worker" if routed.is_known_suspect else f"{routed.crash_count} workers"
    hint = "the request may be the cause: see the workers' logs, and do not send it again unchanged"
    return WorkersCrashed(f"{workers} failed while serving this request", hint=hint)


def _error_event(path: str, error: EmberlineError, event_count: int) -> bytes:
    """Return an error event in the format of the API at this path, and the final event if that API has one."""
    if path == "/v1/messages":
        return sse.encode_named_event("error", render_anthropic_error(error).body)
    if path == "/v1/responses":
        event = {
            "type": "error",
            "code": error.code,
            "message": str(error),
            "param": None,
            "sequence_number": event_count,
        }
        return sse.encode_named_event("error", event)
    return sse.encode_data_event(render_openai_error(error).body) + sse.DONE_EVENT
