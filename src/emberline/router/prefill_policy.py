"""choose_prefill_worker: decides whether a prefill worker computes a request's prompt, and which one.

It is a pure function. A prefill worker is used if the prompt has many tokens that the answering worker has not cached,
and if the prefill worker would finish at most `max_split_delay_s` later than the answering worker. The finish time is
estimated from the prefill worker's measured tokens per second. While that rate is unknown, the prefill worker must have
a free slot or be no more loaded than the answering worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emberline.router.policy import RoutingDecision, RoutingReason, RoutingRules
from emberline.router.request_summary import RequestSummary
from emberline.router.token_estimator import TokenEstimator
from emberline.router.worker import RequestLoad, Worker


def choose_prefill_worker(
    summary: RequestSummary,
    answer_decision: RoutingDecision,
    workers: Sequence[Worker],
    cached_bytes_by_worker: Mapping[str, int],
    estimator: TokenEstimator,
    rules: RoutingRules,
    now: float,
    is_required: bool = False,
) -> RoutingDecision | None:
    """Return the prefill worker, or None if the answering worker should compute the prompt itself.

    `answer_decision`: the decision for the answering worker, whose load already includes the prompt. `is_required`: the
    answering worker cannot compute prompts itself."""
    if not is_required and (
        not summary.is_single_sequence or answer_decision.load.prefill_tokens < rules.min_split_tokens
    ):
        return None
    answering_worker = answer_decision.worker
    prefillers = [w for w in workers if w.role == "prefill" and w.accepts_requests_for(summary.model, now)]

    def missing_tokens(worker: Worker) -> float:
        return estimator.estimate_prompt_tokens(max(summary.prompt_bytes - cached_bytes_by_worker.get(worker.id, 0), 0))

    def can_prefill_in_time(worker: Worker) -> bool:
        rate = worker.prefill_rate.tokens_per_s
        if not rate:
            return worker.total_open_requests < worker.max_running or not _is_more_loaded(worker, answering_worker)
        return (
            worker.total_prefill_tokens + missing_tokens(worker) - answering_worker.total_prefill_tokens
            <= rules.max_split_delay_s * rate
        )

    choices = [
        w
        for w in prefillers
        if answering_worker.can_fetch_blocks_from(w, summary.model)
        and w.total_open_requests < w.max_requests
        and (is_required or can_prefill_in_time(w))
    ]
    if not choices:
        return None
    best = min(
        choices,
        key=lambda worker: (
            worker.total_prefill_tokens + missing_tokens(worker),
            worker.total_open_requests,
            worker.name,
        ),
    )
    cached = min(cached_bytes_by_worker.get(best.id, 0), summary.prompt_bytes)
    wait = best.total_prefill_tokens / best.prefill_rate.tokens_per_s if best.prefill_rate.tokens_per_s else 0.0
    return RoutingDecision(
        best,
        RequestLoad(missing_tokens(best), 0.0),
        RoutingReason.SPLIT,
        estimator.estimate_prompt_tokens(cached),
        wait,
    )


def _is_more_loaded(worker: Worker, other: Worker) -> bool:
    return worker.total_open_requests * other.max_running > other.total_open_requests * worker.max_running
