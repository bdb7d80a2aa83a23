"""choose_worker: chooses the worker for a request. It is a pure function, without clock or I/O.

The cost of a worker is a number of tokens: its open work plus this request's prompt, minus the prompt tokens that the
worker has cached. The worker with the lowest cost is chosen.

- If a prompt continues a conversation, the worker that has most of the prompt cached is preferred. The cached tokens
  are subtracted from its cost a second time, because a copy of them at a different worker would occupy cache there. The
  second subtraction is limited to `allowed_backlog_tokens`, so that an overloaded worker is not preferred.
- If a request has a session header, the session's hash determines a preferred worker. `allowed_backlog_tokens` is
  subtracted from the cost of that worker, even if nothing is cached.
- If many prompts share a prefix (a system prompt), they must not all go to the worker that has it cached. The saving
  counts less for a worker that got more work than the others recently, so that soon all workers have the prefix cached.
- A request does not wait in a worker's queue while a different worker has a free slot. It does not go to a worker whose
  KV cache is too full for it while a different worker's cache has space.
- A suspect request, during which several workers crashed, may not have caused the crashes. It is tried again, but only
  at a worker that serves no other suspect request, and never at the last healthy worker."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from emberline.core.errors import EngineUnavailable, ModelNotFound, Overloaded
from emberline.router.request_summary import RequestSummary
from emberline.router.token_estimator import TokenEstimator
from emberline.router.worker import RequestLoad, Worker

MAX_RETRY_AFTER_S = 30
RECENT_WORK_WEIGHT = 0.25  # of recent work against cached tokens: the work is done, but its conversations will continue
RETRY_HINT = "retry when the workers are ready again; if they fail again, this request is the cause"


class RoutingReason(Enum):
    SESSION = "session"  # the preferred worker, by the session header
    PREFIX = "prefix"  # the preferred worker, by the cached prompt
    PREFERRED_BUSY = "yielded"  # another worker: the preferred one is too busy
    PREFERRED_UNAVAILABLE = "away"  # another worker: the preferred one is unavailable
    LOAD = "load"  # the least loaded worker: none is preferred
    RETRY = "again"  # another worker after an attempt that failed or was moved
    SPLIT = "split"  # a prefill worker, which computes the prompt for another


@dataclass(frozen=True, slots=True)
class RoutingRules:
    allowed_backlog_tokens: float = 2048.0  # extra backlog at which the preferred worker is still chosen
    decode_weight: float = 4.0  # cost of a generated token, in prompt tokens
    min_split_tokens: float = 256.0  # uncached prompt tokens from which a prefill worker is used
    # How much later a prefill worker may finish: it spares the streams of the other worker.
    max_split_delay_s: float = 3.0


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    worker: Worker
    load: RequestLoad
    reason: RoutingReason
    cached_tokens: float  # prompt tokens that the worker probably has cached
    wait_s: float = 0.0  # estimated seconds until the worker starts with the prompt


def choose_worker(
    summary: RequestSummary,
    workers: Sequence[Worker],
    cached_bytes_by_worker: Mapping[str, int],
    estimator: TokenEstimator,
    rules: RoutingRules,
    now: float,
    excluded_worker_ids: Collection[str] = (),
    ignore_capacity_limits: bool = False,
    is_suspect: bool = False,
    is_shared_prefix: bool = False,
) -> RoutingDecision:
    """Return the worker for this request. Raises the error for the client if no worker can serve the request.

    `cached_bytes_by_worker`: bytes of the prompt that each worker has cached, by worker id, the largest number first.
    `excluded_worker_ids`: workers that must not be chosen. `ignore_capacity_limits`: the request may go to a worker
    whose queue is full, because it continues a stream. `is_suspect`: workers crashed during this request.
    `is_shared_prefix`: the cached prefix may be one that many prompts share."""
    available = [
        worker for worker in workers if worker.accepts_requests_for(summary.model, now) and worker.can_generate
    ]
    if not available:
        raise _no_worker_error(summary, workers)
    candidates = select_answering_workers([worker for worker in available if worker.id not in excluded_worker_ids])
    if is_suspect and not (candidates := _select_workers_for_suspect(candidates, available)):
        raise EngineUnavailable(
            "several workers failed while serving this request, and too few healthy workers are left to try it again",
            hint=RETRY_HINT,
        )
    prompt, output = estimator.estimate_prompt_tokens(summary.prompt_bytes), estimator.estimate_output_tokens(summary)
    choices = _select_workers_with_capacity(candidates, prompt + output, ignore_capacity_limits)
    if not choices:
        raise _overloaded_error(available)
    preferred, reason = _find_preferred_worker(
        summary, workers, cached_bytes_by_worker, select_answering_workers(available)
    )
    rank = _tie_break_rank_by_worker(summary, choices)

    is_shared_prefix = is_shared_prefix and not summary.session  # sessions are spread by their hashes
    recent = {w.id: w.recent_work(now, rules.decode_weight) for w in choices} if is_shared_prefix else {}
    least = min(recent.values(), default=0.0)

    def worker_cost(worker: Worker) -> tuple[float, float]:
        saved = estimator.estimate_prompt_tokens(min(cached_bytes_by_worker.get(worker.id, 0), summary.prompt_bytes))
        bonus = 0.0
        if worker is preferred:
            allowed = rules.allowed_backlog_tokens
            bonus = allowed if summary.session else 0.0 if is_shared_prefix else min(allowed, saved)
        if is_shared_prefix:
            saved = max(saved - RECENT_WORK_WEIGHT * (recent[worker.id] - least), 0.0)
        work = worker.total_prefill_tokens + rules.decode_weight * worker.total_decode_tokens + prompt
        return work - saved - bonus, rank[worker.id]

    best = min(choices, key=worker_cost)
    cached = min(cached_bytes_by_worker.get(best.id, 0), summary.prompt_bytes)
    load = RequestLoad(estimator.estimate_prompt_tokens(summary.prompt_bytes - cached), output, is_suspect)
    if preferred is not None and best is not preferred:
        reason = RoutingReason.PREFERRED_BUSY
    return RoutingDecision(best, load, reason, estimator.estimate_prompt_tokens(cached))


def _select_workers_with_capacity(
    workers: Sequence[Worker], needed_tokens: float, ignore_capacity_limits: bool
) -> Sequence[Worker]:
    """Return the workers with a free slot and enough free KV cache for the request.

    If no worker has both, return the workers with a free slot. If no worker has a free slot, return the workers with
    space in their queues, or all workers if `ignore_capacity_limits` is set."""
    idle = [w for w in workers if w.total_open_requests < w.max_running]
    roomy = [w for w in idle if w.kv_free_tokens >= needed_tokens]
    return roomy or idle or [w for w in workers if w.total_open_requests < w.max_requests or ignore_capacity_limits]


def select_answering_workers(workers: Sequence[Worker]) -> Sequence[Worker]:
    """Return the workers that are not prefill workers, or all workers if there are only prefill workers."""
    return [worker for worker in workers if worker.role != "prefill"] or workers


def _select_workers_for_suspect(workers: Sequence[Worker], available_workers: Sequence[Worker]) -> Sequence[Worker]:
    """Return the workers that may get a suspect request, which may crash the worker that serves it.

    At least two available workers must be healthy and serve no suspect request, so that one remains if the other
    crashes. Otherwise return []."""
    has_spare = sum(worker.is_safe_for_suspect for worker in available_workers) > 1
    return [worker for worker in workers if worker.is_safe_for_suspect and has_spare]


def _find_preferred_worker(
    summary: RequestSummary,
    workers: Sequence[Worker],
    cached_bytes_by_worker: Mapping[str, int],
    available_workers: Sequence[Worker],
) -> tuple[Worker | None, RoutingReason]:
    if summary.session:
        # Workers that are not ready count too, so that a short outage does not move all of a worker's sessions.
        serving = select_answering_workers([worker for worker in workers if summary.model in worker.models])
        preferred = max(serving, key=lambda worker: rendezvous_hash(summary.session, worker.name))
        if preferred in available_workers:
            return preferred, RoutingReason.SESSION
        return max(
            available_workers, key=lambda worker: rendezvous_hash(summary.session, worker.name)
        ), RoutingReason.PREFERRED_UNAVAILABLE
    by_id = {worker.id: worker for worker in available_workers}
    for name in cached_bytes_by_worker:  # most first
        if name in by_id:
            return by_id[name], RoutingReason.PREFIX
    return None, RoutingReason.LOAD


def rendezvous_hash(session: str, worker_name: str) -> bytes:
    """Return the rendezvous hash of a session and a worker; a session belongs to the worker with the highest hash.

    When a worker joins or leaves the cluster, only the sessions of that worker move."""
    return blake2b(worker_name.encode(), key=blake2b(session.encode(), digest_size=32).digest(), digest_size=8).digest()


def _tie_break_rank_by_worker(summary: RequestSummary, workers: Sequence[Worker]) -> dict[str, float]:
    """Return a rank for each worker, by worker id, that decides between workers of equal cost.

    The worker with the lowest rank is chosen. Ranks depend on load, then on a hash of the session or of the
    conversation's first messages. So different conversations go to different workers, and routers that know nothing of
    each other choose the same worker for all requests of one conversation."""
    key = summary.session or (summary.conversation or summary.digest).hex()
    order = sorted(
        workers, key=lambda worker: (worker.total_open_requests / worker.max_running, rendezvous_hash(key, worker.name))
    )
    return {worker.id: float(i) for i, worker in enumerate(order)}


def _no_worker_error(summary: RequestSummary, workers: Sequence[Worker]) -> Exception:
    models = sorted({model for worker in workers for model in worker.models})
    if not models:
        return EngineUnavailable("no worker has registered", hint="start one with emberline worker MODEL --router URL")
    if summary.model not in models:
        hint = f"this router serves {', '.join(map(repr, models))}"
        return ModelNotFound(f"the model {summary.model[:200]!r} does not exist", param="model", hint=hint)
    return EngineUnavailable(f"no worker for the model {summary.model!r} is ready", hint="retry in a few seconds")


def _overloaded_error(workers: Sequence[Worker]) -> Overloaded:
    wait = math.ceil(min(worker.seconds_to_free_slot for worker in workers))
    return Overloaded(f"all {len(workers)} workers are full", retry_after=min(max(wait, 1), MAX_RETRY_AFTER_S))
