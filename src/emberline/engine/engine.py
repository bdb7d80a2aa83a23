"""Engine: a scheduler with a runner. Each `step` plans work, runs it, and updates the requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from emberline.core.clock import Clock, SystemClock
from emberline.core.engine_config import SchedulerConfig
from emberline.core.errors import Overloaded
from emberline.core.events import Output, Stats, TransferStats
from emberline.core.params import GrammarSpec
from emberline.core.plan import StepPlan, StepResult
from emberline.core.request import FinishReason, Submission
from emberline.engine.expert_runner import ExpertRunner
from emberline.engine.group_choice import max_planned_tokens
from emberline.engine.kv_managers import make_kv_manager
from emberline.engine.open_submissions import OpenSubmissions, RunningSteps
from emberline.engine.pairing import PeerPairing
from emberline.engine.publisher import BlockPublisher
from emberline.engine.request_builder import RequestBuilder
from emberline.engine.scheduler import Scheduler
from emberline.engine.speculation.drafter import Drafter
from emberline.kv.layer_groups import LayerGroups
from emberline.kv.manager import KVManager
from emberline.kv.tiers.stack import TierStack
from emberline.kv.transfer.endpoint import TransferEndpoint

IDLE_WAIT_S = 0.002  # longest wait of a step that has nothing to compute; other engines may share the loop


class Runner(Protocol):
    """Executes step plans. The fake runner, the torch runners and the simulator implement this protocol."""

    num_blocks: int
    vocab_size: int
    eos: frozenset[int]

    @property
    def layout(self) -> str:
        """A name of the model and its cache format, which is part of every KV block's hash."""
        ...

    def run(self, plan: StepPlan) -> StepResult: ...


@runtime_checkable
class PipelinedRunner(Runner, Protocol):
    """A runner that can start the next plan before the result of the previous plan was read."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Queue a plan behind all earlier plans; return a function that waits for its result and returns it."""
        ...


@runtime_checkable
class StagedRunner(PipelinedRunner, Protocol):
    """A runner for pipeline parallelism: its stages compute plans of different requests at the same time."""

    max_in_flight: int  # plans that are launched before the result of the oldest is read


@runtime_checkable
class GroupedRunner(Runner, Protocol):
    """A runner whose cache may have several groups of layers with block tables of their own."""

    groups: LayerGroups


@runtime_checkable
class PreparingRunner(Runner, Protocol):
    """A runner that can use idle time to make later steps faster, for example by capturing CUDA graphs."""

    @property
    def is_preparing(self) -> bool:
        """Whether `prepare_next` still has work to do."""
        ...

    def prepare_next(self) -> bool:
        """Do the next part of the preparation, in about 20 ms at most; return False if nothing was left to do."""
        ...


@runtime_checkable
class GrammarRunner(Runner, Protocol):
    """A runner that supports grammars and compiles them in another thread."""

    def prepare(self, grammar: GrammarSpec) -> Future[Any]:
        """Return a future that is done when requests with this grammar can start without waiting.

        The compiled grammar stays cached as long as the future exists."""
        ...


@runtime_checkable
class GroupRunner(Runner, Protocol):
    """A runner that computes its steps together with other processes."""

    def check_ranks(self) -> None:
        """Raise EngineFailed if one of the other processes was lost."""
        ...

    def progress_count(self) -> int:
        """Return a number that grows while the ranks compute, which shows that none of them hangs."""
        ...

    def close(self) -> None:
        """End the other processes."""
        ...


class OutputMatcher(Protocol):
    """A compiled grammar with its state after the tokens of one output."""

    @property
    def is_complete(self) -> bool: ...

    def accept(self, token: int) -> bool: ...

    def fork(self) -> OutputMatcher: ...


