"""Trip: one client's request on its way from worker to worker: who was tried, why they were left, what is passed on."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
from emberline.server.routing.prefill import Prefill

CRASHES = 2  # workers that die under one request until it is suspected to be what kills them


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
    def stands(self) -> bool:
        """Until the same processes are heard of again, and are well."""
        worker = self.worker
        return worker.doubted or not worker.ready or worker.peers != self.engines


@dataclass(slots=True)
class Trip:
    x: Exchange
    ask: Ask
    asked: Call  # as it came, without what belongs to one connection
    seed: int
    created: int  # when its reply is said to be made
    key: str | None  # the cluster's
    deadline: float
    attempts: int  # workers to be tried, until one of them says something
    migrations: int  # times that it may go on elsewhere
    generates: bool
    track: Track = field(default_factory=Track)
    prefill: Prefill | None = None
    may_split: bool = True  # its prompt may be computed elsewhere for who is asked next
    setback: Setback | None = None  # the last
    moving: str = ""  # why it goes on elsewhere, until it does
    since: float = 0.0  # when it had to
    lost: str = ""  # what happened then, for its client
    tried: set[str] = field(default_factory=set)  # workers, since one of them said something
    breaks: list[Break] = field(default_factory=list)
    moves: int = 0
    tries: int = 0
    legs: int = 0  # workers that were to answer so far
    origin: Decision | None = None  # where it was before somebody wished it away

    @property
    def started(self) -> bool:
        """Its client has the beginning of a reply."""
        return self.x.status is not None

    @property
    def goes_on(self) -> bool:
        return self.tries < self.attempts and self._may_go_on

    @property
    def crashes(self) -> int:
        return sum(each.stands for each in self.breaks)

    @property
    def suspect(self) -> bool:
        return self.crashes >= CRASHES

    @property
    def _may_go_on(self) -> bool:
        """If somebody can be found."""
        if not self.started:
            return self.crashes <= CRASHES and len(self.breaks) <= self.attempts
        return self._can_move and max(self.moves, self.crashes) <= self.migrations

    @property
    def _can_move(self) -> bool:
        return self.track.started and self.track.movable

    @property
    def may_move(self) -> bool:
        """Because somebody wishes it, who would rather wait than see it fail."""
        return self.ask.stream and self.generates and self.moves < self.migrations

    def may_wait(self, patience: float, now: float) -> bool:
        """For a worker to go on at; or to begin at, if one broke without a word, or none may have a suspect."""
        broke = bool(self.breaks) and self.setback is not None and not self.setback.status
        return (self.started or broke or self.suspect) and self._may_go_on and now - self.since < patience

    def progressed(self) -> None:
        """A worker has said something: what was before is forgotten, but not who broke."""
        self.tries, self.moving, self.origin = 0, "", None
        self.tried = {each.worker.id for each in self.breaks}

    def broke(self, worker: Worker) -> None:
        """Under this request; why, nobody can tell."""
        self.breaks.append(Break(worker, worker.peers))
        worker.doubted = True

    def fell_back(self, setback: Setback, decision: Decision, now: float) -> None:
        self.setback = setback
        if setback.reason == "drained":
            self.origin = decision
        elif setback.reason != "unable" or self.started:
            self.tried.add(decision.worker.id)
        if setback.crash:
            self.broke(decision.worker)
        if not self.started:
            self.track = Track()
            self.since = now if setback.crash else self.since
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
                return VLLM(self.asked)
            case "sglang":
                return SGLang(self.asked, secrets.randbits(63))
        return Native(self.asked, self.seed, self.key, self.created)

    def call(self, to: Worker, now: float) -> Call | None:
        """What is asked of the next worker: all of it, or to go on after what the client has. None: it does not know
        how."""
        left, ticket = self.deadline - now, self._ticket(to)
        if self.started:
            handoff = replace(self.track.handoff(), source=ticket)
            return self.speak(to).resume(handoff, left, *self.track.named())
        if not self.generates:
            return self.asked
        if self.prefill is None or ticket is None:
            return self.speak(to).plain(self.ask.stream)
        return self.prefill.dialect.answer(ticket, left)

    def _ticket(self, to: Worker) -> Ticket | None:
        """With which it finds blocks of the prompt elsewhere."""
        prefill = self.prefill
        if prefill is None or prefill.failed or not to.takes_from(prefill.worker, self.ask.model):
            return None
        return None if self.started and prefill.left else prefill.ticket

    async def close(self) -> None:
        if self.prefill is not None:
            await self.prefill.close()
