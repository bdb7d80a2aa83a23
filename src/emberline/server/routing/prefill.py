"""RemotePrefill: an attempt at a prefill worker, which computes a prompt for another worker.

It yields a ticket for the KV blocks as soon as there are any, and then runs beside the answering attempt, which
detects later failures itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from emberline.core.errors import EngineUnavailable
from emberline.router.ask import Ask
from emberline.router.call import Call
from emberline.router.dialect import Dialect, Garbled, Ticket, Word, Words
from emberline.router.policy import Decision
from emberline.router.upstream import Broken, Reply, Unreached, Upstream
from emberline.server.routing.dispatch import Dispatch
from emberline.server.routing.leg import Leg

log = logging.getLogger("emberline.router")

GRACE = 1.0  # between release and cancellation
BROKE = ("broken", "lost", "stuck", "status 500")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reply that rejects the request itself: every worker would reject it."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Prefill:
    def __init__(
        self,
        dispatch: Dispatch,
        upstream: Upstream,
        ask: Ask,
        decision: Decision,
        dialect: Dialect,
        made: tuple[Call, Words, Ticket | None],
        deadline: float,
    ) -> None:
        """`prepared` is the result of the dialect's `build_prefill_request`."""
        self.worker, self.dialect = decision.worker, dialect
        self.failed = ""  # reason; "" if it has not failed
        self.crashed = False
        self._dispatch = dispatch
        self._upstream = upstream
        self._deadline = deadline
        loop = asyncio.get_running_loop()
        call, self._words, self.ticket = made
        self._account = contextlib.ExitStack()
        self.leg = self._account.enter_context(dispatch.opened(ask, decision))
        self._first: asyncio.Future[Refusal | None] = loop.create_future()
        if self.ticket is not None:
            self._first.set_result(None)
        self._needing: Leg | None = None
        self.left = dialect.detached  # no attempt depends on it, or it runs to its end in any case
        self._task = asyncio.create_task(self._run(call))

    def needed_by(self, leg: Leg) -> None:
        """Abort `attempt` if this prefill fails.

        Its worker waits for the blocks and cannot detect the failure itself."""
        self._needing = leg

    async def begun(self, patience: float) -> Refusal | None:
        """Wait until there is a ticket or there can be none; return a refusal of the request."""
        try:
            async with asyncio.timeout(patience):
                return await asyncio.shield(self._first)
        except TimeoutError:
            self.failed = "late"
            self._task.cancel()
            return None

    def leave(self) -> None:
        """Cancel the prefill after a grace period: no attempt needs it, but it may be about to end."""
        if not self.left:
            self.left = True
            asyncio.get_running_loop().call_later(GRACE, self._task.cancel)

    async def close(self) -> None:
        if self.left:  # it ends without help
            self._dispatch.detach(self._task)
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._account.close()  # the task may have been cancelled before it started

    async def _run(self, call: Call) -> None:
        ending, leg = "left", self.leg
        with self._account:
            try:
                async with asyncio.timeout_at(self._deadline):
                    url = self._dispatch.url(self.worker)
                    async with leg.asked(self._upstream, url, call) as reply:
                        await self._heard(leg, reply)
                ending = "done" if self.ticket else "no ticket"
            except (Unreached, Broken, Garbled, EngineUnavailable, TimeoutError) as e:
                leg.outcome = "failed"
                self.failed = leg.lost or ("unreached" if isinstance(e, Unreached) else "broken")
                log.info("prefill failed: worker=%s reason=%s error=%s", self.worker.name, self.failed, e)
            finally:
                self._dispatch.metrics.prefills[self.failed or ending] += 1
                self.crashed = self.failed in BROKE
                if self.failed and self._needing is not None and self._needing.first is None:
                    self._needing.cut("prefill")
                if not self._first.done():
                    self._first.set_result(None)

    async def _heard(self, leg: Leg, reply: Reply) -> None:
        if reply.status != 200:
            body = await reply.whole()
            is_client_error = reply.status < 500 and reply.status not in (401, 403, 404, 408, 409, 429)
            leg.outcome = "failed" if reply.status in (502, 503) else "refused"
            self.failed = f"status {reply.status}"
            if not self._first.done():
                self._first.set_result(Refusal(reply.status, dict(reply.headers), body) if is_client_error else None)
            return
        while data := await reply.read():
            if self._take(self._words.push(data)):
                return
        if not self._take(self._words.close()):
            raise Broken("the prefill reply ended before its completion message")

    def _take(self, words: Iterable[Word]) -> bool:
        """Apply messages of the reply and return whether the prefill is complete."""
        for message in words:
            self._dispatch.heard(self.leg)
            if message.error is not None:
                raise Broken(str(message.error)[:200])
            if message.done is not None:
                self.leg.outcome = "answered"
                return True
            self.ticket = message.ticket
            if not self._first.done():
                self._first.set_result(None)
        return False
