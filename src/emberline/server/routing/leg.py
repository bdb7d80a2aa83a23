"""Leg: one request at one worker, from when it is sent until its reply has ended or it was cut off."""

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
# refused: by a worker that is well; left: by the client; moved: to another worker, as somebody wished
AFFINITY = {Why.SESSION: "kept", Why.PREFIX: "kept", Why.YIELDED: "lost", Why.AWAY: "lost"}


@dataclass(slots=True)
class Leg:
    key: int
    ask: Ask
    decision: Decision
    began: float
    heard: float  # when its last bytes came
    first: float | None = None  # when its first came
    movable: bool = False  # what it does can go on elsewhere, if somebody wishes
    lost: str = ""  # why it was cut off
    outcome: Outcome = "left"  # unless somebody knows better
    usage: Usage = field(default_factory=Usage)
    link: Link | None = None  # where its prompt ends, if the worker says so
    status: int = 0  # of the reply, when that has begun
    span: Span | None = None  # where it is traced
    _timer: asyncio.Timeout | None = None  # while it waits for the reply to begin
    _reply: Reply | None = None

    @asynccontextmanager
    async def asked(self, upstream: Upstream, url: str, call: Call) -> AsyncIterator[Reply]:
        """Broken as soon as it is cut off: while it waits or reads, never while what was read is passed on."""
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
            if self.lost:  # in the moment in which the reply began: too late for the timer, too early to abort it
                raise Broken(self.lost)
            yield self._reply
        finally:
            self._reply.close()
            self._reply = None

    def cut(self, reason: str) -> None:
        self.lost = self.lost or reason
        if self._reply is not None:
            self._reply.abort(reason)
        elif self._timer is not None and not self._timer.expired():
            self._timer.reschedule(0.0)  # at once

    def trace(self, request: Span, kind: str, attempt: int) -> None:
        """Below the request's own span. `kind`: plain, prefill or resume."""
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
            "emberline.route.known_tokens": round(decision.known),  # these two are estimates
            "emberline.route.missing_tokens": round(decision.load.prefill),
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
        refused = str(self.status) if self.status >= 400 else ""
        self.span.end((refused or self.lost or self.outcome) if self.outcome in ("refused", "failed") else "")
