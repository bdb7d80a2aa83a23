"""EngineGroup: the engines of one process, which may share a GPU that cannot hold all of them.

A request for a sleeping model waits until the model is awake.

A model without open requests is put to sleep as soon as a different model needs its memory. Busy models are switched
by the following rule, so that no model waits for ever. Sleeping models are woken strictly in the order in which they
began to wait. When the first of them has waited for `model_turn` seconds, it takes the memory of busy models that
have been awake for `model_turn` seconds. Those are drained: new requests for them wait, they finish their open
requests, and then they sleep. A request that has waited for too long is rejected. This module needs no torch and
does no I/O."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from emberline.core.clock import Clock, SystemClock
from emberline.core.engine_config import SchedulerConfig, TimeSharingConfig
from emberline.core.errors import (
    DeadlineExceeded,
    EmberlineError,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
)
from emberline.core.events import Output, SleepStats, Stats, Timing
from emberline.core.request import FinishReason, Submission
from emberline.engine.engine import Engine
from emberline.engine.gpu.swap import SleepManager, SwappableModel, check_device

log = logging.getLogger("emberline.engine")


class SwappableEngine(SwappableModel, Protocol):
    @property
    def engine(self) -> Engine:
        """The model's engine: the same object after every sleep, but usable only while the model is awake."""
        ...


@dataclass(slots=True)
class WaitingSubmission:
    submission: Submission
    arrival: float
    aborted: set[int] = field(default_factory=set)  # indexes of aborted completions; never all


