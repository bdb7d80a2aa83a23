"""Engine: a scheduler and a runner. Each `step` schedules, runs and updates."""

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

PAUSE = 0.002  # longest wait of a step that has nothing to compute; other engines may share the loop


class Runner(Protocol):
    """Computes plans: the fake, the torch runners and the simulator implement this."""

    num_blocks: int
    vocab_size: int
    eos: frozenset[int]

    @property
    def layout(self) -> str:
        """Name of model and cache format, part of every block's hash."""
        ...

    def run(self, plan: StepPlan) -> StepResult: ...


@runtime_checkable
class AheadRunner(Runner, Protocol):
    """A runner that accepts the next plan before the result of the last one is read."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start a plan after all earlier ones, and return a function that waits for its result."""
        ...


@runtime_checkable
class PreparingRunner(Runner, Protocol):
    """A runner that can use idle time to make later steps faster."""

    @property
    def is_preparing(self) -> bool:
        """Whether something is left to prepare."""
        ...

    def prepare_next(self) -> bool:
        """Prepare a little, for some 20 ms at most; return False if nothing was left."""
        ...


@runtime_checkable
class GrammarRunner(Runner, Protocol):
    """A runner that supports grammars and compiles them in another thread."""

    def prepare(self, grammar: Grammar) -> Future[Any]:
        """Return a future that is done when requests with this grammar can start without waiting.

        The compiled grammar is kept as long as the future is."""
        ...


class Matching(Protocol):
    """A compiled grammar with its state after an output."""

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
        """`tiers`: KV tiers below the runner's cache, if the runner executes a plan's copies.
        `transfer_endpoint`: exchanges blocks of the runner's cache with other engines."""
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
        self._planned: StepPlan | None = None  # a plan that is run in the next step: early outputs are returned first
        self._children: dict[str, list[str]] = {}
        self._grammars: dict[str, Future[Any]] = {}  # of open submissions
        self._steps = 0
        self._last = (0, 0.0)
        self._busy = 0.0
        self._host = 0.0

    def add(self, submission: Submission, arrival: float | None = None) -> None:
        """Accept a submission; each of its completions then ends exactly once.

        `arrival`: the time on the engine's clock, of a submission that has already waited. Raises InvalidRequest, or
        Overloaded if too many requests are open."""
        if submission.id in self._children:
            raise InvalidRequest(f"a request with id {submission.id!r} is already open", param="id")
        self._intake.check(submission)
        if len(self.scheduler.requests) >= self.config.max_running + self.config.max_waiting:
            raise Overloaded(
                f"the queue is full: {self.scheduler.num_waiting} requests are waiting",
                hint="retry after the time in Retry-After, or raise --max-waiting",
            )
        self._prepare(submission)
        requests = self._intake.requests(submission, self.clock.now() if arrival is None else arrival)
        self._children[submission.id] = [request.id for request in requests]
        for request in requests:
            self.scheduler.add(request)

    def abort(self, submission_id: str) -> None:
        for request_id in self._children.get(submission_id, ()):
            self.scheduler.abort(request_id)

    def abort_one(self, submission_id: str, index: int) -> None:
        """End one of the n completions; the others continue."""
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
        """Wait briefly, since all requests wait for a grammar, for blocks, or for the end of a lease."""
        if held := self.scheduler.waiting.held:
            futures.wait([self._grammars[name] for name in held], PAUSE, futures.FIRST_COMPLETED)
        elif (source := self.kv.pulls or self.kv.tiers) is not None:
            source.wait(PAUSE)

    def _step_plainly(self) -> list[Output]:
        began = time.perf_counter()
        plan, self._planned = self._planned or self.scheduler.schedule(), None
        if plan is not None and self.scheduler.has_early_outputs:
            self._planned = plan  # it runs in the next step, before anything else is planned
            return self._collect()
        if plan is not None:
            started = time.perf_counter()
            result = self.runner.run(plan)
            ran = time.perf_counter() - started
            self._take(plan, result, ran)
            self._host += time.perf_counter() - began - ran
        return self._collect()

    def _step_ahead(self, runner: AheadRunner) -> list[Output]:
        """Plan and launch a step, then wait for the previous one, so that the device is never idle.

        With nothing to plan, wait for the step in flight."""
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
        """Whether it needs steps although it is idle: peers hold its blocks, or are being connected."""
        unsettled = self.pairing is not None and self.pairing.unsettled
        return unsettled or self.kv.has_pinned or self.kv.num_quarantined > 0

    def close(self) -> None:
        """Write pending blocks to lower tiers, for a limited time, and disconnect from other engines."""
        if self.kv.tiers is not None:
            self.kv.tiers.close()
        if self.kv.pulls is not None:
            self.kv.pulls.close()
        if self.pairing is not None:
            self.pairing.close()
        if self.dock is not None:
            self.dock.close()

    def stats(self) -> Stats:
        """Return current statistics. Each sample of a block's residency is returned once."""
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
        """Start compiling the submission's grammar and block its requests in the queue until that is done.

        They wait in the queue so that deadlines and aborts apply to them."""
        grammar = submission.params.grammar
        if grammar is not None and isinstance(self.runner, GrammarRunner):
            self._grammars[submission.id] = self.runner.prepare(grammar)
            self.scheduler.waiting.held.add(submission.id)

    def _release(self) -> None:
        """Unblock submissions whose grammar is compiled; end those whose grammar is invalid or complete."""
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
        """Return whether the output that the request was submitted with already completes its grammar."""
        request = self.scheduler.requests.get(request_id)
        if request is None or not request.resumed:
            return False
        matcher = grammar.fork()
        for token in request.tokens[request.prompt_len :]:
            if token not in self.runner.eos:
                matcher.accept(token)
        return matcher.done
