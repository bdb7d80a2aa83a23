"""TurnDispatcher: sends the requests of simulated clients to workers, as the router does, and follows them to the end.

A request whose worker is killed starts again at another worker, or continues there after the tokens that the client
has. If no worker is ready, a request waits for one, at most for the time in the router's setting `migration_wait`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from emberline.core.clock import Clock
from emberline.core.config import RouterConfig
from emberline.core.errors import EngineUnavailable, Overloaded
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.worker_attempt import AttemptOutcome, WorkerAttempt
from emberline.router.policy import RoutingDecision
from emberline.router.prefix_block_map import BlockPosition
from emberline.router.reply_usage import ReplyUsage
from emberline.sim.choosers import WorkerChooser
from emberline.sim.event_queue import EventQueue
from emberline.sim.job import JobOutput, WorkerJob
from emberline.sim.link import KVSource
from emberline.sim.prompt import SimRequest
from emberline.sim.result import RequestRecord, SimOutcome, SimResult
from emberline.sim.sessions import SimSession


class SimPool(Protocol):
    """The operations on a cluster's workers that a TurnDispatcher calls. A worker is identified by its name."""

    @property
    def has_prefill_workers(self) -> bool: ...

    def submit(self, worker_name: str, job: WorkerJob) -> None: ...

    def remove(self, worker_name: str, job_id: str) -> int:
        """End a job and return how many tokens it has generated at this worker."""
        ...

    def describe_copy(self, prefill_worker_name: str, request: SimRequest, output: JobOutput) -> KVSource: ...

    def last_prompt_block(self, worker_name: str, request: SimRequest) -> BlockPosition | None: ...


@dataclass(slots=True)
class OpenAttempt:
    """An attempt of the router to serve a request at one worker, and the worker's job for it."""

    attempt: WorkerAttempt
    context: ExitStack
    worker: str
    job_id: str = ""
    num_output: int = 0  # tokens of the job's outputs
    num_reported: int = 0  # tokens of the job that were subtracted from the worker's load

    def take_unreported(self, num_generated: int) -> int:
        """Return how many of the job's first `num_generated` tokens are new to the router, and mark them as known."""
        new = max(0, num_generated - self.num_reported)
        self.num_reported += new
        return new

    def close(self, outcome: AttemptOutcome, usage: ReplyUsage | None = None) -> None:
        self.attempt.outcome = outcome
        if usage is not None:
            self.attempt.usage = usage
        self.context.close()


@dataclass(slots=True, eq=False)
class OpenTurn:
    """A request whose reply is being generated."""

    session: SimSession
    request: SimRequest
    arrived_at: float
    answer: OpenAttempt | None = None  # None: it waits for a worker
    prefill: OpenAttempt | None = None  # attempt at a prefill worker that computes the prompt; None: there is none
    prefill_worker: str = ""  # name of the worker that has computed the prompt; "": none
    num_generated: int = 0  # tokens that the client has, without those of the current job
    cached_tokens: int = 0
    first_token_at: float | None = None
    paused_since: float | None = None  # time of its last token, if it has moved since
    moves: int = 0
    source: KVSource | None = None  # KV blocks that the next worker copies; None: it computes them
    excluded: set[str] = field(default_factory=set)  # ids of workers that failed
    waits_until: float = 0.0


