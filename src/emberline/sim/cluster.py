"""SimCluster: simulated workers behind the real router's dispatcher, run by a queue of events in virtual time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from emberline.cluster.registration import Heartbeat, ModelRegistration, WorkerRegistration
from emberline.core.clock import ManualClock
from emberline.core.config import RouterConfig
from emberline.core.engine_config import SchedulerConfig
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.worker_attempt import WorkerAttempt
from emberline.router.policy import RoutingDecision, RoutingReason
from emberline.router.prefix_block_map import BlockPosition
from emberline.router.reply_usage import ReplyUsage
from emberline.router.request_summary import RequestSummary
from emberline.router.worker import RequestLoad
from emberline.sim.agents import MODEL_NAME, AgentSession
from emberline.sim.costmodel import CostModel, StepCosts
from emberline.sim.oracle import PrefixOracle
from emberline.sim.worker import SimStore, SimWorker

NEVER_S = 1e9  # a timeout that never passes: workers do not fail in the simulation
BALANCE_INTERVAL_S = 1.0  # virtual seconds between two samples of the load balance

WorkerChooser = Callable[[Dispatcher, RequestSummary], RoutingDecision]


@dataclass(slots=True)
class SimResult:
    """The measurements of one simulated run."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    oracle_tokens: int = 0  # prompt tokens that an unlimited cache shared by all workers would have had
    working_set: int = 0  # largest number of tokens of conversations that were active at the same time
    ttft_seconds: list[float] = field(default_factory=list)
    inter_token_seconds: list[float] = field(default_factory=list)
    load_imbalance: list[float] = field(default_factory=list)  # maximum over mean of the workers' open tokens
    conversations_by_worker: Counter[str] = field(default_factory=Counter)  # conversations that started at each worker
    requests: int = 0
    seconds: float = 0.0

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def conversation_imbalance(self, worker_count: int) -> float:
        """Return the largest number of conversations at one worker, divided by the mean over all workers."""
        return max(self.conversations_by_worker.values()) * worker_count / sum(self.conversations_by_worker.values())

    @property
    def oracle_cached_share(self) -> float:
        return self.oracle_tokens / self.prompt_tokens


@dataclass(slots=True)
class OpenSimTurn:
    """A turn of a conversation whose reply is being generated."""

    session: AgentSession
    attempt: WorkerAttempt
    dispatch_context: ExitStack
    sent_at: float
    prompt_len: int
    chain_end: BlockPosition | None = None  # last full block of the prompt
    num_cached: int = 0
    reply: list[int] = field(default_factory=list)
    last_token_at: float = 0.0


@dataclass(frozen=True, slots=True)
class SimClusterConfig:
    workers: int = 4
    kv_tokens: int = 131_072  # KV cache of each worker
    max_running: int = 64
    batch_tokens: int = 2048
    cost: StepCosts = field(default_factory=CostModel)


