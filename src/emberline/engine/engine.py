"""Engine: scheduler and runner composed. `step` is schedule, run, update; the rest is the way in and out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from emberline.core.clock import Clock, SystemClock
from emberline.core.config import SchedulerConfig
from emberline.core.errors import InvalidRequest, Overloaded
from emberline.core.events import Output, Stats, TransferStats
from emberline.core.params import Grammar
from emberline.core.plan import StepPlan, StepResult
from emberline.core.request import FinishReason, Submission
from emberline.engine.intake import Intake
from emberline.engine.pairing import Pairing
from emberline.engine.publisher import Publisher
from emberline.engine.scheduler import Scheduler
from emberline.kv.manager import KVManager
from emberline.kv.pulls import Pulls
from emberline.kv.tiers.stack import TierStack
from emberline.kv.transfer.dock import Dock

PAUSE = 0.002  # seconds of a step that has nothing to do but wait; other engines may share the loop


class Runner(Protocol):
    """Computes a plan. The fake, the torch runner and the simulator are all of this shape."""

    num_blocks: int
    vocab_size: int
    eos: frozenset[int]

    @property
    def layout(self) -> str:
        """Names model and cache form: part of every block's identity."""
        ...

    def run(self, plan: StepPlan) -> StepResult: ...


@runtime_checkable
class AheadRunner(Runner, Protocol):
    """One that can be given the next plan before the result of the last is in."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Starts a plan, after all those before it; the call it gives back waits for the result."""
        ...


@runtime_checkable
class PreparingRunner(Runner, Protocol):
    """One that can use idle time to make later steps faster."""

    @property
    def is_preparing(self) -> bool:
        """Whether something is left to prepare."""
        ...

    def prepare_next(self) -> bool:
        """Prepare a little, for some 20 ms at most; return False if nothing was left."""
        ...


@runtime_checkable
class GrammarRunner(Runner, Protocol):
    """One that follows grammars, and compiles them beside the loop."""

    def prepare(self, grammar: Grammar) -> Future[Any]:
        """Done when requests with this grammar can start at once; that holds as long as it is kept."""
        ...


class Matching(Protocol):
    """A compiled grammar, and how far an output has come in it."""

    @property
    def done(self) -> bool: ...

    def accept(self, token: int) -> bool: ...

    def fork(self) -> Matching: ...


