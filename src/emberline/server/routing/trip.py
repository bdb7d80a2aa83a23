"""RoutedRequest: one client's request across all attempts at workers.

It holds the workers tried, their failures, and the part of the reply that the client has received."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ParamSpec, TypeVar

from emberline.core.handoff import Said
from emberline.core.offload import offload
from emberline.router.ask import Ask
from emberline.router.call import Call
from emberline.router.dialect import Dialect, Ticket
from emberline.router.native import Native
from emberline.router.policy import Decision
from emberline.router.sglang import SGLang
from emberline.router.track import Track
from emberline.router.vllm import VLLM
from emberline.router.worker import Worker
from emberline.server.exchange import Exchange
from emberline.server.routing.leg import Leg
from emberline.server.routing.prefill import Prefill

P = ParamSpec("P")
T = TypeVar("T")

CRASHES = 2  # workers that failed during one request make it a suspect; one more, and it is no longer tried


@dataclass(frozen=True, slots=True)
class Setback:
    """Why an attempt failed, so that another worker is tried.

    `status`, `headers` and `body` are those of the worker's reply, if there was one."""

    reason: str  # also a metric label
    crash: bool = False  # the worker may have crashed because of the request
    status: int = 0
    headers: Mapping[str, str] | None = None
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Break:
    """A worker that failed during the request: its process died, or only the connection broke."""

    worker: Worker
    engines: Mapping[str, str]  # incarnations of its engines at that time, by model

    @property
    def processes(self) -> tuple[str, frozenset[str]]:
        return self.worker.id, frozenset(self.engines.values())

    @property
    def stands(self) -> bool:
        """Whether the process must be assumed dead.

        It is, until a heartbeat of the same processes shows that they are healthy."""
        worker = self.worker
        return worker.doubted or not worker.ready or worker.peers != self.engines

    @property
    def open(self) -> bool:
        """Whether only the next heartbeat will tell if the worker survived."""
        return self.worker.doubted and self.worker.ready