class SimCluster:
    def __init__(
        self,
        cluster_config: SimClusterConfig,
        chooser: WorkerChooser,
        *,
        sends_session_ids: bool = False,
        store: SimStore | None = None,
        kv_events: bool = False,
    ) -> None:
        """`sends_session_ids`: clients send a session header. `kv_events`: the router uses workers' KV events."""
        self.clock = ManualClock()
        router = RouterConfig(lost_after=NEVER_S, stuck_after=NEVER_S, kv_events=kv_events)
        self.dispatch = Dispatcher(router, self.clock)
        self.result = SimResult()
        self._chooser = chooser
        self._names_session = sends_session_ids
        config = SchedulerConfig(
            max_running=cluster_config.max_running,
            max_batch_tokens=cluster_config.batch_tokens,
            max_context=cluster_config.kv_tokens,
        )
        self._workers: dict[str, SimWorker] = {}
        for i in range(cluster_config.workers):
            name = f"worker-{i}"
            worker = self._workers[name] = SimWorker(name, config, cluster_config.kv_tokens, cluster_config.cost, store)
            if kv_events:
                worker.engine.kv.track_prefix_changes()
            model = ModelRegistration(
                MODEL_NAME,
                "sim",
                config.max_context,
                cluster_config.max_running,
                cluster_config.kv_tokens,
                config.block_size,
            )
            self.dispatch.register(WorkerRegistration(name, name, f"http://{name}", (model,)))
            self.dispatch.record_heartbeat(Heartbeat(name, name))
        self._open_turns: dict[str, OpenSimTurn] = {}
        self._oracle = PrefixOracle(config.block_size)
        self._live_tokens: dict[str, int] = {}  # tokens of each active conversation
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_ids = itertools.count()

    def run(self, sessions: list[AgentSession]) -> SimResult:
        for session in sessions:
            self._schedule_callback(session.starts_at, partial(self._start_turn, session))
        self._schedule_callback(BALANCE_INTERVAL_S, self._record_load_imbalance)
        while self._events:
            self.clock.time, _, event = heapq.heappop(self._events)
            event()
        self.result.seconds = self.clock.time
        assert not self._open_turns and not self.dispatch.open_attempt_count
        for worker in self._workers.values():
            worker.engine.kv.check_invariants()
        return self.result

    def _schedule_callback(self, time: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._event_ids), callback))

    def _start_turn(self, session: AgentSession) -> None:
        body, tokens, reply = session.next_request()
        summary = RequestSummary.parse(body, session.name if self._names_session else "")
        decision = self._chooser(self.dispatch, summary)
        if session.name not in self._live_tokens:
            self.result.conversations_by_worker[decision.worker.name] += 1
        context = ExitStack()
        attempt = context.enter_context(self.dispatch.open_attempt(summary, decision))
        name, now = f"{session.name}/{session.turns_left}", self.clock.time
        self.result.oracle_tokens += self._oracle.count_cached_and_add(tokens)
        self._live_tokens[session.name] = len(tokens) + reply
        self.result.working_set = max(self.result.working_set, sum(self._live_tokens.values()))
        worker = self._workers[decision.worker.name]
        chain_end = worker.last_prompt_block(tokens) if self.dispatch.kv_index is not None else None
        self._open_turns[name] = OpenSimTurn(session, attempt, context, now, len(tokens), chain_end)
        params = SamplingParams(max_tokens=reply, ignore_eos=True, seed=0)
        worker.add_submission(Submission(name, tokens, params, timeout=NEVER_S), now)
        if not worker.is_stepping:
            self._start_step(worker)

    def _start_step(self, worker: SimWorker) -> None:
        outputs, ends = worker.step(self.clock.time)
        worker.is_stepping = True
        self._schedule_callback(ends, partial(self._finish_step, worker, outputs))

    def _finish_step(self, worker: SimWorker, outputs: list[Output]) -> None:
        if (index := self.dispatch.kv_index) is not None:
            id_ = self.dispatch.workers[worker.name].id
            for batch in worker.batches_after(*index.last_applied_batch(id_)):
                index.apply_batch(id_, batch)
        for output in outputs:
            self._receive_output(output)
        worker.is_stepping = False
        if not worker.is_idle:
            self._start_step(worker)

    def _receive_output(self, output: Output) -> None:
        turn, now = self._open_turns[output.id], self.clock.time
        if not turn.reply and turn.chain_end is not None:
            self.dispatch.record_prompt_end(turn.attempt, turn.chain_end)
        self.dispatch.record_reply_bytes(turn.attempt, len(output.tokens))
        (self.result.inter_token_seconds if turn.reply else self.result.ttft_seconds).append(
            now - (turn.last_token_at or turn.sent_at)
        )
        turn.num_cached += output.cached_tokens
        turn.last_token_at = now
        turn.reply += output.tokens
        if output.finish is None:
            return
        assert output.error is None, output
        del self._open_turns[output.id]
        turn.attempt.usage = ReplyUsage(turn.prompt_len, len(turn.reply), turn.num_cached)
        turn.attempt.outcome = "answered"
        turn.dispatch_context.close()
        self.result.requests += 1
        self.result.prompt_tokens += turn.prompt_len
        self.result.cached_tokens += turn.num_cached
        turn.session.record_reply(turn.reply)
        if turn.session.turns_left:
            self._oracle.count_cached_and_add(turn.session.conversation_tokens)
            self._schedule_callback(now + turn.session.draw_pause_s(), partial(self._start_turn, turn.session))
        else:
            del self._live_tokens[turn.session.name]

    def _record_load_imbalance(self) -> None:
        work = [worker.remaining_tokens for worker in self._workers.values()]
        if sum(work) > 0:
            self.result.load_imbalance.append(max(work) * len(work) / sum(work))
        if self._events:
            self._schedule_callback(self.clock.time + BALANCE_INTERVAL_S, self._record_load_imbalance)


def choose_worker_by_policy(dispatcher: Dispatcher, summary: RequestSummary) -> RoutingDecision:
    return dispatcher.choose_worker(summary, set())


def make_random_chooser(seed: int) -> WorkerChooser:
    rng = random.Random(seed)
    return lambda dispatch, ask: _make_decision_for(dispatch, ask, rng.choice(sorted(dispatch.workers)))


def make_round_robin_chooser() -> WorkerChooser:
    counter = itertools.count()

    def choose_next_worker(dispatcher: Dispatcher, summary: RequestSummary) -> RoutingDecision:
        names = sorted(dispatcher.workers)
        return _make_decision_for(dispatcher, summary, names[next(counter) % len(names)])

    return choose_next_worker


def choose_worker_with_fewest_requests(dispatcher: Dispatcher, summary: RequestSummary) -> RoutingDecision:
    return _make_decision_for(
        dispatcher,
        summary,
        min(dispatcher.workers.values(), key=lambda worker: (worker.open_requests, worker.name)).name,
    )


def _make_decision_for(dispatcher: Dispatcher, summary: RequestSummary, worker_name: str) -> RoutingDecision:
    """Return a routing decision for the worker with this name, with the loads that the router estimates."""
    estimate = dispatcher.estimators[summary.model]
    load = RequestLoad(estimate.estimate_prompt_tokens(summary.prompt_bytes), estimate.estimate_output_tokens(summary))
    return RoutingDecision(dispatcher.workers[worker_name], load, RoutingReason.LOAD, 0.0)
