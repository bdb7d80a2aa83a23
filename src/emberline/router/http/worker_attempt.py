"""WorkerAttempt: one attempt to serve a request at one worker, until the worker's reply ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from emberline.router.policy import RoutingDecision, RoutingReason
from emberline.router.prefix_block_map import BlockPosition
from emberline.router.reply_usage import ReplyUsage
from emberline.router.request_summary import RequestSummary
from emberline.router.upstream_request import UpstreamRequest
from emberline.router.worker_client import HTTPClientResponse, UpstreamBroken, WorkerClient
from emberline.trace.context import TRACEPARENT_HEADER
from emberline.trace.span import Span, SpanKind

AttemptOutcome = Literal["answered", "refused", "failed", "left", "moved"]
# refused: by a healthy worker; left: the client disconnected; moved: to another worker because of a drain
AFFINITY_BY_REASON = {
    RoutingReason.SESSION: "kept",
    RoutingReason.PREFIX: "kept",
    RoutingReason.PREFERRED_BUSY: "lost",
    RoutingReason.PREFERRED_UNAVAILABLE: "lost",
}


@dataclass(slots=True)
class WorkerAttempt:
    id: int
    summary: RequestSummary
    decision: RoutingDecision
    started_at: float
    last_activity_at: float  # when the last bytes arrived
    first_byte_at: float | None = None  # when the first bytes arrived
    is_movable: bool = False  # another worker can continue it, so that a drain may move it
    abort_reason: str = ""  # why it was aborted; "" if it was not
    outcome: AttemptOutcome = "left"  # unless the attempt ends otherwise
    usage: ReplyUsage = field(default_factory=ReplyUsage)
    prompt_end: BlockPosition | None = None  # last block of the prompt, if the worker reported it
    status: int = 0  # HTTP status of the reply; 0 before it starts
    span: Span | None = None  # None: not traced
    _reply_timeout: asyncio.Timeout | None = None  # set while waiting for the reply to start
    _reply: HTTPClientResponse | None = None

    @asynccontextmanager
    async def open_reply(
        self, client: WorkerClient, url: str, request: UpstreamRequest
    ) -> AsyncIterator[HTTPClientResponse]:
        """Send the request and yield the worker's reply.

        After `abort`, waiting for the reply and reading from it raise UpstreamBroken. Data that was read before `abort`
        can still be sent to the client."""
        try:
            if self.abort_reason:
                raise TimeoutError
            if self.span is not None:
                request = request.with_headers({TRACEPARENT_HEADER: str(self.span.context)})
            async with asyncio.timeout(None) as self._reply_timeout:
                self._reply = await client.request(url, request)
            self.status = self._reply.status
        except TimeoutError as e:
            raise UpstreamBroken(self.abort_reason) from e
        finally:
            self._reply_timeout = None
        try:
            # Aborted just as the reply started: too late for the timeout, too early for Reply.abort.
            if self.abort_reason:
                raise UpstreamBroken(self.abort_reason)
            yield self._reply
        finally:
            self._reply.close()
            self._reply = None

    def abort(self, reason: str) -> None:
        """Close the attempt's connection, so that reading the reply raises UpstreamBroken.

        Only the reason of the first call is kept."""
        self.abort_reason = self.abort_reason or reason
        if self._reply is not None:
            self._reply.abort(reason)
        elif self._reply_timeout is not None and not self._reply_timeout.expired():
            self._reply_timeout.reschedule(0.0)

    def start_trace(self, request_span: Span, kind: str, attempt_number: int) -> None:
        """Start a trace span for this attempt as a child of the request's span. `kind` is plain, prefill or resume."""
        decision = self.decision
        if decision.reason not in (RoutingReason.SPLIT, RoutingReason.RETRY):
            request_span.attributes |= {
                "emberline.route.why": decision.reason.value,
                "emberline.route.affinity": AFFINITY_BY_REASON.get(decision.reason, "none"),
            }
        self.span = request_span.start_child(f"{kind} leg", SpanKind.CLIENT)
        self.span.attributes |= {
            "emberline.leg.kind": kind,
            "emberline.leg.attempt": attempt_number,
            "emberline.worker": decision.worker.name,
            "emberline.route.why": decision.reason.value,
            "emberline.route.known_tokens": round(decision.cached_tokens),  # estimated
            "emberline.route.missing_tokens": round(decision.load.prefill_tokens),  # estimated
        }

    def end_trace(self) -> None:
        if self.span is None:
            return
        self.span.attributes |= {
            "emberline.leg.outcome": self.outcome,
            "emberline.leg.lost": self.abort_reason or None,
            "emberline.leg.first_byte_seconds": None
            if self.first_byte_at is None
            else self.first_byte_at - self.started_at,
            "http.response.status_code": self.status or None,
        }
        error_status = str(self.status) if self.status >= 400 else ""
        self.span.end(
            (error_status or self.abort_reason or self.outcome) if self.outcome in ("refused", "failed") else ""
        )
