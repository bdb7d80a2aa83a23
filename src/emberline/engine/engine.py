"""Engine: scheduler and runner composed. `step` is schedule, run, update; the rest is the way in and out."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from hashlib import blake2b
from typing import Any, Protocol, runtime_checkable

from emberline.core.clock import Clock, SystemClock
from emberline.core.config import SchedulerConfig
from emberline.core.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from emberline.core.events import Output, Stats
from emberline.core.params import Grammar
from emberline.core.plan import StepPlan, StepResult
from emberline.core.request import Request, Submission
from emberline.engine.scheduler import Scheduler
from emberline.kv.manager import KVManager
from emberline.kv.tiers.stack import TierStack

PAUSE = 0.002  # seconds of a step that has nothing to do but wait for a grammar; other engines may share the loop


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
class GrammarRunner(Runner, Protocol):
    """One that follows grammars, and compiles them beside the loop."""

    def prepare(self, grammar: Grammar) -> Future[Any]:
        """Done when requests with this grammar can start at once; that holds as long as it is kept."""
        ...


class Engine:
    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        clock: Clock | None = None,
        tiers: TierStack | None = None,
    ) -> None:
        """`tiers`: below the runner's cache, for a runner that makes a plan's copies."""
        self.config = config
        self.runner = runner
        self.clock = clock or SystemClock()
        self.kv = KVManager(
            runner.num_blocks,
            config.block_size,
            runner.layout,
            prefix_cache=config.prefix_cache,
            clock=self.clock,
            tiers=tiers,
        )
        self.scheduler = Scheduler(config, self.kv, self.clock, runner.eos)
        self.max_context = min(config.max_context, runner.num_blocks * config.block_size)
        self._ahead = runner if isinstance(runner, AheadRunner) else None
        self._under_way: deque[tuple[StepPlan, Callable[[], StepResult]]] = deque()
        self._children: dict[str, list[str]] = {}
        self._grammars: dict[str, Future[Any]] = {}  # of open submissions
        self._steps = 0
        self._last = (0, 0.0)
        self._busy = 0.0
        self._host = 0.0

    def add(self, submission: Submission, arrival: float | None = None) -> None:
        """Takes a submission in, or raises; what is taken in ends exactly once per completion. `arrival`: of one that
        has waited elsewhere, on the engine's clock."""
        self._validate(submission)
        if len(self.scheduler.requests) >= self.config.max_running + self.config.max_waiting:
            raise Overloaded(f"{self.scheduler.num_waiting} requests are waiting", hint="retry after the given time")
        self._prepare(submission)
        prompt, params = submission.prompt, submission.params
        now = self.clock.now() if arrival is None else arrival
        room = self.max_context - len(prompt)
        limit = len(prompt) + (room if params.max_tokens is None else min(params.max_tokens, room))
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        ids = [f"{submission.id}#{i}" for i in range(params.n)]
        self._children[submission.id] = ids
        for i, request_id in enumerate(ids):
            self.scheduler.add(
                Request(
                    id=request_id,
                    parent=submission.id,
                    index=i,
                    prompt_len=len(prompt),
                    tokens=list(prompt),
                    params=params,
                    seed=_child_seed(seed, i),
                    limit=limit,
                    priority=submission.priority,
                    salt=submission.salt,
                    arrival=now,
                    deadline=now + submission.timeout,
                    leader=ids[0] if i else None,
                )
            )

    def abort(self, submission_id: str) -> None:
        for request_id in self._children.get(submission_id, ()):
            self.scheduler.abort(request_id)

    def abort_one(self, submission_id: str, index: int) -> None:
        """Ends one of the n completions; the others go on."""
        self.scheduler.abort(f"{submission_id}#{index}")

    def step(self) -> list[Output]:
        self._release()
        outputs = self._step_plainly() if self._ahead is None else self._step_ahead(self._ahead)
        held = self.scheduler.waiting.held
        if held and not outputs and not self.scheduler.running and not self._under_way:
            futures.wait([self._grammars[name] for name in held], PAUSE, futures.FIRST_COMPLETED)
        loading = self.scheduler.num_loading
        if loading and loading == len(self.scheduler.running) and not outputs and not self._under_way:
            assert self.kv.tiers is not None
            self.kv.tiers.wait(PAUSE)
        return outputs

    def _step_plainly(self) -> list[Output]:
        began = time.perf_counter()
        plan = self.scheduler.schedule()
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
    def idle(self) -> bool:
        return self.scheduler.idle and not self._under_way

    def close(self) -> None:
        """Writes what is to be written to lower tiers, if that does not take long."""
        if self.kv.tiers is not None:
            self.kv.tiers.close()

    def stats(self) -> Stats:
        """As of now; samples of blocks are told once."""
        s = self.scheduler
        return Stats(
            step=self._steps,
            running=len(s.running),
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
        )

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
            if (error := self._grammars[name].exception()) is not None:
                for request_id in self._children[name]:
                    self.scheduler.abort(request_id, str(error))

    def _validate(self, submission: Submission) -> None:
        prompt, vocab = submission.prompt, self.runner.vocab_size
        if submission.id in self._children:
            raise InvalidRequest(f"a request with id {submission.id!r} is open", param="id")
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if len(prompt) >= self.max_context:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens, which leaves none of the context of {self.max_context}",
                param="prompt",
                hint="shorten the prompt, or serve with a larger --max-context or --kv-memory",
            )
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise InvalidRequest(f"prompt tokens must be in [0, {vocab})", param="prompt")
        params = submission.params
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if any(not 0 <= token < vocab for token in ids):
                raise InvalidRequest(f"{name} names a token outside [0, {vocab})", param=name)


def _child_seed(seed: int, index: int) -> int:
    """Completion 0 has the seed as given; the others follow from it."""
    if index == 0:
        return seed % (1 << 64)
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")
