"""SimCluster: simulated workers behind the real router's dispatcher, run by a queue of events in virtual time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from emberline.cluster.registration import ModelRegistration, WorkerRegistration
from emberline.core.clock import ManualClock
from emberline.core.config import Role, RouterConfig
from emberline.core.errors import InvalidRequest, NotFound
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.prefix_block_map import BlockPosition
from emberline.sim.choosers import WorkerChooser, choose_worker_by_policy
from emberline.sim.event_queue import Callback, EventQueue
from emberline.sim.fast_worker import FastWorker
from emberline.sim.job import JobOutput, WorkerJob, WorkerModel
from emberline.sim.link import KVLink, KVSource, count_overlapped_tokens
from emberline.sim.oracle import PrefixOracle
from emberline.sim.prompt import MODEL_NAME, SimRequest
from emberline.sim.result import RequestRecord, SimResult
from emberline.sim.sessions import SimSession
from emberline.sim.turns import OpenTurn, TurnDispatcher
from emberline.sim.worker import SimStore, SimWorker
from emberline.sim.worker_config import NEVER_S, SimWorkerConfig
from emberline.sim.worker_status import SimWorkerStatus

SimDetail = Literal["steps", "runs"]


@dataclass(frozen=True, slots=True)
class SimClusterConfig(SimWorkerConfig):
    """The settings of a simulated cluster and of its workers. `workers`: how many workers answer requests.

    `detail`: with "steps", workers have real engines, which plan every step; with "runs", they are FastWorkers."""

    workers: int = 4
    prefill_workers: int = 0  # workers in addition, which compute prompts for the others
    prefill: SimWorkerConfig | None = None  # settings of the prefill workers; None: those of the other workers
    link: KVLink = field(default_factory=KVLink)  # over which a worker copies KV blocks of others
    kv_bytes_per_token: float = 131_072.0
    heartbeat_s: float = 1.0
    sample_s: float = 1.0  # seconds between two samples of the workers' open tokens
    detail: SimDetail = "steps"

    def config_for(self, role: Role) -> SimWorkerConfig:
        return self.prefill if role == "prefill" and self.prefill is not None else self


class SimDispatcher(Dispatcher):
    def _extend_deadlines_after_pause(self) -> float:
        return self._clock.now()  # virtual time jumps from event to event; the router is not paused meanwhile


class SimCluster:
    def __init__(
        self,
        config: SimClusterConfig,
        chooser: WorkerChooser = choose_worker_by_policy,
        *,
        sends_session_ids: bool = False,
        store: SimStore | None = None,
        kv_events: bool = False,
        router: RouterConfig | None = None,
    ) -> None:
        """`sends_session_ids`: clients send a session header. `kv_events`: the router uses workers' KV events.

        `router`: the router's settings; its timeouts for lost and stuck workers are not used."""
        if config.workers < 0 or config.prefill_workers < 0:
            counts = f"workers is {config.workers} and prefill_workers is {config.prefill_workers}"
            message = f"{counts}; they must be at least 0"
            raise InvalidRequest(message, param="workers")
        if config.detail == "runs":
            _check_simulated_in_runs(config, store, kv_events)
        self.config = config
        self.clock = ManualClock()
        self.result = SimResult()
        self.observers: list[Callable[[RequestRecord], None]] = []  # called at the end of each request
        self.workers: dict[str, SimWorkerStatus] = {}
        base = router or RouterConfig()
        router_config = replace(base, lost_after=NEVER_S, stuck_after=NEVER_S, kv_events=kv_events)
        self.dispatch = SimDispatcher(router_config, self.clock)
        self._events = EventQueue(self.clock)
        self._turns = TurnDispatcher(
            router_config,
            self.dispatch,
            chooser,
            self.clock,
            self._events,
            self,
            self.result,
            self._end_turn,
            max_context=min(config.config_for(role).kv_tokens for role in ("both", "prefill")),
        )
        self._sends_session_ids = sends_session_ids
        self._store = store
        self._worker_numbers: dict[Role, Iterator[int]] = {}
        self._changed: set[str] = set()  # workers whose counters or blocks have changed since their last heartbeat
        # The oracle keeps every prompt, which takes too much memory for large fleets.
        self._oracle = PrefixOracle(config.block_size) if config.detail == "steps" else None
        self._live_tokens: dict[str, int] = {}  # tokens of each active conversation
        self._live_sum = 0
        self._has_started = False
        self._num_prefill_workers = 0
        for role, count in (("both", config.workers), ("prefill", config.prefill_workers)):
            for _ in range(count):
                self.add_worker("prefill" if role == "prefill" else "both")

    @property
    def now(self) -> float:
        return self.clock.time

    @property
    def num_waiting(self) -> int:
        """The requests that wait until a worker is ready."""
        return self._turns.num_waiting

    @property
    def has_prefill_workers(self) -> bool:
        return self._num_prefill_workers > 0

    def call_at(self, time: float, callback: Callback) -> None:
        """Call `callback` at this virtual time, if the run has not ended before."""
        self._events.call_at(time, callback, is_background=True)

    def call_every(self, seconds: float, callback: Callback) -> None:
        """Call `callback` after each `seconds` of virtual time, as long as the run lasts."""
        self._events.call_every(seconds, callback)

    def run(self, sessions: Iterable[SimSession], until: float = math.inf) -> SimResult:
        """Simulate these sessions, which must be in the order of their start, and return the measurements.

        The run ends when all sessions have ended, or at the virtual time `until`."""
        assert not self._has_started, "a cluster simulates one run"
        self._has_started = True
        self._start_next_session(iter(sessions), -math.inf)
        self.call_every(self.config.sample_s, self._record_load_imbalance)
        self.call_every(self.config.heartbeat_s, self._send_heartbeats)
        self._events.run(until)
        self.result.seconds = self.now
        for worker in self.workers.values():
            self._count_worker_time(worker)
            worker.model.check_invariants()
        if not self._events.has_work:
            assert not self._turns.num_open and not self.dispatch.open_attempt_count
        return self.result

    # -- workers -----------------------------------------------------------------------------------------------------

    def add_worker(self, role: Role = "both", config: SimWorkerConfig | None = None, start_seconds: float = 0.0) -> str:
        """Start a worker, which gets requests after `start_seconds`, and return its name."""
        number = next(self._worker_numbers.setdefault(role, itertools.count()))
        name = f"{'worker' if role == 'both' else role}-{number}"
        self._num_prefill_workers += role == "prefill"
        config = config or self.config.config_for(role)
        model = self._make_model(name, config)
        worker = self.workers[name] = SimWorkerStatus(name, role, config, model, self.now)
        if start_seconds > 0:  # infinite: it never becomes ready
            self.call_at(self.now + start_seconds, partial(self._register, worker))
        else:
            self._register(worker)
        return name

    def _make_model(self, name: str, config: SimWorkerConfig) -> WorkerModel:
        link, token_bytes = self.config.link, self.config.kv_bytes_per_token
        if self.config.detail == "runs":
            return FastWorker(name, config, link, token_bytes)
        model = SimWorker(name, config, self._store, link, token_bytes)
        if self.dispatch.kv_index is not None:
            model.engine.kv.track_prefix_changes()
        return model

    def drain_worker(self, name: str, *, move: bool = False) -> None:
        """Send a worker no new requests, and stop it when it has no requests. `move`: move its requests at once.

        Raises NotFound if there is no such worker."""
        worker = self._find_worker(name)
        if worker.state == "starting":
            self._remove_worker(worker)
            return
        worker.state = "draining"
        self.dispatch.set_draining(name, True)
        if move:
            self._turns.move_from(name, "moved", with_blocks=True)
        self._events.call_at(self.now, partial(self._remove_if_drained, worker))

    def resume_worker(self, name: str) -> None:
        """Send new requests to a draining worker again.

        Raises NotFound if there is no such worker."""
        worker = self._find_worker(name)
        if worker.state == "draining":
            worker.state = "ready"
            self.dispatch.set_draining(name, False)
            self._turns.retry_waiting()

    def kill_worker(self, name: str) -> None:
        """End a worker without warning. Its requests start again or continue at other workers.

        Raises NotFound if there is no such worker."""
        worker = self._find_worker(name)
        if worker.state != "starting":
            worker.state = "draining"
            self.dispatch.set_draining(name, True)  # so that no request moves to it
            self._turns.move_from(name, "failed", with_blocks=False)
        self._remove_worker(worker)

    def _find_worker(self, name: str) -> SimWorkerStatus:
        if (worker := self.workers.get(name)) is None:
            known = ", ".join(self.workers) or "none"
            raise NotFound(f"no simulated worker is named {name[:200]!r}", hint=f"workers now: {known}")
        return worker

    def _register(self, worker: SimWorkerStatus) -> None:
        if self.workers.get(worker.name) is not worker:
            return  # removed while it started
        worker.state = "ready"
        config = worker.config
        model = ModelRegistration(
            MODEL_NAME,
            "sim",
            config.kv_tokens,
            config.max_running,
            config.kv_tokens,
            config.block_size,
            peer={"incarnation": worker.name},
        )
        self.dispatch.register(
            WorkerRegistration(worker.name, worker.name, f"http://{worker.name}", (model,), worker.role)
        )
        # All workers send heartbeats, so that the router knows at once that it can use a new prefill worker.
        self._changed.update(name for name, other in self.workers.items() if other.state != "starting")
        self._send_heartbeats()
        self._turns.retry_waiting()

    def _remove_if_drained(self, worker: SimWorkerStatus) -> None:
        is_draining = worker.state == "draining" and self.workers.get(worker.name) is worker
        if is_draining and not self.dispatch.workers[worker.name].open_requests:
            self._remove_worker(worker)

    def _remove_worker(self, worker: SimWorkerStatus) -> None:
        del self.workers[worker.name]
        self._num_prefill_workers -= worker.role == "prefill"
        worker.run_number += 1
        self._changed.discard(worker.name)
        self._record_gaps(worker)
        self._count_worker_time(worker)
        if (member := self.dispatch.membership.get(worker.name)) is not None:
            member.last_heartbeat_at = -math.inf  # the router forgets it at once
            self.dispatch.check_workers()

    def _count_worker_time(self, worker: SimWorkerStatus) -> None:
        self.result.worker_seconds += self.now - worker.started_at
        self.result.busy_seconds += worker.model.counters().busy_seconds

    def _send_heartbeats(self) -> None:
        paired = tuple(name for name, worker in self.workers.items() if worker.role == "prefill")
        for name in sorted(self._changed):
            worker = self.workers[name]
            self.dispatch.record_heartbeat(worker.heartbeat(paired))
            if self.config.detail == "runs" and worker.role != "prefill":  # outputs do not report every token
                self._turns.report_progress(name, partial(self._num_generated, worker.model))
        self._changed.clear()

    def _num_generated(self, model: WorkerModel, job_id: str) -> int:
        return model.num_generated(job_id, self.now)

    def _record_load_imbalance(self) -> None:
        work = [w.model.remaining_tokens for w in self.workers.values() if w.role != "prefill" and w.state == "ready"]
        if sum(work) > 0:
            self.result.load_imbalance.add(max(work) * len(work) / sum(work))

    # -- runs of steps -------------------------------------------------------------------------------------------------

    def submit(self, worker_name: str, job: WorkerJob) -> None:
        worker = self.workers[worker_name]
        worker.model.add(job, self.now)
        self._changed.add(worker_name)
        if worker.run_end is None:
            self._start_run(worker)
        else:
            self._schedule_run_end(worker, worker.model.shorten_run(self.now))

    def remove(self, worker_name: str, job_id: str) -> int:
        worker = self.workers[worker_name]
        num_generated = worker.model.remove(job_id, self.now)
        if worker.run_end is not None:
            self._schedule_run_end(worker, worker.model.shorten_run(self.now))
        return num_generated

    def describe_copy(self, prefill_worker_name: str, request: SimRequest, output: JobOutput) -> KVSource:
        chunk = self.config.config_for("prefill").batch_tokens
        num_tokens, num_cached = request.num_prompt_tokens, output.cached_tokens
        link, token_bytes = self.config.link, self.config.kv_bytes_per_token
        overlapped = count_overlapped_tokens(num_tokens, num_cached, chunk, output.prefill_s, link, token_bytes)
        # The prefill worker announces blocks with its first chunk, or at once if some are cached.
        is_announced_early = output.was_chunked or num_cached > 0
        ready_at = self.now if is_announced_early else None
        return KVSource(num_tokens, overlapped, is_prefill=True, cached_tokens=num_cached, ready_at=ready_at)

    def last_prompt_block(self, worker_name: str, request: SimRequest) -> BlockPosition | None:
        model = self.workers[worker_name].model
        if self.dispatch.kv_index is None or not isinstance(model, SimWorker):
            return None
        return model.last_prompt_block(request.prompt_tokens())

    def _start_run(self, worker: SimWorkerStatus) -> None:
        self._schedule_run_end(worker, worker.model.start_run(self.now))

    def _schedule_run_end(self, worker: SimWorkerStatus, end: float) -> None:
        if end == worker.run_end:
            return
        worker.run_end = end
        worker.run_number += 1
        self._events.call_at(end, partial(self._finish_run, worker, worker.run_number))

    def _finish_run(self, worker: SimWorkerStatus, run_number: int) -> None:
        if run_number != worker.run_number:
            return
        outputs, worker.run_end = worker.model.finish_run(), None
        self._changed.add(worker.name)
        if isinstance(worker.model, SimWorker):
            self._apply_kv_events(worker.model)
        self._record_gaps(worker)
        for output in outputs:
            self._turns.receive_output(output)
        if self.workers.get(worker.name) is worker and worker.run_end is None:
            if not worker.model.is_idle:
                self._start_run(worker)
            elif worker.state == "draining":
                self._remove_if_drained(worker)

    def _record_gaps(self, worker: SimWorkerStatus) -> None:
        for seconds, count in worker.model.take_gaps():
            self.result.inter_token_seconds.add(seconds, count)

    def _apply_kv_events(self, model: SimWorker) -> None:
        if (index := self.dispatch.kv_index) is None:
            return
        worker_id = self.dispatch.workers[model.name].id
        for batch in model.batches_after(*index.last_applied_batch(worker_id)):
            index.apply_batch(worker_id, batch)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _start_next_session(self, sessions: Iterator[SimSession], previous_start: float) -> None:
        if (session := next(sessions, None)) is not None:
            assert session.starts_at >= previous_start, "sessions must be in the order of their start"
            self._events.call_at(session.starts_at, partial(self._start_session, session, sessions))

    def _start_session(self, session: SimSession, later_sessions: Iterator[SimSession]) -> None:
        self._start_next_session(later_sessions, session.starts_at)
        self._start_turn(session)

    def _start_turn(self, session: SimSession) -> None:
        request, is_new = session.next_request(), session.name not in self._live_tokens
        if self._sends_session_ids:
            request = request.with_session(session.name)
        self._set_live_tokens(session.name, request.num_prompt_tokens + request.reply.num_tokens)
        if self._oracle is not None:
            self.result.oracle_tokens += self._oracle.count_cached_and_add(request)
        turn = self._turns.start(session, request)
        if is_new and turn.answer is not None:
            self.result.conversations_by_worker[turn.answer.worker] += 1

    def _end_turn(self, turn: OpenTurn, record: RequestRecord) -> None:
        self.result.record_request(record)
        session = turn.session
        session.record_reply()
        if record.outcome == "answered" and session.turns_left:
            self._events.call_at(self.now + session.draw_pause_s(), partial(self._start_turn, session))
        else:
            self._set_live_tokens(session.name, 0)
        for observer in self.observers:
            observer(record)

    def _set_live_tokens(self, session_name: str, num_tokens: int) -> None:
        self._live_sum += num_tokens - self._live_tokens.pop(session_name, 0)
        if num_tokens:
            self._live_tokens[session_name] = num_tokens
        self.result.working_set = max(self.result.working_set, self._live_sum)


def _check_simulated_in_runs(config: SimClusterConfig, store: SimStore | None, kv_events: bool) -> None:
    used = {
        "a KV store": store is not None,
        "KV events": kv_events,
        "itl_target_ms": config.itl_target_ms is not None or config.config_for("prefill").itl_target_ms is not None,
    }
    for name, is_used in used.items():
        if is_used:
            raise InvalidRequest(
                f"{name} cannot be simulated with detail=runs, where many steps are computed at once",
                param="detail",
                hint="simulate every step: detail=steps",
            )