class Engine:
    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        clock: Clock | None = None,
        tiers: TierStack | None = None,
        transfer_endpoint: TransferEndpoint | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`tiers`: KV tiers below the runner's cache (main memory, disk, store), if the runner can copy blocks.

        `transfer_endpoint`: exchanges KV blocks of the runner's cache with other engines. `drafter`: drafts tokens for
        speculative decoding."""
        self.config = config
        self.runner = runner
        self.clock = clock or SystemClock()
        self.groups = groups = runner.groups if isinstance(runner, GroupedRunner) else LayerGroups.single(1)
        self._pipelined_runner = runner if isinstance(runner, PipelinedRunner) else None
        self._max_in_flight = runner.max_in_flight if isinstance(runner, StagedRunner) else 2
        self.max_planned_tokens = max_planned_tokens(
            config.max_batch_tokens, plans=1 if self._pipelined_runner is None else self._max_in_flight
        )
        self.kv = make_kv_manager(runner, config, groups, self.max_planned_tokens, self.clock, tiers, transfer_endpoint)
        self.transfer_endpoint = transfer_endpoint
        self.pairing = PeerPairing(transfer_endpoint.receiver) if transfer_endpoint else None
        self._publisher: BlockPublisher | None = None
        if transfer_endpoint is not None and isinstance(self.kv, KVManager):
            lease_seconds = transfer_endpoint.config.lease_seconds
            self._publisher = BlockPublisher(transfer_endpoint.sender, self.kv, lease_seconds)
        self.scheduler = Scheduler(config, self.kv, self.clock, runner.eos, self._publisher, drafter)
        self.scheduler.plan_share = self._max_in_flight if isinstance(runner, StagedRunner) else 1
        self.max_context = min(
            config.max_context, groups.max_tokens(runner.num_blocks, config.block_size, self.max_planned_tokens)
        )
        self._request_builder = RequestBuilder(
            self.max_context, runner.vocab_size, can_publish=transfer_endpoint is not None
        )
        self._preparing_runner = runner if isinstance(runner, PreparingRunner) else None
        self.group_runner = runner if isinstance(runner, GroupRunner) else None
        self._expert_runner = runner if isinstance(runner, ExpertRunner) else None
        self._in_flight: deque[tuple[StepPlan, Callable[[], StepResult]]] = deque()
        # A plan that is run in the next step: early outputs are returned first.
        self._deferred_plan: StepPlan | None = None
        self._submissions = OpenSubmissions()
        self._grammars: dict[str, Future[Any]] = {}  # of open submissions
        self._steps, self._last_step = 0, (0, 0.0)
        self._busy_seconds = self._host_seconds = 0.0

    @property
    def num_full_contexts(self) -> float:
        """How many requests of the maximum length the KV cache holds at the same time."""
        return self.kv.num_blocks / self.groups.num_held_blocks(self.max_context, self.config.block_size)

    def add(self, submission: Submission, arrival: float | None = None) -> None:
        """Accept a submission; `step` then returns its outputs.

        `arrival`: time on the engine's clock at which the submission arrived, if that was before this call. Raises
        InvalidRequest, or Overloaded if too many requests are open."""
        self._submissions.check_id_is_free(submission.id, self._running_steps)
        self._request_builder.check(submission)
        if len(self.scheduler.requests) >= self.config.max_running + self.config.max_waiting:
            raise Overloaded(
                f"the queue is full: {self.scheduler.num_waiting} requests are waiting",
                hint="retry after the time in Retry-After, or raise --max-waiting",
            )
        self._prepare_grammar(submission)
        requests = self._request_builder.build(submission, self.clock.now() if arrival is None else arrival)
        self._submissions.add(submission.id, [request.id for request in requests])
        for request in requests:
            self.scheduler.add(request)

    def abort(self, submission_id: str) -> None:
        for request_id in self._submissions.requests_of(submission_id):
            self.scheduler.abort(request_id)

    def abort_completion(self, submission_id: str, index: int) -> None:
        """End one of a submission's n completions; its other completions continue."""
        self.scheduler.abort(f"{submission_id}#{index}")

    def step(self) -> list[Output]:
        if self.group_runner is not None:
            self.group_runner.check_ranks()
        self._unblock_requests_with_ready_grammar()
        if self._publisher is not None:
            self._publisher.reclaim_expired_leases()
        steps = self._steps
        outputs = self._step_sync() if self._pipelined_runner is None else self._step_pipelined(self._pipelined_runner)
        if steps == self._steps and not outputs and not self._in_flight and not self.idle:
            self._wait_for_progress()
        return outputs

    def _wait_for_progress(self) -> None:
        """Wait briefly, because none of the open requests can be computed yet.

        Each waits for its grammar to be compiled, for KV blocks to arrive, or for blocks to become free."""
        if blocked := self.scheduler.waiting.blocked_ids:
            futures.wait([self._grammars[name] for name in blocked], IDLE_WAIT_S, futures.FIRST_COMPLETED)
        elif (source := self.kv.pulls or self.kv.tiers) is not None:
            source.wait_for_progress(IDLE_WAIT_S)

    def _step_sync(self) -> list[Output]:
        began = time.perf_counter()
        plan, self._deferred_plan = self._deferred_plan or self.scheduler.schedule(), None
        if plan is not None and self.scheduler.has_early_outputs:
            self._deferred_plan = plan  # it runs in the next step, before anything else is planned
            return self._collect_outputs()
        if plan is not None:
            started = time.perf_counter()
            result = self.runner.run(plan)
            ran = time.perf_counter() - started
            self._apply_result(plan, result, ran)
            self._host_seconds += time.perf_counter() - began - ran
        return self._collect_outputs()

    def _step_pipelined(self, runner: PipelinedRunner) -> list[Output]:
        """Plan and launch a step. Then, if `max_in_flight` steps are running, wait for the oldest of them.

        If there is nothing to plan, only wait for the oldest running step. If the next step should verify drafts, first
        wait for a result: drafts continue the newest tokens, which the running steps still sample."""
        began, waited = time.perf_counter(), 0.0
        if self._in_flight and self.scheduler.should_wait_for_result():
            waited = self._finish_oldest_step()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_flight.append((plan, runner.launch(plan)))
        if len(self._in_flight) > (0 if plan is None else self._max_in_flight - 1):
            waited += self._finish_oldest_step()
        self._host_seconds += time.perf_counter() - began - waited
        return self._collect_outputs()

    def _finish_oldest_step(self) -> float:
        """Wait for the oldest step that is running, apply its result, and return the seconds waited."""
        plan, wait = self._in_flight.popleft()
        started = time.perf_counter()
        result = wait()
        waited = time.perf_counter() - started
        self._apply_result(plan, result, result.seconds)
        return waited

    def _apply_result(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        self.scheduler.update(plan, result)
        self._steps += 1
        self._busy_seconds += seconds
        self._last_step = (plan.num_tokens, seconds)

    @property
    def is_preparing(self) -> bool:
        return self._preparing_runner is not None and self._preparing_runner.is_preparing

    def prepare_next(self) -> bool:
        """Use idle time to make later steps faster; return False if nothing was left to prepare."""
        return self._preparing_runner is not None and self._preparing_runner.prepare_next()

    @property
    def _running_steps(self) -> RunningSteps:
        return (self._in_flight[0][0].step, self._in_flight[-1][0].step) if self._in_flight else None

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._in_flight and self._deferred_plan is None

    @property
    def needs_polling(self) -> bool:
        """Whether an idle engine still needs steps, because peers copy its KV blocks or are being connected."""
        is_pairing = self.pairing is not None and self.pairing.has_pending_changes
        return is_pairing or self.kv.retained.has_pinned or self.kv.retained.num_quarantined > 0

    def reset_kv(self) -> None:
        """Continue with an empty KV cache, because its memory was freed. Tiers keep their blocks.

        No request may be open, and no other engine may copy blocks."""
        assert self.idle and self.transfer_endpoint is None
        old = self.kv
        args = self.runner, self.config, self.groups, self.max_planned_tokens, self.clock, old.tiers
        self.kv = self.scheduler.kv = make_kv_manager(*args)
        self.kv.queried_tokens, self.kv.hit_tokens = old.queried_tokens, old.hit_tokens  # counters must not decrease
        if old.is_tracking_prefixes:
            self.kv.track_prefix_changes()

    def close(self) -> None:
        """Write pending KV blocks to lower tiers, for a limited time; disconnect other engines; end other ranks."""
        if self.kv.tiers is not None:
            self.kv.tiers.close()
        if self.kv.pulls is not None:
            self.kv.pulls.close()
        if self.pairing is not None:
            self.pairing.close()
        if self.transfer_endpoint is not None:
            self.transfer_endpoint.close()
        if self.group_runner is not None:
            self.group_runner.close()

    def stats(self) -> Stats:
        """Return current statistics. `residency` has only the samples taken since the previous call."""
        s = self.scheduler
        return Stats(
            step=self._steps,
            running=len(s.running),
            loading=s.num_loading,
            waiting=s.num_waiting,
            deferred=s.num_deferred,
            blocks_total=self.kv.num_blocks,
            blocks_free=self.kv.num_free_blocks,
            blocks_cached=self.kv.num_cached_blocks,
            preemptions=s.preemptions,
            prefix_queries=self.kv.queried_tokens,
            prefix_hits=self.kv.hit_tokens,
            prompt_tokens=s.prompt_tokens,
            generated_tokens=s.generated_tokens,
            step_tokens=self._last_step[0],
            step_seconds=self._last_step[1],
            busy_seconds=self._busy_seconds,
            cpu_seconds=time.process_time(),
            host_seconds=self._host_seconds,
            residency=self.kv.residency.take_samples(),
            tiers=self.kv.tiers.stats() if self.kv.tiers is not None else {},
            transfer=self._transfer_stats(),
            speculation=s.drafter.stats() if s.drafter is not None else None,
            experts=self._expert_runner.expert_stats() if self._expert_runner is not None else None,
        )

    def _transfer_stats(self) -> TransferStats | None:
        if self.kv.pulls is None or self._publisher is None or self.transfer_endpoint is None:
            return None
        stats = self.kv.pulls.stats()
        receiver = self.transfer_endpoint.receiver
        stats.reached, stats.passed_over = dict(receiver.connected_transports), dict(receiver.failed_transports)
        self._publisher.write_stats_to(stats)
        stats.quarantined_blocks = self.kv.retained.num_quarantined
        return stats

    def _collect_outputs(self) -> list[Output]:
        outputs = self.scheduler.drain_outputs()
        for output in outputs:
            if output.finish is not None:
                request_id = f"{output.id}#{output.index}"
                if self._submissions.end_request(output.id, request_id, self._running_steps):
                    self._grammars.pop(output.id, None)
                    self.scheduler.waiting.blocked_ids.discard(output.id)
        return outputs

    def _prepare_grammar(self, submission: Submission) -> None:
        """Start compiling the submission's grammar. Until that is done, its requests stay in the waiting queue.

        While they wait, they can be aborted, and their deadlines apply."""
        grammar = submission.params.grammar
        if grammar is not None and isinstance(self.runner, GrammarRunner):
            self._grammars[submission.id] = self.runner.prepare(grammar)
            self.scheduler.waiting.blocked_ids.add(submission.id)

    def _unblock_requests_with_ready_grammar(self) -> None:
        """Let requests start whose grammar is compiled; end them if it is invalid or already complete."""
        blocked = self.scheduler.waiting.blocked_ids
        for name in [name for name in blocked if self._grammars[name].done()]:
            blocked.remove(name)
            error = self._grammars[name].exception()
            for request_id in self._submissions.requests_of(name):
                if error is not None:
                    self.scheduler.abort(request_id, str(error))
                elif self._is_output_complete(request_id, self._grammars[name].result()):
                    self.scheduler.end(request_id, FinishReason.STOP)

    def _is_output_complete(self, request_id: str, grammar: OutputMatcher) -> bool:
        """Return whether the output that was submitted with the request already completes its grammar."""
        request = self.scheduler.requests.get(request_id)
        if request is None or not request.num_resumed:
            return False
        matcher = grammar.fork()
        for token in request.tokens[request.prompt_len :]:
            if token not in self.runner.eos:
                matcher.accept(token)
        return matcher.is_complete