class TurnDispatcher:
    def __init__(
        self,
        config: RouterConfig,
        dispatcher: Dispatcher,
        chooser: WorkerChooser,
        clock: Clock,
        events: EventQueue,
        pool: SimPool,
        result: SimResult,
        on_end: Callable[[OpenTurn, RequestRecord], None],
        max_context: int,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._chooser = chooser
        self._clock = clock
        self._events = events
        self._pool = pool
        self._result = result
        self._on_end = on_end
        self._max_context = max_context
        self._turns_by_job: dict[str, OpenTurn] = {}
        self._answers: dict[int, OpenAttempt] = {}  # open ones, by the attempt's id
        self._waiting: list[OpenTurn] = []
        self._job_ids = itertools.count()

    @property
    def num_open(self) -> int:
        return len(self._turns_by_job) + len(self._waiting)

    def start(self, session: SimSession, request: SimRequest) -> OpenTurn:
        turn = OpenTurn(session, request, self._clock.now(), num_generated=request.num_resumed)
        if request.num_resumed:
            known = request.num_prompt_tokens + request.num_resumed
            turn.source = KVSource(known, overlapped_tokens=known)
        if request.num_prompt_tokens + request.reply.num_tokens > self._max_context:
            self._end(turn, "too_long")
        else:
            self._route(turn)
        return turn

    @property
    def num_waiting(self) -> int:
        """The requests that wait until a worker is ready."""
        return len(self._waiting)

    def retry_waiting(self) -> None:
        """Try again to route the requests that wait for a worker, because one has become ready."""
        waiting, self._waiting = self._waiting, []
        self._events.add_foreground_requests(-len(waiting))
        for turn in waiting:
            self._route(turn)

    def turns_at(self, worker_name: str) -> list[OpenTurn]:
        turns = dict.fromkeys(self._turns_by_job.values())
        return [
            turn for turn in turns if worker_name in (at.worker for at in (turn.answer, turn.prefill) if at is not None)
        ]

    def report_progress(self, worker_name: str, num_generated: Callable[[str], int]) -> None:
        """Subtract the tokens that a worker's jobs have generated from the worker's load.

        `num_generated` takes the id of a job, and returns how many tokens the job has generated."""
        worker = self._dispatcher.workers[worker_name]
        for attempt_id in worker.loads:
            at = self._answers.get(attempt_id)
            if at is not None and at.attempt.first_byte_at is not None:
                worker.record_generated_tokens(attempt_id, at.take_unreported(num_generated(at.job_id)))

    # -- routing ---------------------------------------------------------------------------------------------------

    def _route(self, turn: OpenTurn) -> None:
        """Send a request to a worker that is chosen for it. If no worker can take the request, let it wait or end."""
        summary, is_first = turn.request.summary, not turn.moves
        if turn.moves > self._config.migrations:
            self._end(turn, "failed")
            return
        try:
            if is_first:
                decision = self._chooser(self._dispatcher, summary)
            else:
                has_output = turn.num_generated > 0
                decision = self._dispatcher.choose_worker(summary, turn.excluded, ignore_capacity_limits=has_output)
        except Overloaded:
            self._end(turn, "refused")
            return
        except EngineUnavailable:
            self._wait_for_worker(turn)
            return
        turn.answer = self._open_attempt(turn, decision)
        self._answers[turn.answer.attempt.id] = turn.answer
        prefill = None
        if is_first and turn.source is None and self._pool.has_prefill_workers:
            prefill = self._dispatcher.choose_prefill_worker(summary, decision, is_required=False)
        if prefill is None:
            self._submit_answer(turn)
        else:
            decision.worker.remove_prefill_load(turn.answer.attempt.id)
            turn.prefill = self._open_attempt(turn, prefill)
            self._submit(turn, turn.prefill, WorkerJob(self._new_job_id(turn), turn.request, prefill_only=True))

    def _open_attempt(self, turn: OpenTurn, decision: RoutingDecision) -> OpenAttempt:
        context = ExitStack()
        attempt = context.enter_context(self._dispatcher.open_attempt(turn.request.summary, decision))
        return OpenAttempt(attempt, context, decision.worker.name)

    def _new_job_id(self, turn: OpenTurn) -> str:
        return f"{turn.request.id}/{next(self._job_ids)}"

    def _submit_answer(self, turn: OpenTurn) -> None:
        assert turn.answer is not None
        job = WorkerJob(self._new_job_id(turn), turn.request, turn.num_generated, turn.source)
        turn.source = None
        self._submit(turn, turn.answer, job)

    def _submit(self, turn: OpenTurn, at: OpenAttempt, job: WorkerJob) -> None:
        at.job_id = job.id
        self._turns_by_job[job.id] = turn
        self._pool.submit(at.worker, job)

    def _wait_for_worker(self, turn: OpenTurn) -> None:
        now = self._clock.now()
        if not turn.waits_until:
            turn.waits_until = now + self._config.migration_wait
            self._events.call_at(turn.waits_until, partial(self._give_up_if_waiting, turn), is_background=True)
        self._waiting.append(turn)
        self._events.add_foreground_requests()

    def _give_up_if_waiting(self, turn: OpenTurn) -> None:
        # If a worker has served the turn in between and it waits again, its `waits_until` is later than this time.
        if turn in self._waiting and self._clock.now() >= turn.waits_until:
            self._waiting.remove(turn)
            self._events.add_foreground_requests(-1)
            self._end(turn, "failed")

    # -- outputs and endings ---------------------------------------------------------------------------------------

    def receive_output(self, output: JobOutput) -> None:
        if (turn := self._turns_by_job.get(output.job_id)) is None:
            return  # it moved away
        if turn.prefill is not None and turn.prefill.job_id == output.job_id:
            self._finish_prefill(turn, output)
            return
        at, now = turn.answer, self._clock.now()
        assert at is not None
        if at.attempt.first_byte_at is None and (end := self._pool.last_prompt_block(at.worker, turn.request)):
            self._dispatcher.record_prompt_end(at.attempt, end)
        at.num_output += output.num_tokens
        self._dispatcher.record_reply_bytes(at.attempt, at.take_unreported(at.num_output))
        turn.cached_tokens += output.cached_tokens if turn.first_token_at is None else 0
        if turn.first_token_at is None:
            turn.first_token_at = now
            self._result.ttft_seconds.add(now - turn.arrived_at)
        elif turn.paused_since is not None:
            self._result.inter_token_seconds.add(now - turn.paused_since)
        turn.paused_since = None
        if output.is_last:
            usage = ReplyUsage(turn.request.num_prompt_tokens, turn.request.reply.num_tokens, turn.cached_tokens)
            del self._turns_by_job[at.job_id], self._answers[at.attempt.id]
            turn.num_generated = turn.request.reply.num_tokens
            at.close("answered", usage)
            self._end(turn, "answered")

    def _finish_prefill(self, turn: OpenTurn, output: JobOutput) -> None:
        """Send a request to the worker that answers it, which copies the blocks that a prefill worker has computed."""
        assert turn.prefill is not None and output.is_last
        del self._turns_by_job[output.job_id]
        turn.prefill.close("answered", ReplyUsage())
        turn.prefill_worker, turn.prefill = turn.prefill.worker, None
        turn.source = self._pool.describe_copy(turn.prefill_worker, turn.request, output)
        self._result.handoffs += 1
        self._submit_answer(turn)

    def _end(self, turn: OpenTurn, outcome: SimOutcome) -> None:
        record = RequestRecord(
            turn.arrived_at,
            turn.first_token_at,
            self._clock.now(),
            turn.request.num_prompt_tokens,
            turn.cached_tokens,
            turn.num_generated,
            turn.answer.worker if turn.answer is not None else "",
            turn.prefill_worker,
            outcome,
            turn.moves,
        )
        self._on_end(turn, record)

    # -- workers that leave ----------------------------------------------------------------------------------------

    def move_from(self, worker_name: str, outcome: AttemptOutcome, *, with_blocks: bool) -> None:
        """Move all requests of a worker to others. `with_blocks`: the others copy its KV blocks."""
        for turn in self.turns_at(worker_name):
            if turn.prefill is not None and turn.prefill.worker == worker_name:
                self._end_attempt_early(turn.prefill, outcome)
                turn.prefill = None
                if turn.answer is not None and turn.answer.worker != worker_name:
                    load = turn.answer.attempt.decision.load.uncached_tokens
                    turn.answer.attempt.decision.worker.add_prefill_load(turn.answer.attempt.id, load)
                    self._submit_answer(turn)
                    continue
            self._move_answer(turn, outcome, with_blocks)

    def _move_answer(self, turn: OpenTurn, outcome: AttemptOutcome, with_blocks: bool) -> None:
        at, now = turn.answer, self._clock.now()
        assert at is not None
        if turn.prefill is not None:
            self._end_attempt_early(turn.prefill, "left")
            turn.prefill = None
        del self._answers[at.attempt.id]
        if num_here := self._end_attempt_early(at, outcome):
            turn.paused_since = now
        turn.num_generated += num_here
        turn.excluded.add(at.attempt.decision.worker.id)
        turn.source = None
        if with_blocks and turn.num_generated:
            turn.source = KVSource(turn.request.num_prompt_tokens + turn.num_generated, 0)
        turn.answer, turn.waits_until = None, 0.0
        turn.moves += 1
        self._result.moved += 1
        self._route(turn)

    def _end_attempt_early(self, at: OpenAttempt, outcome: AttemptOutcome) -> int:
        """Close an attempt and remove its job, and return how many tokens the job had generated."""
        num_generated = 0
        if at.job_id:
            del self._turns_by_job[at.job_id]
            num_generated = self._pool.remove(at.worker, at.job_id)
        at.close(outcome)
        return num_generated
