"""Ways to choose a worker in the simulation: the production policy, and simple ones to compare it with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from emberline.core.errors import EngineUnavailable
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.policy import RoutingDecision, RoutingReason, select_answering_workers
from emberline.router.request_summary import RequestSummary
from emberline.router.worker import RequestLoad, Worker

WorkerChooser = Callable[[Dispatcher, RequestSummary], RoutingDecision]


def choose_worker_by_policy(dispatcher: Dispatcher, summary: RequestSummary) -> RoutingDecision:
    return dispatcher.choose_worker(summary, set())


def make_random_chooser(seed: int) -> WorkerChooser:
    rng = random.Random(seed)
    return lambda dispatcher, summary: _make_decision_for(dispatcher, summary, rng.choice(_available(dispatcher)))


def make_round_robin_chooser() -> WorkerChooser:
    counter = itertools.count()

    def choose_next_worker(dispatcher: Dispatcher, summary: RequestSummary) -> RoutingDecision:
        workers = _available(dispatcher)
        return _make_decision_for(dispatcher, summary, workers[next(counter) % len(workers)])

    return choose_next_worker


def choose_worker_with_fewest_requests(dispatcher: Dispatcher, summary: RequestSummary) -> RoutingDecision:
    worker = min(_available(dispatcher), key=lambda worker: (worker.open_requests, worker.name))
    return _make_decision_for(dispatcher, summary, worker)


def _available(dispatcher: Dispatcher) -> list[Worker]:
    """Return the ready workers that generate replies, sorted by name. Raises EngineUnavailable if there are none."""
    workers = select_answering_workers([worker for worker in dispatcher.workers.values() if worker.is_ready])
    if not workers:
        raise EngineUnavailable("no worker is ready", hint="retry in a few seconds")
    return sorted(workers, key=lambda worker: worker.name)


def _make_decision_for(dispatcher: Dispatcher, summary: RequestSummary, worker: Worker) -> RoutingDecision:
    """Return a routing decision for this worker, with the loads that the router estimates."""
    estimate = dispatcher.estimators[summary.model]
    load = RequestLoad(estimate.estimate_prompt_tokens(summary.prompt_bytes), estimate.estimate_output_tokens(summary))
    return RoutingDecision(worker, load, RoutingReason.LOAD, 0.0)
