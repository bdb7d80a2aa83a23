"""Trip: one client's request on its way from worker to worker: who was tried, why they were left, what is passed on."""

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

CRASHES = 2  # workers that die under one request until it is suspected to be what kills them; one more, and it is


@dataclass(frozen=True, slots=True)
class Setback:
    """Why another worker is tried; `status` and what follows is what this one said, if it said anything."""

    reason: str
    crash: bool = False
    status: int = 0
    headers: Mapping[str, str] | None = None
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Break:
    """A worker broke under the request, or only their connection did."""

    worker: Worker
    engines: Mapping[str, str]  # that it had then

    @property
    def processes(self) -> tuple[str, frozenset[str]]:
        return self.worker.id, frozenset(self.engines.values())

    @property
    def stands(self) -> bool:
        """Until the same processes are heard of again, and are well."""
        worker = self.worker
        return worker.doubted or not worker.ready or worker.peers != self.engines

    @property
    def open(self) -> bool:
        """It stands only because nothing was heard of the worker yet."""
        return self.worker.doubted and self.worker.ready


@dataclass(slots=True)
class Trip:
    x: Exchange
    ask: Ask
    asked: Call  # as it came, without what belongs to one connection
    seed: int
    created: int  # when its reply is said to be made
    key: str | None  # the cluster's
    deadline: float  # of all of it; inf: none
    attempts: int  # workers to be tried, until one of them says something
    migrations: int  # times that it may go on elsewhere
    generates: bool
    accused: bool  # it was given up before because workers broke under it
    foreign_key: str | None = None  # of servers of other kinds
    track: Track = field(default_factory=Track)
    prefill: Prefill | None = None
    may_split: bool = True  # its prompt may be computed elsewhere for who is asked next
    setback: Setback | None = None  # the last
    nobody: Exception | None = None  # why there was no worker to ask, the last time
    moving: str = ""  # why it goes on elsewhere, until it does
    since: float = 0.0  # when it had to
    lost: str = ""  # what happened then, for its client
    tried: set[str] = field(default_factory=set)  # workers, since one of them said something
    breaks: list[Break] = field(default_factory=list)
    moves: int = 0
    tries: int = 0
    legs: int = 0  # workers that were to answer so far
    author: Worker | None = None  # the worker that computed what its client has of the stream
    origin: Decision | None = None  # where it was before somebody wished it away
    limit: asyncio.Timeout | None = None  # of the next part of the reply
    extended: float = 0.0  # when that was last put off
    watched: bool = False  # the worker that is asked ends a request itself whose tokens do not come

    @property
    def shows_tokens(self) -> bool:
        """Whether the router can tell that tokens come. A whole reply comes at its end, however long that takes."""
        return self.ask.stream or not self.generates or not self.watched

    @property
    def started(self) -> bool:
        """Its client has the beginning of a reply."""
        return self.x.status is not None

    @property
    def goes_on(self) -> bool:
        return self.tries < self.attempts and self._may_go_on and not self.guilty

    @property
    def crashes(self) -> int:
        """A worker whose connections broke twice has died once at most."""
        return len({each.processes for each in self.breaks if each.stands})

    @property
    def suspect(self) -> bool:
        return self.accused or self.crashes >= CRASHES

    @property
    def guilty(self) -> bool:
        """So far as anybody can tell: it is not to break yet another."""
        return self.crashes > (0 if self.accused else CRASHES)

    @property
    def _may_go_on(self) -> bool:
        """If somebody can be found."""
        if not self.started:
            return len(self.breaks) <= self.attempts
        return self._can_move and self.moves <= self.migrations

    @property
    def _can_move(self) -> bool:
        return self.track.started and self.track.movable

    @property
    def may_move(self) -> bool:
        """Because somebody wishes it, who would rather wait than see it fail."""
        return self.ask.stream and self.generates and self.moves < self.migrations

    def may_wait(self, patience: float, now: float) -> bool:
        """For a worker to go on at; or to begin at, if all or the last were away, or none may have a suspect. Who is
        told that all are full, or that an engine failed under it, is not to wait; nor who is guilty beyond doubt."""
        away = self.setback is None or self.setback.status in (0, 502, 503)
        if self.guilty and not any(each.open for each in self.breaks):
            return False
        return (self.started or away or self.suspect) and self._may_go_on and now - self.since < patience

    def waited(self) -> None:
        """All may be tried once more, but for those that it broke and that nobody has heard of since."""
        self.tried = {each.worker.id for each in self.breaks if each.worker.doubted}
        self.tries = 0 if self.started else self.attempts - 1

    def progressed(self, worker: Worker) -> None:
        """A worker has said something: what was before is forgotten, but not who broke."""
        self.author = worker
        self.tries, self.moving, self.origin = 0, "", None
        self.tried = {each.worker.id for each in self.breaks}

    def broke(self, worker: Worker) -> None:
        """Under this request; why, nobody can tell, but of one that stops."""
        if not worker.left:
            self.breaks.append(Break(worker, worker.peers))
            worker.doubted = True

    def fell_back(self, setback: Setback, decision: Decision, now: float) -> None:
        self._trace_setback(setback, decision.worker)
        self.setback = setback
        if setback.reason == "drained":
            self.origin = None if self.track.ended else decision
        elif setback.reason != "unable" or self.started:
            self.tried.add(decision.worker.id)
        if setback.crash:
            self.broke(decision.worker)
        if (prefill := self.prefill) is not None and prefill.crashed:
            prefill.crashed = False  # it is counted once
            self.broke(prefill.worker)
        if not self.started:
            self.track = Track()
            self.since = now if setback.crash or not self.since else self.since
        elif not self.moving:
            self.lost = f"worker {decision.worker.name} was lost ({setback.reason}) before the reply ended"
        if self._can_move:
            self.track.moved()
            self.moves += not self.moving
            self.may_split = self.may_split or not self.moving
            self.since = self.since if self.moving else now
            self.moving = self.moving or setback.reason

    def speak(self, to: Worker) -> Dialect:
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
        """Tokens of the reply so far, of all its choices."""
        return sum(len(group.tokens) for group in self._said())

    async def call(self, to: Worker, now: float) -> Call | None:
        """What is asked of the next worker: all of it, or to go on after what the client has. None: it does not know
        how."""
        left, ticket = self.deadline - now, self._ticket(to)
        if self.started:
            handoff = replace(self.track.handoff(), source=ticket)
            return self.speak(to).resume(handoff, left, *self.track.named())
        if not self.generates:
            return self._asked_of(to)
        if self.prefill is None or ticket is None:
            return await self.written(self.speak(to).plain, self.ask.stream)
        return await self.written(self.prefill.dialect.answer, ticket, left)

    async def written(self, write: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a dialect's method makes of the call. Those of other servers decode the body, in another process where
        it is large; our own workers get it as it came."""
        native = isinstance(getattr(write, "__self__", None), Native)
        size = 0 if native else len(self.asked.body)
        return await offload.run_by_size(size, write, *args, **kwargs)

    def _asked_of(self, to: Worker) -> Call:
        """The client's call; servers of other kinds may have a key of their own."""
        if to.dialect == "native" or self.foreign_key is None:
            return self.asked
        return self.asked.with_headers({"authorization": f"Bearer {self.foreign_key}"})

    def _ticket(self, to: Worker) -> Ticket | None:
        """With which it finds blocks of the prompt elsewhere."""
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
        """What is known of it in the end; the span is its exchange's to end."""
        if (span := self.x.span) is not None:
            span.about |= {
                "gen_ai.request.model": self.ask.model or None,
                "emberline.worker": str(self.x.note["worker"]) if "worker" in self.x.note else None,
                "emberline.split": self.prefill is not None,
                "emberline.attempts": self.legs,
                "emberline.migrations": self.moves,
                "emberline.stream": self.ask.stream,
            }
