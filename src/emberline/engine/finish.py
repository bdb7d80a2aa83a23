"""When and why a request ends, and the timestamps that its outputs report."""

from __future__ import annotations

from emberline.core.events import Output, Timing
from emberline.core.plan import SampledToken
from emberline.core.request import FinishReason, Request


def finish_reason(request: Request, eos: frozenset[int], is_grammar_complete: bool = False) -> FinishReason | None:
    """Return why the request ends with its newest token; None if it continues.

    `is_grammar_complete`: whether the output matches the request's whole grammar, so that no token may follow."""
    if is_grammar_complete or ends_with_stop_token(request, eos):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.tokens) >= request.max_len else None


def ends_with_stop_token(request: Request, eos: frozenset[int]) -> bool:
    token, params = request.tokens[-1], request.params
    return token in params.stop_token_ids or (token in eos and not params.ignore_eos)


def append_sampled(
    request: Request, sampled: SampledToken, eos: frozenset[int]
) -> tuple[list[SampledToken], FinishReason | None]:
    """Append a step's sampled tokens to the request, up to the first token that ends it.

    Return the appended tokens, and the reason why the request ends; None if it continues."""
    run = [sampled, *sampled.further]
    tokens, stop_ids = [one.token for one in run], request.params.stop_token_ids
    has_end = run[-1].stop or len(request.tokens) + len(run) >= request.max_len or not eos.isdisjoint(tokens)
    if not has_end and (not stop_ids or not any(token in stop_ids for token in tokens)):  # the usual case
        request.tokens += tokens
        return run, None
    for at, one in enumerate(run):
        request.tokens.append(one.token)
        if (finish := finish_reason(request, eos, one.stop)) is not None:
            return run[: at + 1], finish
    return run, None


def make_timing(request: Request, finished: float | None) -> Timing:
    return Timing(request.arrival, request.admitted_at, request.first_token_at, finished, request.pulled)


def make_last_output(request: Request, finish: FinishReason, error: str | None, now: float) -> Output:
    """Return the last Output of a request that ends without a new token."""
    drafted, accepted = request.take_draft_counts()
    return Output(
        request.submission_id,
        request.index,
        finish=finish,
        error=error,
        timing=make_timing(request, now),
        drafted_tokens=drafted,
        accepted_tokens=accepted,
    )