@dataclass(slots=True)
class Trip:
    x: Exchange
    ask: Ask
    asked: Call  # without hop-by-hop headers
    seed: int
    created: int  # Unix time of the reply's `created` field
    key: str | None
    deadline: float  # of the whole request, on the event loop's clock; inf: none
    attempts: int  # attempts in a row without output
    migrations: int  # times that another worker may continue the stream
    generates: bool  # the path generates tokens
    accused: bool  # the same prompt was abandoned recently because workers failed while serving it
    foreign_key: str | None = None  # API key for vLLM and SGLang servers
    track: Track = field(default_factory=Track)
    prefill: Prefill | None = None
    may_split: bool = True  # a prefill worker may compute the prompt for the next attempt
    setback: Setback | None = None
    nobody: Exception | None = None  # why no worker could be chosen the last time
    moving: str = ""  # why the stream must move to another worker; "" once that worker has sent output
    since: float = 0.0  # start of the current wait for a worker
    lost: str = ""  # description of the last interruption, for the client
    tried: set[str] = field(default_factory=set)  # since the last output
    breaks: list[Break] = field(default_factory=list)
    moves: int = 0
    tries: int = 0
    legs: int = 0
    author: Worker | None = None  # the worker that generated the output which the client has
    origin: Decision | None = None  # the attempt that a drain interrupted
    limit: asyncio.Timeout | None = None  # for the next part of the reply
    extended: float = 0.0
    watched: bool = False  # the current worker itself ends requests that make no progress

    @property
    def shows_tokens(self) -> bool:
        """Whether the router can see that tokens are generated.

        A reply without a stream arrives only at its end."""
        return self.ask.stream or not self.generates or not self.watched

    @property
    def started(self) -> bool:
        """Whether the client has received the start of the reply."""
        return self.x.status is not None

    @property
    def goes_on(self) -> bool:
        """Whether another worker may be tried now."""
        return self.tries < self.attempts and self._may_go_on and not self.guilty

    @property
    def crashes(self) -> int:
        """Worker processes that failed; one whose connections broke twice counts once."""
        return len({failure.processes for failure in self.breaks if failure.stands})

    @property
    def suspect(self) -> bool:
        return self.accused or self.crashes >= CRASHES

    @property
    def guilty(self) -> bool:
        """Whether the request has probably crashed several workers and must not be tried again."""
        return self.crashes > (0 if self.accused else CRASHES)

    @property
    def _may_go_on(self) -> bool:
        """Whether the limits allow one more attempt, if a worker can be found."""
        if not self.started:
            return len(self.breaks) <= self.attempts
        return self._can_move and self.moves <= self.migrations

    @property
    def _can_move(self) -> bool:
        return self.track.started and self.track.movable

    @property
    def may_move(self) -> bool:
        """Whether a drain may move the request to another worker.

        The last migration is kept for failures: a drain can also wait."""
        return self.ask.stream and self.generates and self.moves < self.migrations

    def may_wait(self, patience: float, now: float) -> bool:
        """Whether the request may wait for a worker, at most `max_wait_s`.

        It may wait to continue a stream, and to start if workers were unavailable or none may take a suspect. It may
        not after a reply that all workers are full or that an engine failed, nor beyond the crash limit."""
        was_unavailable = self.setback is None or self.setback.status in (0, 502, 503)
        if self.guilty and not any(failure.open for failure in self.breaks):
            return False
        return (self.started or was_unavailable or self.suspect) and self._may_go_on and now - self.since < patience

    def waited(self) -> None:
        """Allow all workers once more, except those that failed and have sent no heartbeat since."""
        self.tried = {failure.worker.id for failure in self.breaks if failure.worker.doubted}
        self.tries = 0 if self.started else self.attempts - 1

    def progressed(self, worker: Worker) -> None:
        """Record that a worker has sent output.

        Earlier failed attempts no longer count; workers that failed are still excluded."""
        self.author = worker
        self.tries, self.moving, self.origin = 0, "", None
        self.tried = {failure.worker.id for failure in self.breaks}

    def broke(self, worker: Worker) -> None:
        """Record that a worker failed while serving this request, unless it is shutting down."""
        if not worker.left:
            self.breaks.append(Break(worker, worker.peers))
            worker.doubted = True

    def fell_back(self, setback: Setback, decision: Decision, now: float) -> None:
        """Record a failed attempt, and prepare the stream for another worker if one can continue it."""
        self._trace_setback(setback, decision.worker)
        self.setback = setback
        if setback.reason == "drained":
            self.origin = None if self.track.ended else decision
        elif setback.reason != "unable" or self.started:
            self.tried.add(decision.worker.id)
        if setback.crash:
            self.broke(decision.worker)
        if (prefill := self.prefill) is not None and prefill.crashed:
            prefill.crashed = False  # counted once
            self.broke(prefill.worker)
        if not self.started:
            self.track = Track()
            self.since = now if setback.crash or not self.since else self.since
        elif not self.moving:
            self.lost = f"worker {decision.worker.name} was lost ({setback.reason}) before the reply was complete"
        if self._can_move:
            self.track.moved()
            self.moves += not self.moving
            self.may_split = self.may_split or not self.moving
            self.since = self.since if self.moving else now
            self.moving = self.moving or setback.reason

    def speak(self, to: Worker) -> Dialect:
        """Return the dialect that writes this request for the worker."""
        match to.dialect:
            case "vllm":
                return VLLM(self._asked_of(to))
            case "sglang":
                return SGLang(self._asked_of(to), secrets.randbits(63))
        return Native(self.asked, self.seed, self.key, self.created, self._said())

    def _said(self) -> tuple[Said, ...]:
        return self.track.handoff().said if self.started else ()

    @property
    def said_tokens(self) -> int:
        """Tokens of the reply so far, all choices together."""
        return sum(len(group.tokens) for group in self._said())

    async def call(self, to: Worker, now: float) -> Call | None:
        """Return the request for the next worker.

        It is the client's own, or one that continues after the client's output; None if this kind of server cannot
        continue a stream."""
        remaining_s, ticket = self.deadline - now, self._ticket(to)
        if self.started:
            handoff = replace(self.track.handoff(), source=ticket)
            return self.speak(to).resume(handoff, remaining_s, *self.track.named())
        if not self.generates:
            return self._asked_of(to)
        if self.prefill is None or ticket is None:
            return await self.written(self.speak(to).plain, self.ask.stream)
        return await self.written(self.prefill.dialect.answer, ticket, remaining_s)

    async def written(self, write: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a dialect's method, in another process if it has to decode a large body.

        Only dialects of foreign servers decode the body; Emberline's own workers get the client's bytes."""
        is_native = isinstance(getattr(write, "__self__", None), Native)
        size = 0 if is_native else len(self.asked.body)
        return await offload.run_by_size(size, write, *args, **kwargs)

    def _asked_of(self, to: Worker) -> Call:
        """Return the client's request, with the API key of foreign servers where one is configured."""
        if to.dialect == "native" or self.foreign_key is None:
            return self.asked
        return self.asked.with_headers({"authorization": f"Bearer {self.foreign_key}"})

    def _ticket(self, to: Worker) -> Ticket | None:
        """Return the ticket with which the worker fetches the prompt's blocks, if it can use one."""
        prefill = self.prefill
        if prefill is None or prefill.failed or not to.takes_from(prefill.worker, self.ask.model):
            return None
        return None if self.started and prefill.left else prefill.ticket

    async def close(self) -> None:
        if self.prefill is not None:
            await self.prefill.close()

    def trace(self, leg: Leg, kind: str) -> None:
        if (span := self.x.span) is not None:
            leg.trace(span, kind, self.legs)

    def _trace_setback(self, setback: Setback, left: Worker) -> None:
        if (span := self.x.span) is not None:
            name = "emberline.migration" if self.started else "emberline.retry"
            span.event(name, worker=left.name, reason=setback.reason, status=setback.status or None)

    def end_trace(self) -> None:
        """Add the final attributes to the span, which the exchange ends."""
        if (span := self.x.span) is not None:
            span.about |= {
                "gen_ai.request.model": self.ask.model or None,
                "emberline.worker": str(self.x.note["worker"]) if "worker" in self.x.note else None,
                "emberline.split": self.prefill is not None,
                "emberline.attempts": self.legs,
                "emberline.migrations": self.moves,
                "emberline.stream": self.ask.stream,
            }
