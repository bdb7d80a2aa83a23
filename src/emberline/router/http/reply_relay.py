"""ReplyRelay: passes one worker's reply to the client: complete, in chunks, or as an event stream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from emberline.core.config import RouterConfig
from emberline.router.dialect import CHAIN_HEADER, PRIVATE_HEADER_PREFIX, InvalidWorkerReply
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.routed_request import AttemptFailure, RoutedRequest
from emberline.router.http.worker_attempt import WorkerAttempt
from emberline.router.reply_usage import ReplyUsage
from emberline.router.request_state import RequestEvent, RequestState
from emberline.router.stream_tracker import parse_block_position
from emberline.router.worker_client import HTTPClientResponse, UpstreamBroken

# Up to this size a reply is read completely before it is passed on, so that it can be retried.
MAX_BUFFERED_REPLY_BYTES = 1 << 20
DEADLINE_EXTENSION_INTERVAL_S = 1.0  # rescheduling a timer for every token would cost too much CPU time
HOP_BY_HOP_HEADERS = frozenset({"connection", "keep-alive", "proxy-authenticate", "proxy-authorization",
                                "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host",
                                "content-length", "accept-encoding", "expect", CHAIN_HEADER})  # fmt: skip


class ReplyRelay:
    """The base class of Relay. Its methods pass a worker's reply to the client."""

    def __init__(self, dispatcher: Dispatcher, config: RouterConfig) -> None:
        self._dispatcher = dispatcher
        self._config = config
        self._metrics = dispatcher.metrics

    def _extend_output_deadline(self, routed: RoutedRequest, *, force: bool = False) -> None:
        """Move the deadline for the next output to `token_timeout` from now.

        It never becomes later than the deadline of the whole request. Calls within `DEADLINE_EXTENSION_INTERVAL_S` of
        the previous extension have no effect, unless `force` is set."""
        now = self._now()
        if routed.output_timeout is None or (
            now < routed.timeout_extended_at + DEADLINE_EXTENSION_INTERVAL_S and not force
        ):
            return
        routed.timeout_extended_at, config = now, self._config
        deadline = min(routed.deadline, now + config.token_timeout if routed.needs_output_timeout else math.inf)
        routed.output_timeout.reschedule(None if math.isinf(deadline) else deadline)

    async def _relay_reply(
        self, routed: RoutedRequest, reply: HTTPClientResponse, attempt: WorkerAttempt, *, is_resume: bool
    ) -> AttemptFailure | None:
        # No resume endpoint there, or another cluster key.
        cannot_resume = is_resume and reply.status in (401, 403, 404)
        if cannot_resume or reply.status in (429, 500, 502, 503) or (routed.has_reply_started and reply.status != 200):
            # The request itself may cause a 500, which therefore must not open the worker's circuit breaker. Neither
            # must an embedder that is being downloaded, or cannot be: the worker still generates text.
            is_worker_down = reply.status in (502, 503) and routed.is_generation
            attempt.outcome = "failed" if is_worker_down else "refused"
            body = await reply.read_all()
            if cannot_resume and routed.prefill is not None:
                routed.prefill.failure = "unable"
            reason = "unable" if cannot_resume and not routed.has_reply_started else f"status {reply.status}"
            return AttemptFailure(reason, reply.status == 500, reply.status, dict(reply.headers), body)
        content_length = reply.headers.get("content-length", "")
        if content_length.isdigit() and int(content_length) <= MAX_BUFFERED_REPLY_BYTES:
            await self._relay_buffered_reply(routed, reply, attempt)
        elif reply.headers.get("content-type", "").startswith("text/event-stream"):
            await self._relay_event_stream(routed, reply, attempt)
        else:
            await self._relay_chunked_reply(routed, reply, attempt)
        attempt.outcome = "answered"
        if routed.prefill is not None:
            routed.prefill.cancel_after_grace_period()
        return None

    async def _relay_buffered_reply(
        self, routed: RoutedRequest, reply: HTTPClientResponse, attempt: WorkerAttempt
    ) -> None:
        body = await reply.read_all()
        if routed.has_reply_started:
            raise InvalidWorkerReply("the worker continued a stream with a reply that is not a stream")
        self._dispatcher.record_reply_bytes(attempt, 0)
        attempt.usage = ReplyUsage.parse(body[-2048:])
        if CHAIN_HEADER in reply.headers:
            self._dispatcher.record_prompt_end(attempt, parse_block_position(reply.headers[CHAIN_HEADER]))
        routed.handle_event(RequestEvent.FIRST_OUTPUT)
        await routed.exchange.reply(reply.status, body, *content_type_and_headers(reply.headers, routed, attempt))

    async def _relay_chunked_reply(
        self, routed: RoutedRequest, reply: HTTPClientResponse, attempt: WorkerAttempt
    ) -> None:
        if routed.has_reply_started:
            raise InvalidWorkerReply("the worker continued a stream with a reply that is not an event stream")
        while data := await reply.read():
            self._extend_output_deadline(routed)
            if not routed.has_reply_started:
                await self._start_reply(routed, reply, attempt, keep_content_length=True)
            self._dispatcher.record_reply_bytes(attempt, 0)
            await routed.exchange.send(data)
        if not routed.has_reply_started:
            await self._start_reply(routed, reply, attempt, keep_content_length=True)
        await routed.exchange.send(last=True)

    async def _relay_event_stream(
        self, routed: RoutedRequest, reply: HTTPClientResponse, attempt: WorkerAttempt
    ) -> None:
        x, tracker = routed.exchange, routed.tracker
        while data := await reply.read():
            count_before = tracker.event_count
            if not (output := tracker.push(data)):
                continue
            self._extend_output_deadline(routed)
            if attempt.first_byte_at is None:
                await self._handle_first_output(routed, reply, attempt)
            self._dispatcher.record_reply_bytes(attempt, tracker.event_count - count_before)
            await x.send(output)
        if tracker.is_movable:
            raise UpstreamBroken("the stream ended before its final event")
        attempt.usage = ReplyUsage.parse(tracker.first_chunk[:2048], tracker.last_chunk[-2048:])
        if routed.state is not RequestState.RELAYING:  # the stream contained no complete event
            await self._start_reply(routed, reply, attempt)
        await x.send(tracker.take_remaining_bytes(), last=True)

    async def _handle_first_output(
        self, routed: RoutedRequest, reply: HTTPClientResponse, attempt: WorkerAttempt
    ) -> None:
        """Start the reply to the client if it has not started, and record that this worker now sends it."""
        if not routed.has_reply_started:
            self._metrics.first_token_seconds.observe(self._now() - routed.arrived_at)
        await self._start_reply(routed, reply, attempt)
        if routed.migration_reason:
            self._metrics.migrations[routed.migration_reason, "went on"] += 1
        if routed.prefill is not None:
            routed.prefill.cancel_after_grace_period()
        if routed.tracker.prompt_end is not None:
            self._dispatcher.record_prompt_end(attempt, routed.tracker.prompt_end)
        routed.record_output_from(attempt.decision.worker)
        attempt.is_movable = routed.can_migrate_on_drain and routed.tracker.is_movable

    async def _start_reply(
        self,
        routed: RoutedRequest,
        reply: HTTPClientResponse,
        attempt: WorkerAttempt,
        *,
        keep_content_length: bool = False,
    ) -> None:
        """Record the worker's first output, and send status and headers if the client does not have them yet.

        `keep_content_length`: the body is passed on unchanged, so the worker's content-length header is kept."""
        is_resumed = routed.has_reply_started
        routed.handle_event(RequestEvent.FIRST_OUTPUT)
        if is_resumed:
            return
        content_type, headers = content_type_and_headers(reply.headers, routed, attempt)
        # A compressed body is relayed uncompressed, so its content-length does not apply.
        if keep_content_length and "content-length" in reply.headers and "content-encoding" not in reply.headers:
            headers["content-length"] = reply.headers["content-length"]
        await routed.exchange.start_reply(reply.status, content_type, headers)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def content_type_and_headers(
    worker_headers: Mapping[str, str], routed: RoutedRequest | None = None, attempt: WorkerAttempt | None = None
) -> tuple[str, dict[str, str]]:
    """Return the content-type and the other headers of the reply to the client.

    The other headers are the worker's headers without the hop-by-hop headers and content-encoding. Headers that name
    the answering worker and the prefill worker are added."""
    kept = {name.lower(): value for name, value in worker_headers.items() if name.lower() not in HOP_BY_HOP_HEADERS}
    kept.pop("content-encoding", None)
    if attempt is not None:
        kept[f"{PRIVATE_HEADER_PREFIX}worker"] = attempt.decision.worker.name
    if routed is not None and routed.prefill is not None and routed.prefill.ticket is not None:
        kept[f"{PRIVATE_HEADER_PREFIX}prefill"] = routed.prefill.worker.name
    return kept.pop("content-type", "application/octet-stream"), kept
