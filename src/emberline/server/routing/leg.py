"""WorkerAttempt: one attempt to serve a request at one worker, until its reply ends or is aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from emberline.router.ask import Ask
from emberline.router.call import Call
from emberline.router.chains import Link
from emberline.router.policy import Decision, Why
from emberline.router.upstream import Broken, Reply, Upstream
from emberline.router.usage import Usage
from emberline.trace.context import PARENT
from emberline.trace.span import Kind, Span

Outcome = Literal["answered", "refused", "failed", "left", "moved"]
# refused: by a healthy worker; left: the client disconnected; moved: to another worker because of a drain
AFFINITY = {Why.SESSION: "kept", Why.PREFIX: "kept", Why.YIELDED: "lost", Why.AWAY: "lost"}


@dataclass(slots=True)
class Leg:
    key: int
    ask: Ask
    decision: Decision
    began: float
    heard: float  # when the last bytes arrived
    first: float | None = None  # when the first bytes arrived
    movable: bool = False  # another worker can continue it, so that a drain may move it
    lost: str = ""  # why it was aborted; "" if it was not
    outcome: Outcome = "left"  # unless the attempt ends otherwise
    usage: Usage = field(default_factory=Usage)
    link: Link | None = None  # last block of the prompt, if the worker reported it
    status: int = 0  # HTTP status of the reply; 0 before it starts
    span: Span | None = None  # None: not traced
    _timer: asyncio.Timeout | None = None  # set while waiting for the reply to start
    _reply: Reply | None = None

    @asynccontextmanager
    async def asked(self, upstream: Upstream, url: str, call: Call) -> AsyncIterator[Reply]:
        """Send the request and yield the reply.

        An abort raises the connection error while waiting for the reply or reading it, never while the caller passes on
        what it has read."""
        try:
            if self.lost:
                raise TimeoutError
            if self.span is not None:
                call = call.with_headers({PARENT: str(self.span.context)})
            async with asyncio.timeout(None) as self._timer:
                self._reply = await upstream.request(url, call)
            self.status = self._reply.status
        except TimeoutError as e:
            raise Broken(self.lost) from e
        finally:
            self._timer = None
        try:
            if self.lost:  # aborted just as the reply started: too late for the timeout, too early for Reply.abort
                raise Broken(self.lost)
            yield self._reply
        finally:
            self._reply.close()
            self._reply = None

    def cut(self, reason: str) -> None:
        """End the attempt at once with a connection error for its reader; the first reason is kept."""
        self.lost = self.lost or reason
        if self._reply is not None:
            self._reply.abort(reason)
        elif self._timer is not None and not self._timer.expired():
            self._timer.reschedule(0.0)

    def trace(self, request: Span, kind: str, attempt: int) -> None:
        """Start a span below the request's own. `kind`: plain, prefill or resume."""
        decision = self.decision
        if decision.why not in (Why.SPLIT, Why.AGAIN):
            request.about |= {
                "emberline.route.why": decision.why.value,
                "emberline.route.affinity": AFFINITY.get(decision.why, "none"),
            }
        self.span = request.child(f"{kind} leg", Kind.CLIENT)
        self.span.about |= {
            "emberline.leg.kind": kind,
            "emberline.leg.attempt": attempt,
            "emberline.worker": decision.worker.name,
            "emberline.route.why": decision.why.value,
            "emberline.route.known_tokens": round(decision.known),  # estimated
            "emberline.route.missing_tokens": round(decision.load.prefill),  # estimated
        }

    def end_trace(self) -> None:
        if self.span is None:
            return
        self.span.about |= {
            "emberline.leg.outcome": self.outcome,
            "emberline.leg.lost": self.lost or None,
            "emberline.leg.first_byte_seconds": None if self.first is None else self.first - self.began,
            "http.response.status_code": self.status or None,
        }
        error_status = str(self.status) if self.status >= 400 else ""
        self.span.end((error_status or self.lost or self.outcome) if self.outcome in ("refused", "failed") else "")
