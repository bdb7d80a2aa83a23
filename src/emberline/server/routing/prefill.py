"""Prefill: the leg that computes a prompt for another worker. It gives a ticket for the blocks as soon as there are any
and goes on beside the leg that answers; what becomes of it later, that one sees for itself."""

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

GRACE = 1.0  # seconds to end by itself, once nobody needs it
BROKE = ("broken", "lost", "stuck", "status 500")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The call itself is bad: any worker would say the same."""

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
        """`made`: by the dialect's `prefill`."""
        self.worker, self.dialect = decision.worker, dialect
        self.failed = ""  # why, if it did
        self.crashed = False  # its worker broke under it, or so it may be
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
        self.left = dialect.detached  # nobody needs it any more, or it does not matter
        self._task = asyncio.create_task(self._run(call))

    def needed_by(self, leg: Leg) -> None:
        """Who waits for its blocks is told if it fails, and cannot find out by itself."""
        self._needing = leg

    async def begun(self, patience: float) -> Refusal | None:
        """When there is a ticket, or it is clear that there will be none."""
        try:
            async with asyncio.timeout(patience):
                return await asyncio.shield(self._first)
        except TimeoutError:
            self.failed = "late"
            self._task.cancel()
            return None

    def leave(self) -> None:
        """Nobody needs it any more, and it may be about to end."""
        if not self.left:
            self.left = True
            asyncio.get_running_loop().call_later(GRACE, self._task.cancel)

    async def close(self) -> None:
        if self.left:  # it ends by itself
            self._dispatch.detach(self._task)
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._account.close()  # it may never have begun

    async def _run(self, call: Call) -> None:
        how, leg = "left", self.leg
        with self._account:
            try:
                async with asyncio.timeout_at(self._deadline):
                    url = self._dispatch.url(self.worker)
                    async with leg.asked(self._upstream, url, call) as reply:
                        await self._heard(leg, reply)
                how = "done" if self.ticket else "no ticket"
            except (Unreached, Broken, Garbled, EngineUnavailable, TimeoutError) as e:
                leg.outcome = "failed"
                self.failed = leg.lost or ("unreached" if isinstance(e, Unreached) else "broken")
                log.info("prefill at %s: %s (%s)", self.worker.name, self.failed, e)
            finally:
                self._dispatch.metrics.prefills[self.failed or how] += 1
                self.crashed = self.failed in BROKE
                if self.failed and self._needing is not None and self._needing.first is None:
                    self._needing.cut("prefill")
                if not self._first.done():
                    self._first.set_result(None)

    async def _heard(self, leg: Leg, reply: Reply) -> None:
        if reply.status != 200:
            said = await reply.whole()
            ours = reply.status < 500 and reply.status not in (401, 403, 404, 408, 409, 429)
            leg.outcome = "failed" if reply.status in (502, 503) else "refused"
            self.failed = f"status {reply.status}"
            if not self._first.done():
                self._first.set_result(Refusal(reply.status, dict(reply.headers), said) if ours else None)
            return
        while data := await reply.read():
            if self._take(self._words.push(data)):
                return
        if not self._take(self._words.close()):
            raise Broken("it ended early")

    def _take(self, words: Iterable[Word]) -> bool:
        """Whether it is done."""
        for word in words:
            self._dispatch.heard(self.leg)
            if word.error is not None:
                raise Broken(str(word.error)[:200])
            if word.done is not None:
                self.leg.outcome = "answered"
                return True
            self.ticket = word.ticket
            if not self._first.done():
                self._first.set_result(None)
        return False
