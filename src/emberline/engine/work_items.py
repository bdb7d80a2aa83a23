"""make_work_item: what one request computes in the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emberline.core.plan import PENDING_TOKEN, WorkItem
from emberline.core.request import Request

ONE_PENDING = (PENDING_TOKEN,)


def make_work_item(
    request: Request,
    count: int,
    blocks: Sequence[int],
    drafts: Mapping[str, Sequence[int]],
    proposals: Mapping[str, int],
) -> WorkItem:
    """Mark the next `count` tokens of the request as planned, and return a work item with them and its draft, if any.

    `blocks`: the request's block table. `drafts`: drafted tokens by request id. `proposals`: how many tokens the draft
    model proposes, by request id."""
    start, end = request.num_planned, request.num_planned + count
    tokens: Sequence[int]
    if count == 1 and start == len(request.tokens):
        tokens, samples = ONE_PENDING, True
    else:
        tokens, samples = request.tokens[start:end], end == request.num_known
        if len(tokens) < count:
            tokens = [*tokens, PENDING_TOKEN]
    # Positional arguments: keywords take twice as long, and one is made for every token.
    work = WorkItem(request.id, start, tokens, blocks, samples, request.needs_prompt_logprobs, request.preemptions)
    if drafts and (draft := drafts.get(request.id)):
        work.tokens, work.num_draft = [*tokens, *draft], len(draft)
        request.num_draft = len(draft)
    if proposals:
        work.num_propose = request.num_proposing = proposals.get(request.id, 0)
    request.num_planned = end
    request.num_pending += samples
    return work
