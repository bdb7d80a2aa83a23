"""RemotePrefill: runs a prompt at a prefill worker, so that a different worker can fetch the KV blocks and answer.

The prefill worker sends a ticket (the right to fetch the blocks) as soon as the first blocks exist. The answering
worker then starts, while the prefill continues in a background task."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from emberline.core.errors import EngineUnavailable
from emberline.router.dialect import InvalidWorkerReply, PrefillMessage, PrefillReplyParser, Ticket, WorkerDialect
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.worker_attempt import WorkerAttempt
from emberline.router.policy import RoutingDecision
from emberline.router.request_summary import RequestSummary
from emberline.router.upstream_request import UpstreamRequest
from emberline.router.worker_client import HTTPClientResponse, UpstreamBroken, UpstreamUnreachable, WorkerClient

log = logging.getLogger("emberline.router")

FINISH_GRACE_S = 1.0  # between release and cancellation
CRASH_REASONS = ("broken", "lost", "stuck", "status 500")


@dataclass(frozen=True, slots=True)
class PrefillRefusal:
    """A prefill worker's error reply to an invalid request, which every worker would reject."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class RemotePrefill:
    def __init__(
        self,
        dispatcher: Dispatcher,
        client: WorkerClient,
        summary: RequestSummary,
        decision: RoutingDecision,
        dialect: WorkerDialect,
        prepared: tuple[UpstreamRequest, PrefillReplyParser, Ticket | None],
        deadline: float,
    ) -> None:
        """`prepared` is the result of the dialect's `build_prefill_request`."""
        self.worker, self.dialect = decision.worker, dialect
        self.failure = ""  # reason; "" if it has not failed
        self.may_have_crashed_worker = False
        self._dispatcher = dispatcher
        self._client = client
        self._deadline = deadline
        loop = asyncio.get_running_loop()
        request, self._parser, self.ticket = prepared
        self._attempt_scope = contextlib.ExitStack()
        self.attempt = self._attempt_scope.enter_context(dispatcher.open_attempt(summary, decision))
        self._ticket_or_refusal: asyncio.Future[PrefillRefusal | None] = loop.create_future()
        if self.ticket is not None:
            self._ticket_or_refusal.set_result(None)
        self._dependent_attempt: WorkerAttempt | None = None
        self.is_released = dialect.runs_prefill_to_end  # no attempt depends on it, or it runs to its end in any case
        self._task = asyncio.create_task(self._run_prefill(request))

    def set_dependent_attempt(self, attempt: WorkerAttempt) -> None:
        """Abort `attempt` when this prefill fails.

        The worker of `attempt` waits for the KV blocks and cannot detect that the prefill has failed."""
        self._dependent_attempt = attempt

    async def wait_for_ticket(self, timeout_s: float) -> PrefillRefusal | None:
        """Wait until the ticket arrives or the prefill fails. Cancel the prefill after `timeout_s`.

        Return the prefill worker's error reply if it rejected the request as invalid, else None."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._ticket_or_refusal)
        except TimeoutError:
            self.failure = "late"
            self._task.cancel()
            return None

    def cancel_after_grace_period(self) -> None:
        """Cancel the prefill, which no attempt needs any longer, unless it ends within `FINISH_GRACE_S`."""
        if not self.is_released:
            self.is_released = True
            asyncio.get_running_loop().call_later(FINISH_GRACE_S, self._task.cancel)

    async def close(self) -> None:
        if self.is_released:  # it ends without help
            self._dispatcher.keep_task_alive(self._task)
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._attempt_scope.close()  # the task may have been cancelled before it started

    async def _run_prefill(self, request: UpstreamRequest) -> None:
        ending, attempt = "left", self.attempt
        with self._attempt_scope:
            try:
                async with asyncio.timeout_at(self._deadline):
                    url = self._dispatcher.worker_url(self.worker)
                    async with attempt.open_reply(self._client, url, request) as reply:
                        await self._read_reply(attempt, reply)
                ending = "done" if self.ticket else "no ticket"
            except (UpstreamUnreachable, UpstreamBroken, InvalidWorkerReply, EngineUnavailable, TimeoutError) as e:
                attempt.outcome = "failed"
                self.failure = attempt.abort_reason or ("unreached" if isinstance(e, UpstreamUnreachable) else "broken")
                log.info("Prefill failed: worker=%s reason=%s error=%s", self.worker.name, self.failure, e)
            finally:
                self._dispatcher.metrics.prefills[self.failure or ending] += 1
                self.may_have_crashed_worker = self.failure in CRASH_REASONS
                if (
                    self.failure
                    and self._dependent_attempt is not None
                    and self._dependent_attempt.first_byte_at is None
                ):
                    self._dependent_attempt.abort("prefill")
                if not self._ticket_or_refusal.done():
                    self._ticket_or_refusal.set_result(None)

    async def _read_reply(self, attempt: WorkerAttempt, reply: HTTPClientResponse) -> None:
        if reply.status != 200:
            body = await reply.read_all()
            is_client_error = reply.status < 500 and reply.status not in (401, 403, 404, 408, 409, 429)
            attempt.outcome = "failed" if reply.status in (502, 503) else "refused"
            self.failure = f"status {reply.status}"
            if not self._ticket_or_refusal.done():
                self._ticket_or_refusal.set_result(
                    PrefillRefusal(reply.status, dict(reply.headers), body) if is_client_error else None
                )
            return
        while data := await reply.read():
            if self._apply_messages(self._parser.push(data)):
                return
        if not self._apply_messages(self._parser.finish()):
            raise UpstreamBroken("the prefill worker's reply ended without its final message")

    def _apply_messages(self, messages: Iterable[PrefillMessage]) -> bool:
        """Process messages of the prefill worker's reply, and return whether the prefill is complete."""
        for message in messages:
            self._dispatcher.record_activity(self.attempt)
            if message.error is not None:
                raise UpstreamBroken(str(message.error)[:200])
            if message.done is not None:
                self.attempt.outcome = "answered"
                return True
            self.ticket = message.ticket
            if not self._ticket_or_refusal.done():
                self._ticket_or_refusal.set_result(None)
        return False
