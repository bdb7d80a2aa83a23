"""SimCluster: simulated workers behind the production router, driven by events in virtual time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from emberline.cluster.card import Beat, Card, ModelCard
from emberline.core.clock import ManualClock
from emberline.core.config import RouterConfig, SchedulerConfig
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.router.ask import Ask
from emberline.router.chains import Link
from emberline.router.policy import Decision, Why
from emberline.router.usage import Usage
from emberline.router.worker import Load
from emberline.server.routing.dispatch import Dispatch
from emberline.server.routing.leg import Leg
from emberline.sim.agents import MODEL, Session
from emberline.sim.costmodel import CostModel
from emberline.sim.oracle import Oracle
from emberline.sim.worker import SimWorker, Store

FAR = 1e9  # a timeout that never passes: workers do not fail in the simulation
LOOK = 1.0  # virtual seconds between two samples of the load balance

Chooser = Callable[[Dispatch, Ask], Decision]


@dataclass(slots=True)
class Seen:
    """The measurements of one simulated run."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    known_tokens: int = 0  # prompt tokens that an unlimited cache shared by all workers would have had
    working_set: int = 0  # largest number of tokens of conversations that were active at the same time
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    balance: list[float] = field(default_factory=list)  # maximum over mean of the workers' open tokens
    conversations: Counter[str] = field(default_factory=Counter)  # conversations that started at each worker
    requests: int = 0
    seconds: float = 0.0

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def spread(self, workers: int) -> float:
        """Return the largest number of conversations of a worker, divided by the mean."""
        return max(self.conversations.values()) * workers / sum(self.conversations.values())

    @property
    def oracle_share(self) -> float:
        return self.known_tokens / self.prompt_tokens


@dataclass(slots=True)
class Open:
    """A turn whose reply is being generated."""

    session: Session
    leg: Leg
    account: ExitStack
    asked: float
    prompt: int
    link: Link | None = None  # last full block of the prompt
    cached: int = 0
    reply: list[int] = field(default_factory=list)
    last: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    workers: int = 4
    kv_tokens: int = 131_072  # KV cache of each worker
    max_running: int = 64
    batch_tokens: int = 2048
    cost: CostModel = field(default_factory=CostModel)