@dataclass(slots=True)
class WakeQueue:
    """Submissions that wait for one sleeping model, in order of arrival. A WakeQueue is never empty."""

    waiting_since: float  # time since when the queue has not been empty
    requests: dict[str, WaitingSubmission] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results of one step of all engines."""

    outputs: dict[str, list[Output]]  # by model, for every model whose state or statistics changed
    rejected: list[tuple[str, EmberlineError]]  # id and error of submissions that waited and are rejected
    sleep_changes: set[str]  # models that fell asleep or woke


class EngineGroup:
    def __init__(
        self,
        members: Mapping[str, SwappableEngine],
        memory: int,
        config: TimeSharingConfig,
        clock: Clock | None = None,
        *,
        max_waiting: int = SchedulerConfig().max_waiting,
    ) -> None:
        """Load every model once, so that errors show at the start. Afterwards the first model is awake.

        `memory`: bytes that all models that are awake may use together. `max_waiting`: how many requests may wait for
        one sleeping model."""
        self.config, self.max_waiting = config, max_waiting
        self._clock = clock or SystemClock()
        self._sleep_manager = SleepManager(memory, self._clock)
        self._queues: dict[str, WakeQueue] = {}  # by model, in the order in which they began to wait
        self._draining: set[str] = set()
        self._pending_outputs: dict[str, list[Output]] = {}
        self._rejected: list[tuple[str, EmberlineError]] = []
        for name, member in members.items():
            self._sleep_manager.add(name, member)
        engines: dict[str, Engine] = {}
        for name in reversed(list(members)):
            self._sleep_manager.ensure_awake(name)
            engines[name] = members[name].engine
        self.engines = {name: engines[name] for name in members}

    # -- submissions --------------------------------------------------------------------------------------------------

    def add(self, submission: Submission) -> None:
        """Accept a submission; it then ends exactly once, by outputs or by a rejection in a StepReport.

        Raises ModelNotFound, InvalidRequest or Overloaded."""
        name = submission.model
        if name not in self.engines:
            raise ModelNotFound(f"there is no model {name!r}", hint=f"available models: {' '.join(self.engines)}")
        if name in self._draining or not self.is_awake(name):
            self._enqueue(name, submission)
        else:
            self.engines[name].add(submission)
            self._sleep_manager.ensure_awake(name)

    def abort(self, submission_id: str) -> None:
        for name, queue in self._queues.items():
            if (waiting := queue.requests.get(submission_id)) is not None:
                timing = Timing(waiting.arrival, finished=self._clock.now())
                for index in range(waiting.submission.params.n):
                    output = Output(submission_id, index, finish=FinishReason.ABORT, timing=timing)
                    self._pending_outputs.setdefault(name, []).append(output)
                self._dequeue(name, submission_id)
                return
        for engine in self.engines.values():
            engine.abort(submission_id)

    def abort_completion(self, submission_id: str, index: int) -> None:
        for queue in self._queues.values():
            if (waiting := queue.requests.get(submission_id)) is not None:
                waiting.aborted.add(index)
                if len(waiting.aborted) == waiting.submission.params.n:
                    self.abort(submission_id)
                return
        for engine in self.engines.values():
            engine.abort_completion(submission_id, index)

    def set_asleep(self, on: bool) -> None:
        """Put all models without open requests to sleep, or wake models in turn while there is memory for them.

        A later request for a sleeping model wakes it."""
        for name in self.engines:
            if on and self.is_awake(name) and self.engines[name].idle:
                self._sleep_manager.put_to_sleep(name)
            elif not on and not self.is_awake(name) and self._sleep_manager.has_room_for(name):
                self._try_to_wake(name)

    @property
    def idle(self) -> bool:
        return not self._queues and all(engine.idle for engine in self.engines.values())

    def prepare_next(self) -> None:
        """Let one model that is awake use idle time to make later steps faster."""
        any(self.engines[name].prepare_next() for name in self._sleep_manager.awake_models)

    @property
    def is_preparing(self) -> bool:
        """Whether a model that is awake has something left to prepare in idle time."""
        return any(self.engines[name].is_preparing for name in self._sleep_manager.awake_models)

    def is_awake(self, name: str) -> bool:
        return self._sleep_manager.awake_since(name) is not None

    def sleep_stats(self, name: str) -> SleepStats:
        return self._sleep_manager.stats[name]

    def progress_count(self) -> int:
        """Return a number that grows with the work of ranks, and with each model that fell asleep or woke.

        Another thread may call this while a step runs."""
        runners = (engine.group_runner for engine in self.engines.values())
        ranks = sum(runner.progress_count() for runner in runners if runner is not None)
        return ranks + sum(stats.sleeps + stats.wakes for stats in self._sleep_manager.stats.values())

    def stats(self, name: str) -> Stats:
        stats = self.engines[name].stats()
        if (queue := self._queues.get(name)) is None:
            return stats
        return replace(stats, waiting=stats.waiting + len(queue.requests), asleep=len(queue.requests))

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Run a step of each engine that is awake, then put models to sleep and wake others where needed.

        Models are switched last, so that all outputs of a model are returned before it sleeps. Raises EngineFailed if a
        rank was lost, even one of a sleeping model."""
        for engine in self.engines.values():
            if engine.group_runner is not None:
                engine.group_runner.check_ranks()
        outputs, self._pending_outputs = self._pending_outputs, {}
        for name in self._sleep_manager.awake_models:
            engine = self.engines[name]
            busy = not engine.idle
            new = engine.step()
            if busy or new:
                outputs[name] = [*outputs[name], *new] if name in outputs else new
        if self._queues or self._draining:
            self._switch_models()
        sleep_changes, self._sleep_manager.sleep_changes = self._sleep_manager.sleep_changes, set()
        for name in sleep_changes:
            outputs.setdefault(name, [])  # its statistics changed: a sleeping model has an empty cache
        rejected, self._rejected = self._rejected, []
        return StepReport(outputs, rejected, sleep_changes)

    def _switch_models(self) -> None:
        self._reject_expired_submissions()
        self._draining = set()
        while self._queues:
            name, queue = next(iter(self._queues.items()))
            if busy := self._sleep_manager.busy_models_to_sleep(name):
                self._draining = {other for other in busy if self._has_used_its_turn(other, queue.waiting_since)}
                break  # no other model may be woken first, or it could take the memory each time
            self._wake(name)
        for name in [name for name in self._queues if self.is_awake(name) and name not in self._draining]:
            self._wake(name)  # it is no longer draining

    def _has_used_its_turn(self, name: str, waiting_since: float) -> bool:
        woke = self._sleep_manager.awake_since(name)
        assert woke is not None
        return self._clock.now() >= max(woke, waiting_since) + self.config.model_turn

    def _wake(self, name: str) -> None:
        queue = self._queues.pop(name)
        self._pending_outputs.setdefault(name, [])
        if not self._try_to_wake(name):
            log.error("Rejecting the requests of a model that does not wake: requests=%d", len(queue.requests))
            error = EngineUnavailable(f"waking the model {name!r} failed", hint="see the server's log")
            self._rejected += [(submission_id, error) for submission_id in queue.requests]
            return
        engine = self.engines[name]
        for submission_id, waiting in queue.requests.items():
            try:
                engine.add(waiting.submission, waiting.arrival)
            except EmberlineError as error:
                self._rejected.append((submission_id, error))
            else:
                for index in waiting.aborted:
                    engine.abort_completion(submission_id, index)

    def _try_to_wake(self, name: str) -> bool:
        """Wake a model if it sleeps, and return whether it is awake. Raises an error if the device or a rank failed."""
        try:
            self._sleep_manager.ensure_awake(name)
        except EngineFailed:  # a rank was lost, so this process must be restarted
            raise
        except Exception:  # of a driver or a device: other models continue if they can
            log.exception("Waking the model failed: model=%s", name)
            check_device()
            return False
        return True

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _enqueue(self, name: str, submission: Submission) -> None:
        now = self._clock.now()
        queue = self._queues.get(name) or WakeQueue(now)
        if len(queue.requests) >= self.max_waiting:
            raise self._overload_error(
                f"the queue is full: {len(queue.requests)} requests wait for the sleeping model {name!r}"
            )
        if submission.id in queue.requests:
            raise InvalidRequest(
                f"a request with id {submission.id!r} is already open", param="id", hint="use a new id"
            )
        queue.requests[submission.id] = WaitingSubmission(submission, now)
        self._queues[name] = queue
        self._pending_outputs.setdefault(name, [])

    def _dequeue(self, name: str, submission_id: str) -> None:
        del self._queues[name].requests[submission_id]
        self._pending_outputs.setdefault(name, [])
        if not self._queues[name].requests:
            del self._queues[name]

    def _reject_expired_submissions(self) -> None:
        now = self._clock.now()
        for name, queue in list(self._queues.items()):
            for submission_id, waiting in list(queue.requests.items()):
                waited = now - waiting.arrival
                submission = waiting.submission
                if waited >= min(submission.timeout, submission.token_timeout):
                    error: EmberlineError = DeadlineExceeded(
                        f"the request did not start within its time limit: the model {name!r} slept for {waited:.0f} s",
                        hint="raise --token-timeout",
                    )
                elif waited >= self.config.model_wait:
                    message = f"the model {name!r} could not be woken within {waited:.0f} s: other models are busy"
                    error = self._overload_error(message)
                else:
                    continue
                self._rejected.append((submission_id, error))
                self._dequeue(name, submission_id)

    def _overload_error(self, message: str) -> Overloaded:
        hint = "retry after the time in Retry-After"
        return Overloaded(message, retry_after=math.ceil(self.config.model_turn), hint=hint)
