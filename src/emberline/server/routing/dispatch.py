"""Dispatcher: the router's state: the registered workers, the open attempts at each, and what was
learned from finished ones (circuit breakers, token estimates, cached prefixes, metrics)."""

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

TICK = 0.25
HANDOVER_TOKENS = 64  # fewer are recomputed by the next worker rather than fetched
STANDSTILL = 2 * TICK  # a longer gap between ticks means that the router itself was paused


class Dispatch:
    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._rules = Rules(config.affinity_slack, config.decode_weight, config.split_tokens, config.split_patience)
        self.membership = Membership(Patience(config.lost_after, config.stuck_after))
        self.workers: dict[str, Worker] = {}  # by name
        self.estimates: defaultdict[str, Estimate] = defaultdict(Estimate)  # by model
        self.prefixes = PrefixMap(config.prefixes)
        self.kv = KVIndex(config.kv_blocks, config.prefixes) if config.kv_events else None
        self.metrics = RouterMetrics()
        self._open: dict[str, dict[int, Leg]] = {}  # by worker id, then by attempt id
        self._retired: dict[str, float] = {}  # replaced workers with open attempts: by id, seconds of silence allowed
        self._keys = itertools.count()
        self._ticked = clock.now()
        self._detached: set[asyncio.Task[None]] = set()

    # -- workers -------------------------------------------------------------------------------------------------------

    def register(self, card: Card) -> None:
        """Add or update a worker.

        Raises InvalidRequest if its URL is this router's, and Superseded if its name is in use."""
        now = self._ran()
        if leads_to(card.url, self._config.host, self._config.port):
            raise InvalidRequest(
                f"worker {card.name!r} registered the URL {card.url}, which is this router's",
                hint="start the worker with another --port",
            )
        previous = self.membership.get(card.name)
        if previous is not None and self._is_taken(previous, card, now):
            raise Superseded(
                f"another worker named {card.name!r} is alive at {previous.card.url}",
                hint="start this worker with another --worker-name",
            )
        if not self.membership.register(card, now):
            raise Superseded(
                f"the worker name {card.name!r} belongs to a newer process",
                hint="start this worker with another --worker-name",
            )
        if previous is not None and previous.card.incarnation == card.incarnation:
            self.workers[card.name].peers = _peers(card)  # its engine may have been restarted
            self.workers[card.name].numerics = _numerics(card)
            return
        if previous is not None:
            log.info("worker replaced by another process: worker=%s", card.name)
            self._retire(self.workers[card.name], lost=self.membership.health(previous, now) is Health.LOST)
        max_running = max(1, sum(model.max_running for model in card.models))
        breaker = Breaker(self._config.breaker_failures, self._config.breaker_pause)
        self.workers[card.name] = Worker(
            id=f"{card.name}/{card.incarnation}",
            name=card.name,
            models=frozenset(model.name for model in card.models),
            max_running=max_running,
            limit=max_running + int(max_running * self._config.queue),
            breaker=breaker,
            dialect=card.dialect,
            role=card.role,
            peers=_peers(card),
            kv_tokens=_kv_tokens(card),
            numerics=_numerics(card),
        )
        self._retired.pop(self.workers[card.name].id, None)  # a process may register again after it was replaced
        log.info(
            "worker registered: worker=%s url=%s models=%s",
            card.name,
            card.url,
            ",".join(model.name for model in card.models),
        )
        self._warn_of_other_numerics(self.workers[card.name])

    def _is_taken(self, old: Member, card: Card, now: float) -> bool:
        """Whether the name belongs to another live process.

        That is one at another address (only one process can listen at the same), that sends heartbeats, is not shutting
        down, and has not failed since its last heartbeat."""
        if old.card.incarnation == card.incarnation or old.card.url == card.url or old.left:
            return False
        return self.membership.health(old, now) is not Health.LOST and not self.workers[card.name].doubted

    def _warn_of_other_numerics(self, worker: Worker) -> None:
        """Log, once per registration and model, that no stream can move between two workers."""
        for model in worker.models:
            for other in self.workers.values():
                if other is worker or model not in other.models or "native" not in (worker.dialect, other.dialect):
                    continue
                if difference := describe_difference(worker.numerics.get(model), other.numerics.get(model)):
                    log.warning(
                        "workers compute a model differently, no streams or KV blocks move between them:"
                        " model=%s worker=%s other=%s difference=%s",
                        model,
                        worker.name,
                        other.name,
                        difference,
                    )
                    break

    def beat(self, beat: Beat) -> None:
        """Update a worker from its heartbeat.

        Raises Superseded or NotFound if the heartbeat's process is not the registered one."""
        if self.membership.replaced(beat.incarnation):
            raise Superseded(
                f"the worker name {beat.name!r} belongs to a newer process",
                hint="start this worker with another --worker-name",
            )
        if not self.membership.beat(beat, self._ran()):
            raise NotFound(
                f"no worker {beat.name[:200]!r} with the incarnation {beat.incarnation[:200]!r} is registered",
                hint="register again",
            )
        worker = self.workers[beat.name]
        worker.doubted, worker.paired = False, frozenset(beat.paired)
        worker.reported(beat.prompt_tokens, beat.busy_seconds, beat.kv_usage)
        self._look(worker)

    def peers(self, name: str) -> dict[str, list[dict[str, Any]]]:
        """Return, by model, the engines from which this worker may fetch blocks.

        These are the engines of workers that prefill for others or drain."""
        member = self.membership.get(name)
        assert member is not None
        peers: dict[str, list[dict[str, Any]]] = {}
        if member.card.role != "prefill":
            models = {model.name for model in member.card.models}
            for other in self._publishing(member.card):
                for model in other.card.models:
                    if model.name not in models or model.peer is None:
                        continue
                    if other.left and model.peer.get("incarnation") not in member.beat.paired:
                        continue  # only already paired workers still fetch from a worker that shuts down
                    peers.setdefault(model.name, []).append(model.peer)
        return peers

    def _publishing(self, to: Card) -> Iterator[Member]:
        now = self._clock.now()
        for member in self.membership:
            card, is_lost = member.card, self.membership.health(member, now) is Health.LOST
            # A draining worker's streams move to other workers together with their blocks.
            offers_blocks = card.role == "prefill" or member.draining
            if offers_blocks and card.dialect == to.dialect and card.name != to.name and not is_lost:
                yield member

    def leave(self, name: str, incarnation: str) -> None:
        if self.membership.leave(name, incarnation):
            log.info("worker shutting down: worker=%s", name)
            self.workers[name].left = True
            self._look(self.workers[name])

    def drain(self, name: str, on: bool, move: bool = False) -> None:
        """Start or end the draining of a worker; raise NotFound for an unknown one.

        With `move_streams`, its streams move to other workers at once where possible."""
        if not self.membership.drain(name, on):
            known = ", ".join(self.workers) or "none"
            raise NotFound(f"no worker is named {name[:200]!r}", hint=f"registered workers: {known}")
        log.info("worker draining: worker=%s" if on else "worker accepts requests again: worker=%s", name)
        self._look(self.workers[name])
        if on and move:
            for attempt in list(self._open.get(self.workers[name].id, {}).values()):
                if attempt.movable and self._takes_over(attempt):
                    attempt.cut("drained")

    def is_ready_to_move(self, name: str) -> bool:
        """Whether every worker that could continue this one's streams can fetch its blocks, or never will."""
        if (worker := self.workers.get(name)) is None:
            return True
        models = {attempt.ask.model for attempt in self._open.get(worker.id, {}).values() if attempt.movable}
        return all(
            other.takes_from(worker, model)
            for model in models & worker.peers.keys()
            for other in self.workers.values()
            if other.ready and other.role != "prefill" and other.peers.get(model) and self._agree(worker, other, model)
        )

    def _agree(self, one: Worker, other: Worker, model: str) -> bool:
        return one.dialect == other.dialect == "native" and one.numerics.get(model) == other.numerics.get(model)

    def handover(self, ask: Ask, said: int, answering: Decision, origin: Worker) -> Decision | None:
        """Return the worker that a stream leaves, as the source of its KV blocks.

        Return None if fetching them is not worthwhile. `output_tokens`: tokens generated so far."""
        is_worthwhile = ask.single and answering.load.prefill + said >= HANDOVER_TOKENS
        is_available = self.workers.get(origin.name) is origin and answering.worker.takes_from(origin, ask.model)
        if not is_worthwhile or not is_available:
            return None
        return Decision(origin, Load(0.0, 0.0), Why.SPLIT, self.estimates[ask.model].prompt(ask.size))

    def _takes_over(self, leg: Leg) -> bool:
        """Whether another worker could continue this stream, or start it if there is no output yet."""
        model, now = leg.ask.model, self._clock.now()
        unable = self.unable(model, leg.decision.worker) if leg.first is not None else ()
        return any(worker.takes(model, now) and worker.id not in unable for worker in self.workers.values())

    def health(self, worker: Worker) -> Health:
        member = self.membership.get(worker.name)
        assert member is not None
        return self.membership.health(member, self._clock.now())

    def url(self, worker: Worker) -> str:
        """Return the worker's URL; raise EngineUnavailable if another process has taken its place."""
        member = self.membership.get(worker.name)
        if member is None or f"{worker.name}/{member.card.incarnation}" != worker.id:
            raise EngineUnavailable(f"worker {worker.name} was replaced by another process", hint="retry the request")
        return member.card.url.rstrip("/")

    def tick(self) -> None:
        """Abort attempts at workers that are lost or stuck, and remove expired workers."""
        now = self._ran()
        for worker in self.workers.values():
            self._look(worker)
        for name in self.membership.forget(now):
            log.info("worker removed: worker=%s", name)
            self._retire(self.workers.pop(name), lost=True)
            self._forget(name)
        for worker_id in [worker_id for worker_id in self._retired if worker_id not in self._open]:
            del self._retired[worker_id]
        for worker_id, timeout_s in self._retired.items():
            for attempt in self._open[worker_id].values():
                if now - attempt.heard > timeout_s:
                    attempt.cut(Health.STUCK.value)

    def _ran(self) -> float:
        """Return the current time, after excusing a pause of the router itself.

        If the router did not run (stopped, starved, a suspended machine), heartbeats could not be received, so the
        workers' deadlines move by the pause. `TICK_INTERVAL_S` of each pause still counts, so that workers are found
        lost even during an endless series of pauses."""
        now = self._clock.now()
        paused_s, self._ticked = now - self._ticked, now
        if paused_s > STANDSTILL:
            log.log(logging.WARNING if paused_s > 1.0 else logging.DEBUG, "router was paused: seconds=%.1f", paused_s)
            self.membership.excuse(paused_s - TICK, now)
            for attempt in (attempt for attempts in self._open.values() for attempt in attempts.values()):
                attempt.heard = min(attempt.heard + paused_s - TICK, now)
        return now

    def _forget(self, name: str) -> None:
        """Remove what is kept by worker or model name: names may differ at every start."""
        self.metrics.forget(name)
        for model in self.estimates.keys() - {model for worker in self.workers.values() for model in worker.models}:
            del self.estimates[model]

    def _look(self, worker: Worker) -> None:
        health = self.health(worker)
        ready = health is Health.READY
        if ready != worker.ready:
            level = logging.INFO if ready else logging.WARNING
            log.log(level, "worker health changed: worker=%s health=%s", worker.name, health.value)
        worker.ready = ready
        if health in (Health.LOST, Health.STUCK):
            self._cut(worker, health)

    def _cut(self, worker: Worker, health: Health) -> None:
        """Abort the worker's attempts.

        Streams that still deliver output survive missing heartbeats, which are late on a busy machine."""
        active_since = self._clock.now() - self._config.lost_after
        for attempt in self._open.get(worker.id, {}).values():
            is_active = attempt.first is not None and attempt.heard >= active_since
            if health is Health.STUCK or not is_active:
                attempt.cut(health.value)

    def _retire(self, worker: Worker, *, lost: bool) -> None:
        """Send no new requests to this worker.

        Its open attempts may still finish, as in a rolling restart."""
        worker.ready = False
        if self.kv is not None:
            self.kv.forget(worker.id)
        self._retired[worker.id] = self._config.lost_after if lost else self._config.stuck_after
        if lost:
            self._cut(worker, Health.LOST)

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open.values()))

    def choose(self, ask: Ask, without: set[str], *, urgent: bool = False, suspect: bool = False) -> Decision:
        """Return the worker for a request, as `policy.choose_worker` does."""
        workers, now = list(self.workers.values()), self._clock.now()
        shared = not self.prefixes.continues(ask.points)
        return choose(ask, workers, *self._known(ask), self._rules, now, without, urgent, suspect, shared)

    def unable(self, model: str, begun_by: Worker) -> set[str]:
        """Return the ids of workers that cannot continue a stream of `origin`.

        These are foreign servers and workers with other numerics."""
        numerics = begun_by.numerics.get(model)
        return {w.id for w in self.workers.values() if w.dialect != "native" or w.numerics.get(model) != numerics}

    def difference(self, model: str, begun_by: Worker) -> str:
        """Return how the other ready workers of this model differ from `origin`.

        Return "" if one of them agrees or none is ready."""
        now, others = self._clock.now(), (w for w in self.workers.values() if w.id != begun_by.id)
        ready = [w for w in others if w.takes(model, now) and w.dialect == "native"]
        differences = [describe_difference(begun_by.numerics.get(model), other.numerics.get(model)) for other in ready]
        return differences[0] if differences and all(differences) else ""

    def again(self, decision: Decision) -> Decision | None:
        """Return the decision if its worker is still available, else None."""
        worker = decision.worker
        is_available = self.workers.get(worker.name) is worker and self.health(worker) in (
            Health.READY,
            Health.DRAINING,
        )
        return decision if is_available and worker.breaker.allows(self._clock.now()) else None

    def split(self, ask: Ask, answering: Decision, *, must: bool) -> Decision | None:
        """Return the worker that computes the prompt for the answering worker, if worthwhile."""
        return split(
            ask, answering, list(self.workers.values()), *self._known(ask), self._rules, self._clock.now(), must
        )

    def peer(self, worker: Worker, model: str) -> dict[str, Any]:
        """Return the address of this worker's engine for other workers; {} if it has none."""
        member = self.membership.get(worker.name)
        models = member.card.models if member is not None else ()
        return next((each.peer for each in models if each.name == model and each.peer is not None), {})

    def detach(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a task that no code awaits, so that it is not garbage-collected."""
        self._detached.add(task)
        task.add_done_callback(self._detached.discard)

    def named(self, ask: Ask) -> Ask:
        """Fill in the model of a request that names none, where only one is possible."""
        served = [
            model for member in self.membership for model in member.card.models if member.card.name in self.workers
        ]
        models = {model.name for model in served if model.max_running} or {model.name for model in served}
        return replace(ask, model=next(iter(models))) if not ask.model and len(models) == 1 else ask

    def _known(self, ask: Ask) -> tuple[Mapping[str, int], Estimate]:
        is_served = any(ask.model in worker.models for worker in self.workers.values())
        cached_bytes = self.prefixes.known(ask.points)
        if self.kv is not None:
            cached_bytes = self.kv.known(ask.points, cached_bytes)
        return cached_bytes, self.estimates[ask.model] if is_served else Estimate()

    @contextmanager
    def opened(self, ask: Ask, decision: Decision) -> Iterator[Leg]:
        """Account for an attempt at a worker from its start to its end, whatever its outcome."""
        worker, now = decision.worker, self._clock.now()
        attempt = Leg(next(self._keys), ask, decision, now, now)
        worker.began(attempt.key, decision.load, now)
        self._open.setdefault(worker.id, {})[attempt.key] = attempt
        self.prefixes.saw(ask.points, worker.id)
        self.metrics.decided(decision)
        try:
            yield attempt
        finally:
            self._close(attempt)

    def came(self, leg: Leg, events: int) -> None:
        """Record that bytes of the reply have arrived, with so many events."""
        if leg.first is None:
            leg.decision.worker.prefilled(leg.key)
        self.heard(leg)
        leg.decision.worker.generated(leg.key, events)

    def told(self, leg: Leg, link: Link) -> None:
        """Record the prompt's last block, as the worker reported it."""
        leg.link = link
        if self.kv is not None:
            self.kv.told(leg.ask.points, link)

    def heard(self, leg: Leg) -> None:
        """Record that the worker sent something for this attempt."""
        leg.heard = self._clock.now()
        if leg.first is None:
            leg.first = leg.heard
            leg.decision.worker.breaker.succeeded()

    def _close(self, leg: Leg) -> None:
        worker, now, outcome = leg.decision.worker, self._clock.now(), leg.outcome
        duration_s = now - leg.began
        worker.ended(leg.key, duration_s if outcome == "answered" else None)
        open_attempts = self._open[worker.id]
        del open_attempts[leg.key]
        if not open_attempts:
            del self._open[worker.id]
        if self.kv is not None and leg.link is not None:
            self.kv.read(worker.id, leg.ask.points, leg.link)  # its block events have arrived by now
        match outcome:
            case "answered":
                worker.breaker.succeeded()
                self.estimates[leg.ask.model].correct(leg.ask, leg.usage.prompt, leg.usage.output)
            case "failed":
                worker.breaker.failed(now)
            case _:
                worker.breaker.neither()
        metrics_name = worker.name if worker.name in self.workers else GONE
        self.metrics.closed(metrics_name, outcome, duration_s, None if leg.first is None else leg.first - leg.began)
        leg.end_trace()


def _kv_tokens(card: Card) -> int:
    """Return the size of the KV cache, or 0 if several models have one.

    Heartbeats report only the joint usage of several caches."""
    caches = [model.kv_tokens for model in card.models if model.max_running]
    return caches[0] if len(caches) == 1 else 0


def _numerics(card: Card) -> dict[str, Numerics | None]:
    return {model.name: model.numerics for model in card.models}


def _peers(card: Card) -> dict[str, str]:
    return {model.name: str(model.peer.get("incarnation")) for model in card.models if model.peer is not None}
