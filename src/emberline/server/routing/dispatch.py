"""Dispatch: the router's state. Workers come from membership, requests go where the policy says, and what happens to
them is told to the breaker, the estimates and the metrics."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from emberline.cluster.address import leads_to
from emberline.cluster.card import Beat, Card
from emberline.cluster.membership import Health, Member, Membership, Patience
from emberline.core.breaker import Breaker
from emberline.core.clock import Clock
from emberline.core.config import RouterConfig
from emberline.core.errors import EngineUnavailable, InvalidRequest, NotFound, Superseded
from emberline.core.numerics import Numerics, describe_difference
from emberline.router.ask import Ask
from emberline.router.chains import Link
from emberline.router.estimate import Estimate
from emberline.router.kvindex import KVIndex
from emberline.router.policy import Decision, Rules, Why, choose
from emberline.router.prefixmap import PrefixMap
from emberline.router.split import split
from emberline.router.worker import Load, Worker
from emberline.server.routing.leg import Leg
from emberline.server.routing.router_metrics import GONE, RouterMetrics

log = logging.getLogger("emberline.router")

TICK = 0.25  # seconds from one to the next
HANDOVER_TOKENS = 64  # to be computed where a stream goes on that are worth a call for their blocks
STANDSTILL = 2 * TICK  # without a tick: what is beyond was our own, and is held against nobody


class Dispatch:
    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._rules = Rules(config.affinity_slack, config.decode_weight, config.split_tokens, config.split_patience)
        self.membership = Membership(Patience(config.lost_after, config.stuck_after))
        self.workers: dict[str, Worker] = {}  # by name
        self.estimates: defaultdict[str, Estimate] = defaultdict(Estimate)  # of models that are served
        self.prefixes = PrefixMap(config.prefixes)
        self.kv = KVIndex(config.kv_blocks, config.prefixes) if config.kv_events else None
        self.metrics = RouterMetrics()
        self._open: dict[str, dict[int, Leg]] = {}  # by worker id
        self._retired: dict[str, float] = {}  # replaced workers with open requests: by id, the silence that is borne
        self._keys = itertools.count()
        self._ticked = clock.now()
        self._detached: set[asyncio.Task[None]] = set()

    # -- what workers say ----------------------------------------------------------------------------------------------

    def register(self, card: Card) -> None:
        now = self._ran()
        if leads_to(card.url, self._config.host, self._config.port):
            raise InvalidRequest(
                f"worker {card.name!r} registers {card.url}, which is this router", hint="give it another --port"
            )
        old = self.membership.get(card.name)
        if old is not None and self._is_taken(old, card, now):
            raise Superseded(
                f"another worker named {card.name!r} is alive at {old.card.url}",
                hint="give this one another --worker-name",
            )
        if not self.membership.register(card, now):
            raise Superseded(f"{card.name!r} belongs to a newer process", hint="give this worker another --worker-name")
        if old is not None and old.card.incarnation == card.incarnation:
            self.workers[card.name].peers = _peers(card)  # its engine may be another
            self.workers[card.name].numerics = _numerics(card)
            return
        if old is not None:
            log.info("worker %s: replaced by another process", card.name)
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
            dialect=card.dialect,
            role=card.role,
            peers=_peers(card),
            kv_tokens=_kv_tokens(card),
            numerics=_numerics(card),
        )
        self._retired.pop(self.workers[card.name].id, None)  # it may have come back
        log.info("worker %s at %s: %s", card.name, card.url, ", ".join(model.name for model in card.models))
        self._warn_of_other_numerics(self.workers[card.name])

    def _is_taken(self, old: Member, card: Card, now: float) -> bool:
        """Whether the name belongs to another process that lives: one that is not at the same address, where only one
        can listen, beats, has not said goodbye, and did not break since it was last heard of."""
        if old.card.incarnation == card.incarnation or old.card.url == card.url or old.left:
            return False
        return self.membership.health(old, now) is not Health.LOST and not self.workers[card.name].doubted

    def _warn_of_other_numerics(self, worker: Worker) -> None:
        """Log once per registration and model that streams and blocks do not move between this worker and others."""
        for model in worker.models:
            for other in self.workers.values():
                if other is worker or model not in other.models or "native" not in (worker.dialect, other.dialect):
                    continue
                if why := describe_difference(worker.numerics.get(model), other.numerics.get(model)):
                    told = "worker %s computes %s otherwise than %s: streams and KV blocks do not move between them: %s"
                    log.warning(told, worker.name, model, other.name, why)
                    break

    def beat(self, beat: Beat) -> None:
        if self.membership.replaced(beat.incarnation):
            raise Superseded(f"{beat.name!r} belongs to a newer process", hint="give this worker another --worker-name")
        if not self.membership.beat(beat, self._ran()):
            raise NotFound(f"no worker {beat.name[:200]!r} of this incarnation is registered", hint="register again")
        worker = self.workers[beat.name]
        worker.doubted, worker.paired = False, frozenset(beat.paired)
        worker.reported(beat.prompt_tokens, beat.busy_seconds, beat.kv_usage)
        self._look(worker)

    def peers(self, name: str) -> dict[str, list[dict[str, Any]]]:
        """Engines whose blocks this worker may be asked to take, by model: of workers that prefill or drain."""
        member = self.membership.get(name)
        assert member is not None
        found: dict[str, list[dict[str, Any]]] = {}
        if member.card.role != "prefill":
            models = {model.name for model in member.card.models}
            for other in self._publishing(member.card):
                for model in other.card.models:
                    if model.name not in models or model.peer is None:
                        continue
                    if other.left and model.peer.get("incarnation") not in member.beat.paired:
                        continue  # what it has computed is still fetched, by those who know it
                    found.setdefault(model.name, []).append(model.peer)
        return found

    def _publishing(self, to: Card) -> Iterator[Member]:
        now = self._clock.now()
        for member in self.membership:
            card, lost = member.card, self.membership.health(member, now) is Health.LOST
            publishes = card.role == "prefill" or member.draining  # whose streams go on elsewhere, with their blocks
            if publishes and card.dialect == to.dialect and card.name != to.name and not lost:
                yield member

    def leave(self, name: str, incarnation: str) -> None:
        if self.membership.leave(name, incarnation):
            log.info("worker %s leaves", name)
            self.workers[name].left = True
            self._look(self.workers[name])

    def drain(self, name: str, on: bool, move: bool = False) -> None:
        """`move`: what can go on elsewhere is not waited for."""
        if not self.membership.drain(name, on):
            known = ", ".join(self.workers) or "none"
            raise NotFound(f"there is no worker {name[:200]!r}", hint=f"workers here: {known}")
        log.info("worker %s: %s", name, "drains" if on else "takes requests again")
        self._look(self.workers[name])
        if on and move:
            for leg in list(self._open.get(self.workers[name].id, {}).values()):
                if leg.movable and self._takes_over(leg):
                    leg.cut("drained")

    def is_ready_to_move(self, name: str) -> bool:
        """Whether all workers that could continue this one's streams can take its blocks, or never will."""
        if (worker := self.workers.get(name)) is None:
            return True
        models = {leg.ask.model for leg in self._open.get(worker.id, {}).values() if leg.movable}
        return all(
            other.takes_from(worker, model)
            for model in models & worker.peers.keys()
            for other in self.workers.values()
            if other.ready and other.role != "prefill" and other.peers.get(model) and self._agree(worker, other, model)
        )

    def _agree(self, one: Worker, other: Worker, model: str) -> bool:
        return one.dialect == other.dialect == "native" and one.numerics.get(model) == other.numerics.get(model)

    def handover(self, ask: Ask, said: int, answering: Decision, origin: Worker) -> Decision | None:
        """The worker that a stream leaves, as the source of its blocks, which it has; None: not worth it.
        `said`: tokens of its output so far."""
        worth = ask.single and answering.load.prefill + said >= HANDOVER_TOKENS
        there = self.workers.get(origin.name) is origin and answering.worker.takes_from(origin, ask.model)
        if not worth or not there:
            return None
        return Decision(origin, Load(0.0, 0.0), Why.SPLIT, self.estimates[ask.model].prompt(ask.size))

    def _takes_over(self, leg: Leg) -> bool:
        """Whether any worker could continue this stream, or begin it if its client has nothing yet."""
        model, now = leg.ask.model, self._clock.now()
        unable = self.unable(model, leg.decision.worker) if leg.first is not None else ()
        return any(worker.takes(model, now) and worker.id not in unable for worker in self.workers.values())

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
        """Who has been silent or stuck for too long is left, with what it had; called every `TICK`."""
        now = self._ran()
        for worker in self.workers.values():
            self._look(worker)
        for name in self.membership.forget(now):
            log.info("worker %s is forgotten", name)
            self._retire(self.workers.pop(name), lost=True)
            self._forget(name)
        for id_ in [id_ for id_ in self._retired if id_ not in self._open]:
            del self._retired[id_]
        for id_, patience in self._retired.items():
            for leg in self._open[id_].values():
                if now - leg.heard > patience:
                    leg.cut(Health.STUCK.value)

    def _ran(self) -> float:
        """Now. If we did not run (stopped, starved, the machine paused), who spoke meanwhile was not heard; but even of
        an endless row of such pauses some time counts."""
        now = self._clock.now()
        stood, self._ticked = now - self._ticked, now
        if stood > STANDSTILL:
            log.log(logging.WARNING if stood > 1.0 else logging.DEBUG, "the router stood still for %.1f s", stood)
            self.membership.excuse(stood - TICK, now)
            for leg in (leg for legs in self._open.values() for leg in legs.values()):
                leg.heard = min(leg.heard + stood - TICK, now)
        return now

    def _forget(self, name: str) -> None:
        """What is kept by names of workers and models: whoever starts them may give each another."""
        self.metrics.forget(name)
        for model in self.estimates.keys() - {model for worker in self.workers.values() for model in worker.models}:
            del self.estimates[model]

    def _look(self, worker: Worker) -> None:
        health = self.health(worker)
        ready = health is Health.READY
        if ready != worker.ready:
            log.log(logging.INFO if ready else logging.WARNING, "worker %s is %s", worker.name, health.value)
        worker.ready = ready
        if health in (Health.LOST, Health.STUCK):
            self._cut(worker, health)

    def _cut(self, worker: Worker, health: Health) -> None:
        """Who does not beat may still speak, as beats come late from a busy machine: that is heard out."""
        since = self._clock.now() - self._config.lost_after
        for leg in self._open.get(worker.id, {}).values():
            speaks = leg.first is not None and leg.heard >= since
            if health is Health.STUCK or not speaks:
                leg.cut(health.value)

    def _retire(self, worker: Worker, *, lost: bool) -> None:
        """Nothing new for it; what it has open may still end well, as when workers are restarted one after another."""
        worker.ready = False
        if self.kv is not None:
            self.kv.forget(worker.id)
        self._retired[worker.id] = self._config.lost_after if lost else self._config.stuck_after
        if lost:
            self._cut(worker, Health.LOST)

    # -- what clients want ---------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open.values()))

    def choose(self, ask: Ask, without: set[str], *, urgent: bool = False, suspect: bool = False) -> Decision:
        workers, now = list(self.workers.values()), self._clock.now()
        shared = not self.prefixes.continues(ask.points)
        return choose(ask, workers, *self._known(ask), self._rules, now, without, urgent, suspect, shared)

    def unable(self, model: str, begun_by: Worker) -> set[str]:
        """Workers that cannot continue this worker's stream: other kinds of servers, and those of other numerics."""
        wanted = begun_by.numerics.get(model)
        return {w.id for w in self.workers.values() if w.dialect != "native" or w.numerics.get(model) != wanted}

    def difference(self, model: str, begun_by: Worker) -> str:
        """How the other workers of this model that are ready differ from it; "" if one of them agrees, or none is."""
        now, others = self._clock.now(), (w for w in self.workers.values() if w.id != begun_by.id)
        ready = [w for w in others if w.takes(model, now) and w.dialect == "native"]
        found = [describe_difference(begun_by.numerics.get(model), other.numerics.get(model)) for other in ready]
        return found[0] if found and all(found) else ""

    def again(self, decision: Decision) -> Decision | None:
        """Back to who was to be left, if it is still there."""
        worker = decision.worker
        there = self.workers.get(worker.name) is worker and self.health(worker) in (Health.READY, Health.DRAINING)
        return decision if there and worker.breaker.allows(self._clock.now()) else None

    def split(self, ask: Ask, answering: Decision, *, must: bool) -> Decision | None:
        """Who computes the prompt for the one who answers, if that is worth it."""
        return split(
            ask, answering, list(self.workers.values()), *self._known(ask), self._rules, self._clock.now(), must
        )

    def peer(self, worker: Worker, model: str) -> dict[str, Any]:
        """The worker's engine, as others know it."""
        member = self.membership.get(worker.name)
        models = member.card.models if member is not None else ()
        return next((each.peer for each in models if each.name == model and each.peer is not None), {})

    def detach(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for its end."""
        self._detached.add(task)
        task.add_done_callback(self._detached.discard)

    def named(self, ask: Ask) -> Ask:
        """With the only model that generates, or the only one there is, if it names none."""
        cards = [
            model for member in self.membership for model in member.card.models if member.card.name in self.workers
        ]
        models = {model.name for model in cards if model.max_running} or {model.name for model in cards}
        return replace(ask, model=next(iter(models))) if not ask.model and len(models) == 1 else ask

    def _known(self, ask: Ask) -> tuple[Mapping[str, int], Estimate]:
        served = any(ask.model in worker.models for worker in self.workers.values())
        known = self.prefixes.known(ask.points)
        if self.kv is not None:
            known = self.kv.known(ask.points, known)
        return known, self.estimates[ask.model] if served else Estimate()

    @contextmanager
    def opened(self, ask: Ask, decision: Decision) -> Iterator[Leg]:
        """The worker's account of a request: opened once, closed once, however it ends."""
        worker, now = decision.worker, self._clock.now()
        leg = Leg(next(self._keys), ask, decision, now, now)
        worker.began(leg.key, decision.load, now)
        self._open.setdefault(worker.id, {})[leg.key] = leg
        self.prefixes.saw(ask.points, worker.id)
        self.metrics.decided(decision)
        try:
            yield leg
        finally:
            self._close(leg)

    def came(self, leg: Leg, events: int) -> None:
        """Bytes of its reply."""
        if leg.first is None:
            leg.decision.worker.prefilled(leg.key)
        self.heard(leg)
        leg.decision.worker.generated(leg.key, events)

    def told(self, leg: Leg, link: Link) -> None:
        """Where its prompt ends, in blocks."""
        leg.link = link
        if self.kv is not None:
            self.kv.told(leg.ask.points, link)

    def heard(self, leg: Leg) -> None:
        """A sign of life."""
        leg.heard = self._clock.now()
        if leg.first is None:
            leg.first = leg.heard
            leg.decision.worker.breaker.succeeded()

    def _close(self, leg: Leg) -> None:
        worker, now, outcome = leg.decision.worker, self._clock.now(), leg.outcome
        seconds = now - leg.began
        worker.ended(leg.key, seconds if outcome == "answered" else None)
        left = self._open[worker.id]
        del left[leg.key]
        if not left:
            del self._open[worker.id]
        if self.kv is not None and leg.link is not None:
            self.kv.read(worker.id, leg.ask.points, leg.link)  # by now its blocks have been heard of
        match outcome:
            case "answered":
                worker.breaker.succeeded()
                self.estimates[leg.ask.model].correct(leg.ask, leg.usage.prompt, leg.usage.output)
            case "failed":
                worker.breaker.failed(now)
            case _:
                worker.breaker.neither()
        known = worker.name if worker.name in self.workers else GONE
        self.metrics.closed(known, outcome, seconds, None if leg.first is None else leg.first - leg.began)
        leg.end_trace()


def _kv_tokens(card: Card) -> int:
    """Several models have a cache each, of which it reports only what all use together: nothing is known then."""
    caches = [model.kv_tokens for model in card.models if model.max_running]
    return caches[0] if len(caches) == 1 else 0


def _numerics(card: Card) -> dict[str, Numerics | None]:
    return {model.name: model.numerics for model in card.models}


def _peers(card: Card) -> dict[str, str]:
    return {model.name: str(model.peer.get("incarnation")) for model in card.models if model.peer is not None}
