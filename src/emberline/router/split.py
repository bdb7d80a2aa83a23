"""split: whether another worker computes a request's prompt, and which. Pure, as the policy is.

It is worth a handoff if there is much to compute, and it is not done much later for it: how long the other has to
compute before is known from its pace. While that is not known, the other must have room, or at least not be fuller than
the one that is to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emberline.router.ask import Ask
from emberline.router.estimate import Estimate
from emberline.router.policy import Decision, Rules, Why
from emberline.router.worker import Load, Worker


def split(
    ask: Ask,
    answering: Decision,
    workers: Sequence[Worker],
    known: Mapping[str, int],
    estimate: Estimate,
    rules: Rules,
    now: float,
    must: bool = False,
) -> Decision | None:
    """`answering`: who is to generate, and how much of the prompt it would have to compute by itself, which is among
    its loads already. `must`: it cannot do that."""
    if not must and (not ask.single or answering.load.prefill < rules.split_tokens):
        return None
    to = answering.worker
    there = [w for w in workers if w.role == "prefill" and w.takes(ask.model, now) and to.takes_from(w, ask.model)]

    def missing(worker: Worker) -> float:
        return estimate.prompt(max(ask.size - known.get(worker.id, 0), 0))

    def in_time(worker: Worker) -> bool:
        rate = worker.pace.rate
        if not rate:
            return worker.open < worker.max_running or not _fuller(worker, to)
        return worker.prefill + missing(worker) - to.prefill <= rules.split_patience * rate

    places = [w for w in there if w.open < w.limit and (must or in_time(w))]
    if not places:
        return None
    best = min(places, key=lambda worker: (worker.prefill + missing(worker), worker.open, worker.name))
    seen = min(known.get(best.id, 0), ask.size)
    wait = best.prefill / best.pace.rate if best.pace.rate else 0.0
    return Decision(best, Load(missing(best), 0.0), Why.SPLIT, estimate.prompt(seen), wait)


def _fuller(one: Worker, other: Worker) -> bool:
    return one.open * other.max_running > other.open * one.max_running
