"""make_work: what each request computes in the next step; make_run_output: the Output of a step with a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from emberline.core.events import Output
from emberline.core.plan import PENDING_TOKEN, SampledToken, WorkItem
from emberline.core.request import Request
from emberline.kv.manager import KVManager
from emberline.kv.rank_managers import AnyKVManager, RankKVManagers
from emberline.kv.state_manager import StateKVManager

if TYPE_CHECKING:  # needs numpy
    from emberline.engine.speculation.drafter import Drafter

ONE_PENDING = (PENDING_TOKEN,)


def make_work(
    planned: Sequence[tuple[Request, int]],
    drafts: Mapping[str, Sequence[int]],
    drafter: Drafter | None,
    kv: AnyKVManager,
) -> list[WorkItem]:
    """Return the work items of a step. `planned`: its requests, each with its number of tokens without a draft."""
    proposals: Mapping[str, int] = {}
    if drafter is not None and drafter.uses_draft_model:
        proposals = drafter.plan_proposals(planned, drafts, kv)
    table = kv.block_table
    work = [make_work_item(request, count, table(request), drafts, proposals) for request, count in planned]
    if kv.has_windows:
        for item, (request, _) in zip(work, planned, strict=True):
            item.window_blocks = kv.window_tables(request)
    if isinstance(kv, RankKVManagers):
        for item, (request, _) in zip(work, planned, strict=True):
            item.dp_rank = kv.dp_rank_of(request)
            _add_states(item, request, kv.manager_of(request))
    elif isinstance(kv, StateKVManager):
        for item, (request, _) in zip(work, planned, strict=True):
            _add_states(item, request, kv)
    return work


def _add_states(item: WorkItem, request: Request, kv: KVManager) -> None:
    """Set the fields of a work item that only models with recurrent layers use."""
    if isinstance(kv, StateKVManager):
        item.state = kv.plan_states(request, item)
        item.arrived_states, item.published_states = kv.plan_moves(request, item.start)
        item.cleared_blocks = kv.take_cleared_blocks(request, item.start)


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
    if request.num_draft:
        work.max_shift, request.num_draft = request.num_draft, 0
    if drafts and (draft := drafts.get(request.id)):
        work.tokens, work.num_draft = [*tokens, *draft], len(draft)
        request.num_draft = len(draft)
    if proposals or request.num_proposing:
        work.num_propose = request.num_proposing = proposals.get(request.id, 0)
    request.num_planned = end
    request.num_pending += samples
    return work


def end_draft(request: Request, following: WorkItem | None, num_accepted: int) -> None:
    """Record that a step has verified a draft of the request, and correct where the request's next work item begins.

    `following`: that next work item, if it was planned before the number of accepted tokens was known."""
    request.num_pending -= 1
    if not request.num_pending:
        request.num_draft = request.num_proposing = 0
    if following is not None:
        following.start, following.max_shift = following.start + num_accepted, 0


def make_run_output(request: Request, sampled: Sequence[SampledToken]) -> Output:
    """Return the Output of a request that continues, with one step's sampled tokens and its draft counts."""
    drafted, accepted = request.take_draft_counts()
    tokens = [one.token for one in sampled]
    return Output(request.submission_id, request.index, tokens, drafted_tokens=drafted, accepted_tokens=accepted)
