"""choose_prefill_worker: whether a prefill worker computes a request's prompt, and which.

A pure function. A prefill worker is used if the prompt has many uncached tokens and the worker finishes them at most
`max_split_delay_s` later than the answering worker would. The finish time is estimated from the worker's prefill rate.
While that rate is not known, the worker must have a free slot, or at least be no fuller than the answering worker."""

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
    """Return the prefill worker, or None if the answering worker should compute the prompt itself.

    `answer_decision`: the answering worker, whose load already includes the prompt. `is_required`: that worker cannot
    compute prompts itself."""
    if not must and (not ask.single or answering.load.prefill < rules.split_tokens):
        return None
    answering_worker = answering.worker
    prefillers = [w for w in workers if w.role == "prefill" and w.takes(ask.model, now)]

    def missing_tokens(worker: Worker) -> float:
        return estimate.prompt(max(ask.size - known.get(worker.id, 0), 0))

    def is_in_time(worker: Worker) -> bool:
        rate = worker.pace.rate
        if not rate:
            return worker.open < worker.max_running or not _fuller(worker, answering_worker)
        return worker.prefill + missing_tokens(worker) - answering_worker.prefill <= rules.split_patience * rate

    choices = [
        w
        for w in prefillers
        if answering_worker.takes_from(w, ask.model) and w.open < w.limit and (must or is_in_time(w))
    ]
    if not choices:
        return None
    best = min(choices, key=lambda worker: (worker.prefill + missing_tokens(worker), worker.open, worker.name))
    cached = min(known.get(best.id, 0), ask.size)
    wait = best.prefill / best.pace.rate if best.pace.rate else 0.0
    return Decision(best, Load(missing_tokens(best), 0.0), Why.SPLIT, estimate.prompt(cached), wait)


def _fuller(one: Worker, other: Worker) -> bool:
    return one.open * other.max_running > other.open * one.max_running
