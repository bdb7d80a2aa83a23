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
from emberline.router.ask import Ask
from emberline.router.estimate import Estimate
from emberline.router.worker import Load, Worker

LONGEST_WAIT = 30
RECENT_WEIGHT = 0.25  # of recent work against cached tokens: the work is done, but its conversations will continue
AGAIN = "retry when the workers are ready again; if they fail again, this request is the cause"


class Why(Enum):
    SESSION = "session"  # the preferred worker, by the session header
    PREFIX = "prefix"  # the preferred worker, by the cached prompt
    YIELDED = "yielded"  # another worker: the preferred one is too busy
    AWAY = "away"  # another worker: the preferred one is unavailable
    LOAD = "load"  # the least loaded worker: none is preferred
    AGAIN = "again"  # another worker after an attempt that failed or was moved
    SPLIT = "split"  # a prefill worker, which computes the prompt for another


@dataclass(frozen=True, slots=True)
class Rules:
    slack: float = 2048.0  # extra backlog at which the preferred worker is still chosen
    decode_weight: float = 4.0  # cost of a generated token, in prompt tokens
    split_tokens: float = 256.0  # uncached prompt tokens from which a prefill worker is used
    split_patience: float = 3.0  # how much later a prefill worker may finish: it spares the streams of the other worker


@dataclass(frozen=True, slots=True)
class Decision:
    worker: Worker
    load: Load
    why: Why
    known: float  # prompt tokens that the worker probably has cached
    wait: float = 0.0  # estimated seconds until the worker starts with the prompt


def choose(
    ask: Ask,
    workers: Sequence[Worker],
    known: Mapping[str, int],
    estimate: Estimate,
    rules: Rules,
    now: float,
    without: Collection[str] = (),
    urgent: bool = False,
    suspect: bool = False,
    shared: bool = False,
) -> Decision:
    """Return the worker for this request; raise the client's error if there is none.

    `cached_bytes`: bytes of the prompt that each worker has cached, by worker id, most first. `excluded`: ids of
    workers that were tried already. `ignore_limits`: the client has part of the reply, so that full workers are
    candidates too. `is_suspect`, `is_shared_prefix`: see the module's description."""
    available = [worker for worker in workers if worker.takes(ask.model, now) and worker.answers]
    if not available:
        raise _nobody(ask, workers)
    candidates = answering([worker for worker in available if worker.id not in without])
    if suspect and not (candidates := _spared(candidates, available)):
        raise EngineUnavailable(
            "workers failed while serving this request, and no other worker is free to risk it", hint=AGAIN
        )
    tokens = estimate.prompt(ask.size) + estimate.output(ask)
    idle = [w for w in candidates if w.open < w.max_running]
    roomy = [w for w in idle if w.room >= tokens]
    choices = roomy or idle or [w for w in candidates if w.open < w.limit or urgent]
    if not choices:
        raise _full(available)
    preferred, reason = _home(ask, workers, known, answering(available))
    rank = _ranks(ask, choices)

    shared = shared and not ask.session  # sessions are spread by their hashes
    recent = {w.id: w.recent(now, rules.decode_weight) for w in choices} if shared else {}
    least = min(recent.values(), default=0.0)

    def cost(worker: Worker) -> tuple[float, float]:
        saved = estimate.prompt(min(known.get(worker.id, 0), ask.size))
        bonus = 0.0
        if worker is preferred:
            bonus = rules.slack if ask.session else 0.0 if shared else min(rules.slack, saved)
        if shared:
            saved = max(saved - RECENT_WEIGHT * (recent[worker.id] - least), 0.0)
        work = worker.prefill + rules.decode_weight * worker.decode + estimate.prompt(ask.size)
        return work - saved - bonus, rank[worker.id]

    best = min(choices, key=cost)
    cached = min(known.get(best.id, 0), ask.size)
    load = Load(estimate.prompt(ask.size - cached), estimate.output(ask), suspect)
    if preferred is not None and best is not preferred:
        reason = Why.YIELDED
    return Decision(best, load, reason, estimate.prompt(cached))


def answering(workers: Sequence[Worker]) -> Sequence[Worker]:
    """Return the workers without those that only prefill, unless there are no others."""
    return [worker for worker in workers if worker.role != "prefill"] or workers


def _spared(workers: Sequence[Worker], there: Sequence[Worker]) -> Sequence[Worker]:
    """Return the workers that may get a suspect request.

    There is none if that would risk the last healthy worker."""
    has_spare = sum(worker.calm for worker in there) > 1
    return [worker for worker in workers if worker.calm and has_spare]


def _home(
    ask: Ask, workers: Sequence[Worker], known: Mapping[str, int], there: Sequence[Worker]
) -> tuple[Worker | None, Why]:
    if ask.session:
        # Workers that are not ready count too, so that a short outage does not move all of a worker's sessions.
        serving = answering([worker for worker in workers if ask.model in worker.models])
        preferred = max(serving, key=lambda worker: affinity(ask.session, worker.name))
        if preferred in there:
            return preferred, Why.SESSION
        return max(there, key=lambda worker: affinity(ask.session, worker.name)), Why.AWAY
    by_id = {worker.id: worker for worker in there}
    for name in known:  # most first
        if name in by_id:
            return by_id[name], Why.PREFIX
    return None, Why.LOAD


def affinity(session: str, name: str) -> bytes:
    """Return the rendezvous hash: a session belongs to the worker with the highest one.

    A worker that joins or leaves moves only its own sessions."""
    return blake2b(name.encode(), key=blake2b(session.encode(), digest_size=32).digest(), digest_size=8).digest()


def _ranks(ask: Ask, workers: Sequence[Worker]) -> dict[str, float]:
    """Return the order of workers of equal cost, by worker id.

    It differs from prompt to prompt, which spreads the load."""
    key = ask.session or ask.digest.hex()
    order = sorted(workers, key=lambda worker: (worker.open / worker.max_running, affinity(key, worker.name)))
    return {worker.id: float(i) for i, worker in enumerate(order)}


def _nobody(ask: Ask, workers: Sequence[Worker]) -> Exception:
    models = sorted({model for worker in workers for model in worker.models})
    if not models:
        return EngineUnavailable("no worker has registered", hint="start one with emberline worker MODEL --router URL")
    if ask.model not in models:
        hint = f"this router serves {', '.join(map(repr, models))}"
        return ModelNotFound(f"the model {ask.model[:200]!r} does not exist", param="model", hint=hint)
    return EngineUnavailable(f"no worker for the model {ask.model!r} is ready", hint="retry in a few seconds")


def _full(workers: Sequence[Worker]) -> Overloaded:
    wait = math.ceil(min(worker.seconds_to_a_place for worker in workers))
    return Overloaded(f"all {len(workers)} workers are full", retry_after=min(max(wait, 1), LONGEST_WAIT))