class Engine:
    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        clock: Clock | None = None,
        tiers: TierStack | None = None,
        dock: Dock | None = None,
    ) -> None:
        """`tiers`: below the runner's cache, for a runner that makes a plan's copies. `dock`: of the runner's cache, if
        other engines are to exchange blocks with it."""
        self.config = config
        self.runner = runner
        self.clock = clock or SystemClock()
        self.kv = KVManager(
            runner.num_blocks,
            config.block_size,
            runner.layout,
            prefix_cache=config.prefix_cache,
            clock=self.clock,
            load_timeout=config.load_timeout,
            tiers=tiers,
            pulls=Pulls(dock.receiver, patience=dock.config.patience, clock=self.clock) if dock else None,
            on_take=dock.receiver.region.renew if dock else lambda block: None,
        )
        self.dock = dock
        self.pairing = Pairing(dock.receiver) if dock else None
        self._publisher = Publisher(dock.sender, self.kv, dock.config.lease) if dock else None
        self.scheduler = Scheduler(config, self.kv, self.clock, runner.eos, self._publisher)
        self.max_context = min(config.max_context, runner.num_blocks * config.block_size)
        self._intake = Intake(self.max_context, runner.vocab_size, publishes=dock is not None)
        self._ahead = runner if isinstance(runner, AheadRunner) else None
        self._preparing = runner if isinstance(runner, PreparingRunner) else None
        self._under_way: deque[tuple[StepPlan, Callable[[], StepResult]]] = deque()
        self._planned: StepPlan | None = None  # not run yet: outputs that were known before it left first
        self._children: dict[str, list[str]] = {}
        self._grammars: dict[str, Future[Any]] = {}  # of open submissions
        self._steps = 0
        self._last = (0, 0.0)
        self._busy = 0.0
        self._host = 0.0

    def add(self, submission: Submission, arrival: float | None = None) -> None:
        """Takes a submission in, or raises; what is taken in ends exactly once per completion. `arrival`: of one that
        has waited elsewhere, on the engine's clock."""
        if submission.id in self._children:
            raise InvalidRequest(f"a request with id {submission.id!r} is open", param="id")
        self._intake.check(submission)
        if len(self.scheduler.requests) >= self.config.max_running + self.config.max_waiting:
            raise Overloaded(f"{self.scheduler.num_waiting} requests are waiting", hint="retry after the given time")
        self._prepare(submission)
        requests = self._intake.requests(submission, self.clock.now() if arrival is None else arrival)
        self._children[submission.id] = [request.id for request in requests]
        for request in requests:
            self.scheduler.add(request)

    def abort(self, submission_id: str) -> None:
        for request_id in self._children.get(submission_id, ()):
            self.scheduler.abort(request_id)

    def abort_one(self, submission_id: str, index: int) -> None:
        """Ends one of the n completions; the others go on."""
        self.scheduler.abort(f"{submission_id}#{index}")

    def step(self) -> list[Output]:
        self._release()
        if self._publisher is not None:
            self._publisher.collect()
        steps = self._steps
        outputs = self._step_plainly() if self._ahead is None else self._step_ahead(self._ahead)
        if steps == self._steps and not outputs and not self._under_way and not self.idle:
            self._rest()
        return outputs

    def _rest(self) -> None:
        """There are requests, and nothing to be done: they wait for a grammar, for content of their blocks, or for
        blocks that another engine reads or writes."""
        if held := self.scheduler.waiting.held:
            futures.wait([self._grammars[name] for name in held], PAUSE, futures.FIRST_COMPLETED)
        elif (source := self.kv.pulls or self.kv.tiers) is not None:
            source.wait(PAUSE)

    def _step_plainly(self) -> list[Output]:
        began = time.perf_counter()
        plan, self._planned = self._planned or self.scheduler.schedule(), None
        if plan is not None and self.scheduler.has_early_outputs:
            self._planned = plan  # it runs next, whatever comes: nothing else is planned before
            return self._collect()
        if plan is not None:
            started = time.perf_counter()
            result = self.runner.run(plan)
            ran = time.perf_counter() - started
            self._take(plan, result, ran)
            self._host += time.perf_counter() - began - ran
        return self._collect()

    def _step_ahead(self, runner: AheadRunner) -> list[Output]:
        """Plans and launches a step, and only then waits for the one before it: the device goes from one to the next
        without us. With nothing to plan, waits for what is under way."""
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._under_way.append((plan, runner.launch(plan)))
        waited = 0.0
        if len(self._under_way) > (plan is not None):
            done, wait = self._under_way.popleft()
            started = time.perf_counter()
            result = wait()
            waited = time.perf_counter() - started
            self._take(done, result, result.seconds)
        self._host += time.perf_counter() - began - waited
        return self._collect()

    def _take(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        self.scheduler.update(plan, result)
        self._steps += 1
        self._busy += seconds
        self._last = (plan.num_tokens, seconds)

    @property
    def is_preparing(self) -> bool:
        return self._preparing is not None and self._preparing.is_preparing

    def prepare_next(self) -> bool:
        """Use idle time to make later steps faster; return False if nothing was left to prepare."""
        return self._preparing is not None and self._preparing.prepare_next()

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._under_way and self._planned is None

    @property
    def attentive(self) -> bool:
        """Whether it should be stepped soon, idle as it may be: others hold blocks of it, or are being paired with."""
        unsettled = self.pairing is not None and self.pairing.unsettled
        return unsettled or self.kv.has_pinned or self.kv.num_quarantined > 0

    def close(self) -> None:
        """Writes what is to be written to lower tiers, if that does not take long, and parts from other engines."""
        if self.kv.tiers is not None:
            self.kv.tiers.close()
        if self.kv.pulls is not None:
            self.kv.pulls.close()
        if self.pairing is not None:
            self.pairing.close()
        if self.dock is not None:
            self.dock.close()

    def stats(self) -> Stats:
        """As of now; samples of blocks are told once."""
        s = self.scheduler
        return Stats(
            step=self._steps,
            running=len(s.running),
            loading=s.num_loading,
            waiting=s.num_waiting,
            deferred=s.num_deferred,
            blocks_total=self.kv.total,
            blocks_free=self.kv.num_free,
            blocks_cached=self.kv.num_cached,
            preemptions=s.preemptions,
            prefix_queries=self.kv.queries,
            prefix_hits=self.kv.hits,
            prompt_tokens=s.prompt_tokens,
            generated_tokens=s.generated_tokens,
            step_tokens=self._last[0],
            step_seconds=self._last[1],
            busy_seconds=self._busy,
            cpu_seconds=time.process_time(),
            host_seconds=self._host,
            residency=self.kv.residency.drain(),
            tiers=self.kv.tiers.stats() if self.kv.tiers is not None else {},
            transfer=self._transfer(),
        )

    def _transfer(self) -> TransferStats | None:
        if self.kv.pulls is None or self._publisher is None or self.dock is None:
            return None
        stats = self.kv.pulls.stats()
        stats.reached, stats.passed_over = dict(self.dock.receiver.reached), dict(self.dock.receiver.passed_over)
        self._publisher.report(stats)
        stats.quarantined_blocks = self.kv.num_quarantined
        return stats

    def _collect(self) -> list[Output]:
        outputs = self.scheduler.drain()
        for output in outputs:
            if output.finish is not None:
                children = self._children[output.id]
                children.remove(f"{output.id}#{output.index}")
                if not children:
                    del self._children[output.id]
                    self._grammars.pop(output.id, None)
                    self.scheduler.waiting.held.discard(output.id)
        return outputs

    def _prepare(self, submission: Submission) -> None:
        """Its requests wait in the queue, where deadlines and aborts reach them, until their grammar is compiled."""
        grammar = submission.params.grammar
        if grammar is not None and isinstance(self.runner, GrammarRunner):
            self._grammars[submission.id] = self.runner.prepare(grammar)
            self.scheduler.waiting.held.add(submission.id)

    def _release(self) -> None:
        """Of the submissions held, those whose grammar is compiled may start; those whose grammar cannot be, end."""
        held = self.scheduler.waiting.held
        for name in [name for name in held if self._grammars[name].done()]:
            held.remove(name)
            error = self._grammars[name].exception()
            for request_id in self._children[name]:
                if error is not None:
                    self.scheduler.abort(request_id, str(error))
                elif self._completes(request_id, self._grammars[name].result()):
                    self.scheduler.end(request_id, FinishReason.STOP)

    def _completes(self, request_id: str, grammar: Matching) -> bool:
        """Whether the output that a request came with is all that its grammar allows."""
        request = self.scheduler.requests.get(request_id)
        if request is None or not request.resumed:
            return False
        matcher = grammar.fork()
        for token in request.tokens[request.prompt_len :]:
            if token not in self.runner.eos:
                matcher.accept(token)
        return matcher.done
