"""choose: which worker gets a request. Pure: no clock, no I/O, the same answer for the same question.

A request costs a worker the tokens it must compute there: less where the beginning of its prompt was seen. Wanted is
the worker with the least work in front of it, this request included: so affinity is worth the tokens that the cache
saves, against queued work in the same unit. Where the prompt continues a conversation, its tokens count twice at its
home, for what they save and for the cache that a copy elsewhere would take, but at most `slack` more: so far affinity
holds, then it yields to load. The home of a session has `slack` whatever is known of its prompt. A beginning that many
prompts share is no reason to send them all to one worker: it counts less by a quarter of the work that this worker was
given more than others lately, so that soon all have it cached. No request is made to queue while another worker could
run it at once, nor sent where the cache has no room for it while another has. A suspect, under which several workers
broke, may only have been there: it is tried again, but where no other suspect is, and never where it could break the
last worker.
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
RECENT_WEIGHT = 0.25  # of work given lately, against cached tokens: it is done, but its conversations come back
AGAIN = "retry when they are back; if they break again, it is the request"


class Why(Enum):
    SESSION = "session"  # at home, by its header
    PREFIX = "prefix"  # at home, by its prompt
    YIELDED = "yielded"  # its home is too busy
    AWAY = "away"  # its home is not there
    LOAD = "load"  # it has no home
    AGAIN = "again"  # it was tried or begun elsewhere
    SPLIT = "split"  # it computes the prompt for another


@dataclass(frozen=True, slots=True)
class Rules:
    slack: float = 2048.0  # tokens
    decode_weight: float = 4.0  # a generated token counts as so many of a prompt
    split_tokens: float = 256.0  # of a prompt, to be computed, that are worth another worker
    split_patience: float = 3.0  # seconds by which it may be done later there: streams here are not held up


@dataclass(frozen=True, slots=True)
class Decision:
    worker: Worker
    load: Load
    why: Why
    known: float  # tokens of the prompt it is thought to have
    wait: float = 0.0  # seconds until it begins with it, so far as that is known


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
    """`known`: bytes of the prompt by worker, most first; `shared`: by many prompts, so far as is known. `without`:
    workers that were tried already. `urgent`: its client has part of the reply, so it does not matter how full they
    are. `suspect`: see above. Raises what the client is to be told if there is none."""
    there = [worker for worker in workers if worker.takes(ask.model, now) and worker.answers]
    if not there:
        raise _nobody(ask, workers)
    left = answering([worker for worker in there if worker.id not in without])
    if suspect and not (left := _spared(left, there)):
        raise EngineUnavailable("workers broke under this request, and the others are not risked for it", hint=AGAIN)
    tokens = estimate.prompt(ask.size) + estimate.output(ask)
    free = [w for w in left if w.open < w.max_running]
    roomy = [w for w in free if w.room >= tokens]
    places = roomy or free or [w for w in left if w.open < w.limit or urgent]
    if not places:
        raise _full(there)
    home, why = _home(ask, workers, known, answering(there))
    rank = _ranks(ask, places)

    shared = shared and not ask.session  # sessions are spread by their names
    recent = {w.id: w.recent(now, rules.decode_weight) for w in places} if shared else {}
    least = min(recent.values(), default=0.0)

    def cost(worker: Worker) -> tuple[float, float]:
        saved = estimate.prompt(min(known.get(worker.id, 0), ask.size))
        bonus = 0.0
        if worker is home:
            bonus = rules.slack if ask.session else 0.0 if shared else min(rules.slack, saved)
        if shared:
            saved = max(saved - RECENT_WEIGHT * (recent[worker.id] - least), 0.0)
        work = worker.prefill + rules.decode_weight * worker.decode + estimate.prompt(ask.size)
        return work - saved - bonus, rank[worker.id]

    best = min(places, key=cost)
    seen = min(known.get(best.id, 0), ask.size)
    load = Load(estimate.prompt(ask.size - seen), estimate.output(ask), suspect)
    return Decision(best, load, why if best is home or home is None else Why.YIELDED, estimate.prompt(seen))


def answering(workers: Sequence[Worker]) -> Sequence[Worker]:
    """Who prefills for others does nothing else while they are there."""
    return [worker for worker in workers if worker.role != "prefill"] or workers


def _spared(workers: Sequence[Worker], there: Sequence[Worker]) -> Sequence[Worker]:
    """Of these, who may have a suspect: another must be left."""
    spare = sum(worker.calm for worker in there) > 1
    return [worker for worker in workers if worker.calm and spare]


def _home(
    ask: Ask, workers: Sequence[Worker], known: Mapping[str, int], there: Sequence[Worker]
) -> tuple[Worker | None, Why]:
    if ask.session:
        # Of all that serve the model, ready or not: a worker that is away for a moment keeps its sessions.
        serving = answering([worker for worker in workers if ask.model in worker.models])
        home = max(serving, key=lambda worker: affinity(ask.session, worker.name))
        if home in there:
            return home, Why.SESSION
        return max(there, key=lambda worker: affinity(ask.session, worker.name)), Why.AWAY
    by_id = {worker.id: worker for worker in there}
    for name in known:  # most first
        if name in by_id:
            return by_id[name], Why.PREFIX
    return None, Why.LOAD


def affinity(session: str, name: str) -> bytes:
    """Rendezvous hashing: the worker with the highest is the session's. One that comes or goes moves only its own."""
    return blake2b(name.encode(), key=blake2b(session.encode(), digest_size=32).digest(), digest_size=8).digest()


def _ranks(ask: Ask, workers: Sequence[Worker]) -> dict[str, float]:
    """The order of equals: another one for every prompt, so that they spread."""
    key = ask.session or ask.digest.hex()
    order = sorted(workers, key=lambda worker: (worker.open / worker.max_running, affinity(key, worker.name)))
    return {worker.id: float(i) for i, worker in enumerate(order)}


def _nobody(ask: Ask, workers: Sequence[Worker]) -> Exception:
    models = sorted({model for worker in workers for model in worker.models})
    if not models:
        return EngineUnavailable("no worker has registered", hint="emberline worker MODEL --router URL starts one")
    if ask.model not in models:
        hint = f"this router has {', '.join(map(repr, models))}"
        return ModelNotFound(f"there is no model {ask.model[:200]!r} here", param="model", hint=hint)
    return EngineUnavailable(f"no worker of {ask.model!r} is ready", hint="retry in a few seconds")


def _full(workers: Sequence[Worker]) -> Overloaded:
    wait = math.ceil(min(worker.seconds_to_a_place for worker in workers))
    return Overloaded(f"all {len(workers)} workers are full", retry_after=min(max(wait, 1), LONGEST_WAIT))