class SimCluster:
    def __init__(
        self,
        shape: Shape,
        chooser: Chooser,
        *,
        header: bool = False,
        store: Store | None = None,
        kv_events: bool = False,
    ) -> None:
        """`names_session`: clients send a session id.

        `kv_events`: the router subscribes to the workers' KV cache events."""
        self.clock = ManualClock()
        router = RouterConfig(lost_after=FAR, stuck_after=FAR, kv_events=kv_events)
        self.dispatch = Dispatch(router, self.clock)
        self.seen = Seen()
        self._chooser = chooser
        self._header = header
        config = SchedulerConfig(
            max_running=shape.max_running, max_batch_tokens=shape.batch_tokens, max_context=shape.kv_tokens
        )
        self._workers: dict[str, SimWorker] = {}
        for i in range(shape.workers):
            name = f"worker-{i}"
            worker = self._workers[name] = SimWorker(name, config, shape.kv_tokens, shape.cost, store)
            if kv_events:
                worker.engine.kv.watch()
            model = ModelCard(MODEL, "sim", config.max_context, shape.max_running, shape.kv_tokens, config.block_size)
            self.dispatch.register(Card(name, name, f"http://{name}", (model,)))
            self.dispatch.beat(Beat(name, name))
        self._open: dict[str, Open] = {}
        self._oracle = Oracle(config.block_size)
        self._live: dict[str, int] = {}  # tokens of each active conversation
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self, sessions: list[Session]) -> Seen:
        for session in sessions:
            self._at(session.begins, partial(self._turn, session))
        self._at(LOOK, self._look)
        while self._calendar:
            self.clock.time, _, event = heapq.heappop(self._calendar)
            event()
        self.seen.seconds = self.clock.time
        assert not self._open and not self.dispatch.num_open
        for worker in self._workers.values():
            worker.engine.kv.check()
        return self.seen

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._calendar, (when, next(self._order), event))

    def _turn(self, session: Session) -> None:
        body, tokens, reply = session.ask()
        ask = Ask.read(body, session.name if self._header else "")
        decision = self._chooser(self.dispatch, ask)
        if session.name not in self._live:
            self.seen.conversations[decision.worker.name] += 1
        account = ExitStack()
        leg = account.enter_context(self.dispatch.opened(ask, decision))
        name, now = f"{session.name}/{session.turns}", self.clock.time
        self.seen.known_tokens += self._oracle.cached(tokens)
        self._live[session.name] = len(tokens) + reply
        self.seen.working_set = max(self.seen.working_set, sum(self._live.values()))
        worker = self._workers[decision.worker.name]
        link = worker.end_of(tokens) if self.dispatch.kv is not None else None
        self._open[name] = Open(session, leg, account, now, len(tokens), link)
        params = SamplingParams(max_tokens=reply, ignore_eos=True, seed=0)
        worker.add(Submission(name, tokens, params, timeout=FAR), now)
        if not worker.stepping:
            self._step(worker)

    def _step(self, worker: SimWorker) -> None:
        outputs, ends = worker.step(self.clock.time)
        worker.stepping = True
        self._at(ends, partial(self._stepped, worker, outputs))

    def _stepped(self, worker: SimWorker, outputs: list[Output]) -> None:
        if (index := self.dispatch.kv) is not None:
            id_ = self.dispatch.workers[worker.name].id
            for batch in worker.batches(*index.position(id_)):
                index.apply(id_, batch)
        for output in outputs:
            self._came(output)
        worker.stepping = False
        if not worker.idle:
            self._step(worker)

    def _came(self, output: Output) -> None:
        turn, now = self._open[output.id], self.clock.time
        if not turn.reply and turn.link is not None:
            self.dispatch.told(turn.leg, turn.link)
        self.dispatch.came(turn.leg, len(output.tokens))
        (self.seen.between if turn.reply else self.seen.first).append(now - (turn.last or turn.asked))
        turn.cached += output.cached_tokens
        turn.last = now
        turn.reply += output.tokens
        if output.finish is None:
            return
        assert output.error is None, output
        del self._open[output.id]
        turn.leg.usage = Usage(turn.prompt, len(turn.reply), turn.cached)
        turn.leg.outcome = "answered"
        turn.account.close()
        self.seen.requests += 1
        self.seen.prompt_tokens += turn.prompt
        self.seen.cached_tokens += turn.cached
        turn.session.replied(turn.reply)
        if turn.session.turns:
            self._oracle.cached(turn.session.tokens)
            self._at(now + turn.session.pause(), partial(self._turn, turn.session))
        else:
            del self._live[turn.session.name]

    def _look(self) -> None:
        work = [worker.tokens_left for worker in self._workers.values()]
        if sum(work) > 0:
            self.seen.balance.append(max(work) * len(work) / sum(work))
        if self._calendar:
            self._at(self.clock.time + LOOK, self._look)


def by_policy(dispatch: Dispatch, ask: Ask) -> Decision:
    return dispatch.choose(ask, set())


def at_random(seed: int) -> Chooser:
    rng = random.Random(seed)
    return lambda dispatch, ask: _given(dispatch, ask, rng.choice(sorted(dispatch.workers)))


def in_turn() -> Chooser:
    turns = itertools.count()

    def choose(dispatch: Dispatch, ask: Ask) -> Decision:
        names = sorted(dispatch.workers)
        return _given(dispatch, ask, names[next(turns) % len(names)])

    return choose


def fewest_requests(dispatch: Dispatch, ask: Ask) -> Decision:
    return _given(dispatch, ask, min(dispatch.workers.values(), key=lambda worker: (worker.open, worker.name)).name)


def _given(dispatch: Dispatch, ask: Ask, name: str) -> Decision:
    """Return the decision that the router would record if it had chosen this worker."""
    estimate = dispatch.estimates[ask.model]
    load = Load(estimate.prompt(ask.size), estimate.output(ask))
    return Decision(dispatch.workers[name], load, Why.LOAD, 0.0)
