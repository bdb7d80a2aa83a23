"""choose_worker: which worker gets a request. A pure function, without clock or I/O.

The cost of a worker is the number of tokens it has to compute, its backlog and this request together, less the prompt
tokens that it has cached. The worker with the lowest cost is chosen, so cache affinity and load have one unit.

- A prompt that continues a conversation has a preferred worker: the one that has most of the prompt cached. Its cached
  tokens count twice there, once for the computing they save and once for the cache that a copy elsewhere would occupy.
  The second count is limited by `allowed_backlog_tokens`: beyond that backlog, load outweighs affinity.
- A session (by its header) has a preferred worker too, with `allowed_backlog_tokens` whatever is cached.
- A prefix that many prompts share must not send them all to one worker. Its cached tokens count less, by a quarter of
  the recent work that this worker was given beyond the least loaded one, so that all workers soon have it cached.
- A request is never queued while another worker could run it at once, nor sent to a worker whose KV cache has no room
  for it while another's has.
- A suspect request, during which several workers failed, may be innocent. It is tried again, but only on a worker
  without another suspect, and never on the last healthy worker.
"""

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
    cached_bytes: Mapping[str, int],
    estimator: TokenEstimator,
    rules: RoutingRules,
    now: float,
    excluded: Collection[str] = (),
    ignore_limits: bool = False,
    is_suspect: bool = False,
    is_shared_prefix: bool = False,
) -> RoutingDecision:
    """Return the worker for this request; raise the client's error if there is none.

    `cached_bytes`: bytes of the prompt that each worker has cached, by worker id, most first. `excluded`: ids of
    workers that were tried already. `ignore_limits`: the client has part of the reply, so that full workers are
    candidates too. `is_suspect`, `is_shared_prefix`: see the module's description."""
    available = [worker for worker in workers if worker.accepts(summary.model, now) and worker.can_answer]
    if not available:
        raise _no_worker_error(summary, workers)
    candidates = select_answering_workers([worker for worker in available if worker.id not in excluded])
    if is_suspect and not (candidates := _select_for_suspect(candidates, available)):
        raise EngineUnavailable(
            "workers failed while serving this request, and no other worker is free to risk it", hint=RETRY_HINT
        )
    prompt, output = estimator.estimate_prompt_tokens(summary.prompt_bytes), estimator.estimate_output_tokens(summary)
    choices = _select_with_room(candidates, prompt + output, ignore_limits)
    if not choices:
        raise _overloaded_error(available)
    preferred, reason = _preferred_worker(summary, workers, cached_bytes, select_answering_workers(available))
    rank = _tie_break_ranks(summary, choices)

    is_shared_prefix = is_shared_prefix and not summary.session  # sessions are spread by their hashes
    recent = {w.id: w.recent_work(now, rules.decode_weight) for w in choices} if is_shared_prefix else {}
    least = min(recent.values(), default=0.0)

    def cost(worker: Worker) -> tuple[float, float]:
        saved = estimator.estimate_prompt_tokens(min(cached_bytes.get(worker.id, 0), summary.prompt_bytes))
        bonus = 0.0
        if worker is preferred:
            allowed = rules.allowed_backlog_tokens
            bonus = allowed if summary.session else 0.0 if is_shared_prefix else min(allowed, saved)
        if is_shared_prefix:
            saved = max(saved - RECENT_WORK_WEIGHT * (recent[worker.id] - least), 0.0)
        work = worker.prefill_tokens + rules.decode_weight * worker.decode_tokens + prompt
        return work - saved - bonus, rank[worker.id]

    best = min(choices, key=cost)
    cached = min(cached_bytes.get(best.id, 0), summary.prompt_bytes)
    load = RequestLoad(estimator.estimate_prompt_tokens(summary.prompt_bytes - cached), output, is_suspect)
    if preferred is not None and best is not preferred:
        reason = RoutingReason.PREFERRED_BUSY
    return RoutingDecision(best, load, reason, estimator.estimate_prompt_tokens(cached))


def _select_with_room(workers: Sequence[Worker], tokens: float, ignore_limits: bool) -> Sequence[Worker]:
    """Return the workers with a free slot and KV cache for the request, or else the next best group of workers."""
    idle = [w for w in workers if w.open_requests < w.max_running]
    roomy = [w for w in idle if w.kv_free_tokens >= tokens]
    return roomy or idle or [w for w in workers if w.open_requests < w.max_requests or ignore_limits]


def select_answering_workers(workers: Sequence[Worker]) -> Sequence[Worker]:
    """Return the workers without those that only prefill, unless there are no others."""
    return [worker for worker in workers if worker.role != "prefill"] or workers


def _select_for_suspect(workers: Sequence[Worker], available: Sequence[Worker]) -> Sequence[Worker]:
    """Return the workers that may get a suspect request.

    There is none if that would risk the last healthy worker."""
    has_spare = sum(worker.is_safe_for_suspect for worker in available) > 1
    return [worker for worker in workers if worker.is_safe_for_suspect and has_spare]


def _preferred_worker(
    summary: RequestSummary, workers: Sequence[Worker], cached_bytes: Mapping[str, int], available: Sequence[Worker]
) -> tuple[Worker | None, RoutingReason]:
    if summary.session:
        # Workers that are not ready count too, so that a short outage does not move all of a worker's sessions.
        serving = select_answering_workers([worker for worker in workers if summary.model in worker.models])
        preferred = max(serving, key=lambda worker: rendezvous_hash(summary.session, worker.name))
        if preferred in available:
            return preferred, RoutingReason.SESSION
        return max(
            available, key=lambda worker: rendezvous_hash(summary.session, worker.name)
        ), RoutingReason.PREFERRED_UNAVAILABLE
    by_id = {worker.id: worker for worker in available}
    for name in cached_bytes:  # most first
        if name in by_id:
            return by_id[name], RoutingReason.PREFIX
    return None, RoutingReason.LOAD


def rendezvous_hash(session: str, name: str) -> bytes:
    """Return the rendezvous hash: a session belongs to the worker with the highest one.

    A worker that joins or leaves moves only its own sessions."""
    return blake2b(name.encode(), key=blake2b(session.encode(), digest_size=32).digest(), digest_size=8).digest()


def _tie_break_ranks(summary: RequestSummary, workers: Sequence[Worker]) -> dict[str, float]:
    """Return the order of workers of equal cost, by worker id.

    It differs from prompt to prompt, which spreads the load."""
    key = summary.session or summary.digest.hex()
    order = sorted(
        workers, key=lambda worker: (worker.open_requests / worker.max_running, rendezvous_hash(key, worker.name))
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
