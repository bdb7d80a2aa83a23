"""Dispatch: the router's state. Workers come from membership, requests go where the policy says, and what happens to
them is told to the breaker, the estimates and the metrics."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from emberline.cluster.card import Beat, Card
from emberline.cluster.membership import Health, Membership, Patience
from emberline.core.clock import Clock
from emberline.core.config import RouterConfig
from emberline.core.errors import EngineUnavailable, NotFound, Superseded
from emberline.router.ask import Ask
from emberline.router.breaker import Breaker
from emberline.router.estimate import Estimate
from emberline.router.events import Events
from emberline.router.policy import Decision, Rules, choose
from emberline.router.prefixmap import PrefixMap
from emberline.router.usage import Usage
from emberline.router.worker import Worker
from emberline.server.router_metrics import RouterMetrics

log = logging.getLogger("emberline.router")


Outcome = Literal["answered", "refused", "failed", "left"]  # refused: by a worker that is well; left: by the client


@dataclass(slots=True)
class Attempt:
    """One request at one worker, from when it is sent until its reply has ended."""

    key: int
    ask: Ask
    decision: Decision
    began: float
    heard: float  # when its last bytes came
    timer: asyncio.Timeout | None = None
    lost: Health | None = None  # why it was cut off
    outcome: Outcome = "left"  # unless somebody knows better
    events: Events | None = None  # of its stream, if it is one
    usage: Usage = field(default_factory=Usage)

    @asynccontextmanager
    async def until(self, deadline: float) -> AsyncIterator[None]:
        """TimeoutError at the deadline, or as soon as it is cut."""
        try:
            async with asyncio.timeout_at(deadline) as self.timer:
                yield
        finally:
            self.timer = None

    def cut(self, health: Health) -> None:
        self.lost = self.lost or health
        if self.timer is not None and not self.timer.expired():
            self.timer.reschedule(0.0)  # at once


class Dispatch:
    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._rules = Rules(config.affinity_slack, config.decode_weight)
        self.membership = Membership(Patience(config.lost_after, config.stuck_after))
        self.workers: dict[str, Worker] = {}  # by name
        self.estimates: defaultdict[str, Estimate] = defaultdict(Estimate)  # of models that are served
        self.prefixes = PrefixMap(config.prefixes)
        self.metrics = RouterMetrics()
        self._open: dict[str, dict[int, Attempt]] = {}  # by worker id
        self._retired: set[str] = set()  # ids of workers that were replaced and have requests open
        self._keys = itertools.count()

    # -- what workers say ----------------------------------------------------------------------------------------------

    def register(self, card: Card) -> None:
        now = self._clock.now()
        old = self.membership.get(card.name)
        if not self.membership.register(card, now):
            raise Superseded(f"{card.name!r} belongs to a newer process", hint="give this worker another --worker-name")
        if old is not None and old.card.incarnation == card.incarnation:
            return
        if old is not None:
            log.info("worker %s: replaced by a newer process", card.name)
            self._retire(self.workers[card.name], lost=self.membership.health(old, now) is Health.LOST)
        runs = max(1, sum(model.max_running for model in card.models))
        breaker = Breaker(self._config.breaker_failures, self._config.breaker_pause)
        self.workers[card.name] = Worker(
            id=f"{card.name}/{card.incarnation}",
            name=card.name,
            models=frozenset(model.name for model in card.models),
            max_running=runs,
            limit=runs + int(runs * self._config.queue),
            breaker=breaker,
        )
        log.info("worker %s at %s: %s", card.name, card.url, ", ".join(model.name for model in card.models))

    def beat(self, beat: Beat) -> None:
        if self.membership.replaced(beat.incarnation):
            raise Superseded(f"{beat.name!r} belongs to a newer process", hint="give this worker another --worker-name")
        if not self.membership.beat(beat, self._clock.now()):
            raise NotFound(f"no worker {beat.name[:200]!r} of this incarnation is registered", hint="register again")
        self._look(self.workers[beat.name])

    def leave(self, name: str, incarnation: str) -> None:
        if self.membership.leave(name, incarnation):
            log.info("worker %s leaves", name)
            self._look(self.workers[name])

    def drain(self, name: str, on: bool) -> None:
        if not self.membership.drain(name, on):
            known = ", ".join(self.workers) or "none"
            raise NotFound(f"there is no worker {name[:200]!r}", hint=f"workers here: {known}")
        log.info("worker %s: %s", name, "drains" if on else "takes requests again")
        self._look(self.workers[name])

    def health(self, worker: Worker) -> Health:
        member = self.membership.get(worker.name)
        assert member is not None
        return self.membership.health(member, self._clock.now())

    def url(self, worker: Worker) -> str:
        member = self.membership.get(worker.name)
        if member is None or f"{worker.name}/{member.card.incarnation}" != worker.id:
            raise EngineUnavailable(f"worker {worker.name} was replaced")
        return member.card.url.rstrip("/")

    def tick(self) -> None:
        """Who has been silent or stuck for too long is left, with what it had; called a few times a second."""
        for worker in self.workers.values():
            self._look(worker)
        now = self._clock.now()
        for name in self.membership.forget(now):
            log.info("worker %s is forgotten", name)
            self._retire(self.workers.pop(name), lost=True)
        for id_ in [id_ for id_ in self._retired if id_ not in self._open]:
            self._retired.discard(id_)
        for id_ in self._retired:
            for attempt in self._open[id_].values():
                if now - attempt.heard > self._config.stuck_after:
                    attempt.cut(Health.STUCK)

    def _look(self, worker: Worker) -> None:
        health = self.health(worker)
        ready = health is Health.READY
        if ready != worker.ready:
            log.log(logging.INFO if ready else logging.WARNING, "worker %s is %s", worker.name, health.value)
        worker.ready = ready
        if health in (Health.LOST, Health.STUCK):
            self._cut(worker, health)

    def _cut(self, worker: Worker, health: Health) -> None:
        for attempt in self._open.get(worker.id, {}).values():
            attempt.cut(health)

    def _retire(self, worker: Worker, *, lost: bool) -> None:
        """Nothing new for it; what it has open may still end well, as when workers are restarted one after another."""
        worker.ready = False
        self._retired.add(worker.id)
        if lost:
            self._cut(worker, Health.LOST)

    # -- what clients want ---------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open.values()))

    def choose(self, ask: Ask, without: set[str]) -> Decision:
        workers = list(self.workers.values())
        if not ask.model and len(models := {model for worker in workers for model in worker.models}) == 1:
            ask = replace(ask, model=next(iter(models)))  # the worker knows what to say
        served = any(ask.model in worker.models for worker in workers)
        estimate = self.estimates[ask.model] if served else Estimate()
        known = self.prefixes.known(ask.points)
        return choose(ask, workers, known, estimate, self._rules, self._clock.now(), without)

    @contextmanager
    def opened(self, ask: Ask, decision: Decision) -> Iterator[Attempt]:
        """The worker's account of a request: opened once, closed once, however it ends."""
        worker, now = decision.worker, self._clock.now()
        attempt = Attempt(next(self._keys), ask, decision, now, now)
        worker.began(attempt.key, decision.load, now)
        self._open.setdefault(worker.id, {})[attempt.key] = attempt
        self.prefixes.saw(ask.points, worker.id)
        self.metrics.decided(decision)
        try:
            yield attempt
        finally:
            self._close(attempt)

    def came(self, attempt: Attempt, events: int) -> None:
        """Bytes of its reply."""
        worker = attempt.decision.worker
        if attempt.heard == attempt.began:
            worker.prefilled(attempt.key)
            worker.breaker.succeeded()
        attempt.heard = self._clock.now()
        worker.generated(attempt.key, events)

    def _close(self, attempt: Attempt) -> None:
        worker, now, outcome = attempt.decision.worker, self._clock.now(), attempt.outcome
        seconds = now - attempt.began
        worker.ended(attempt.key, seconds if outcome == "answered" else None)
        left = self._open[worker.id]
        del left[attempt.key]
        if not left:
            del self._open[worker.id]
        match outcome:
            case "answered":
                worker.breaker.succeeded()
                self.estimates[attempt.ask.model].correct(attempt.ask, attempt.usage.prompt, attempt.usage.output)
            case "failed":
                worker.breaker.failed(now)
            case _:
                worker.breaker.neither()
        first = attempt.heard - attempt.began if attempt.heard > attempt.began else None
        self.metrics.closed(worker.name, outcome, seconds, first)
