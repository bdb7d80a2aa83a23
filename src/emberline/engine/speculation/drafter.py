"""Drafter: decides which guessed tokens a step verifies, and learns from the results.

The scheduler adds the draft of a request to its next work item. The runner samples a token at each drafted position,
and stops at the first that differs from the draft: that token is kept, and the rest of the draft is discarded. So the
output is the same with and without drafts (on a GPU up to rounding, unless `exact` is set), and a rejected draft costs
only time."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import numpy as np

from emberline.core.events import SpeculationStats
from emberline.core.plan import PENDING_TOKEN, SampledToken, StepPlan, StepResult, WorkItem
from emberline.core.request import Request
from emberline.engine.speculation.acceptance import AcceptanceEstimate, ModelAcceptance
from emberline.engine.speculation.draft_context import DraftContext
from emberline.engine.speculation.draft_length import choose_lengths
from emberline.engine.speculation.draft_switch import DraftSwitch
from emberline.engine.speculation.proposer import EMPTY_PROPOSAL, Proposal, Proposer
from emberline.engine.speculation.step_cost import StepCost
from emberline.kv.rank_managers import AnyKVManager

FORCED_CONFIDENCE = 0.95  # that a model splits forced text into tokens as its tokenizer does
MODEL_CONFIDENCE = 0.7  # that a draft model's token is accepted, before anything is known about the model
MAX_GAP = 3.0  # a longer time between two results, as a multiple of the step's own, means that the engine was idle
MIN_KNOWN = 0.75  # share of a step's requests for which a draft model can draft, for the step to be judged
MAX_HOST_S = 0.02  # that the host and a draft model may take in addition, between two steps of the same request


class Drafter:
    def __init__(
        self,
        proposers: Sequence[Proposer],
        max_draft: int,
        *,
        max_rows: int | None = None,
        adaptive: bool = True,
        uses_draft_model: bool = False,
        continues_on_device: bool = False,
    ) -> None:
        """`proposers`: those to ask for each request, the best first. `max_draft`: maximum tokens of a draft.

        `uses_draft_model`: the runner has a draft model, whose proposals are used where `proposers` have none.
        `continues_on_device`: steps may be planned before the result of the step that proposes their drafts is known.
        `max_rows`: maximum tokens of all decoding requests of a step together, with their drafts; None: no limit.
        `adaptive`: verify only as many drafted tokens as increase the expected tokens per second; otherwise, all."""
        self.num_drafts = self.drafted_tokens = self.accepted_tokens = 0
        self._accepted_per_position = [0] * max_draft
        self._proposers = proposers
        self._max_draft = max_draft
        self._max_rows = max_rows
        self._adaptive = adaptive
        self._acceptance = AcceptanceEstimate()
        self._cost = StepCost()
        # Proposers start with drafts, since a first request may come with a prediction. The passes of a draft model
        # may cost more than they gain: they are tried after a few steps without.
        self._switch = DraftSwitch(starts_on=not uses_draft_model)
        self.uses_draft_model = uses_draft_model
        self._continues_on_device = continues_on_device
        self._forced: dict[str, Sequence[int]] = {}  # by request: tokens that its grammar forces next
        # Requests of the newest step. The device has the drafts of these only: others may have lost their memory there.
        self._newest_ids: set[str] = set()
        self._model_acceptance = ModelAcceptance(max_draft, MODEL_CONFIDENCE)
        self._model_draft_ids: set[str] = set()  # requests whose newest draft is the draft model's
        self._num_propose = max_draft  # tokens that the draft model proposes for each request
        self._drafted: dict[str, Sequence[int]] = {}  # by request: tokens that the draft model proposed
        self._context = DraftContext()
        self._last_result_at = -math.inf
        self._last_ids: frozenset[str] = frozenset()  # requests of the step of the last result
        self._num_prepared = [0, 0]  # StepResult.num_prepared of the last two results

    def is_on(self, num_requests: int) -> bool:
        """Return whether a step with this number of requests should have drafts."""
        return not self._adaptive or self._switch.is_on(num_requests)

    def plan_drafts(self, requests: Sequence[Request], room: int, kv: AnyKVManager) -> dict[str, Sequence[int]]:
        """Return drafts for some of a step's requests, by request id, and allocate blocks for them.

        A draft for which too few blocks are free is dropped. `requests`: the decoding requests of the step, with one
        token each. `room`: maximum number of drafted tokens in the step."""
        drafts: dict[str, Sequence[int]] = {}
        if not self.is_on(len(requests)):
            return drafts
        # Behind the last token of a prompt, which may be alone in the step, a draft could not continue on the device. A
        # step may also have one token in the middle of a resumed request, behind which there is nothing to draft.
        by_id = {
            r.id: r
            for r in requests
            if r.can_draft and r.num_planned >= r.prompt_len and r.num_planned + 1 >= r.num_known
        }
        proposals = {name: found for name, request in by_id.items() if (found := self._propose(request)).tokens}
        lengths = self._choose_lengths(by_id, proposals, len(requests), room)
        self._choose_num_propose(proposals, lengths)
        for name, count in lengths.items():
            tokens = proposals[name].tokens[:count]
            longest = by_id[name].num_known + by_id[name].num_draft + len(tokens)
            if kv.extend_block_table(by_id[name], longest, reserved_blocks=len(requests)):
                drafts[name] = tokens
                mark = self._model_draft_ids.add if proposals[name].from_model else self._model_draft_ids.discard
                mark(name)
        return drafts

    def _choose_num_propose(self, proposals: Mapping[str, Proposal], lengths: Mapping[str, int]) -> None:
        """Set how many tokens the draft model proposes next for each request: as many as are worth verifying.

        This is the mean of the lengths chosen for this step, rounded up: a pass of the draft model takes as long for
        one request as for all. Requests that end soon are left out, because their drafts are short for that reason."""
        full = [lengths.get(name, 0) for name, found in proposals.items() if found.is_full_model_draft(self._max_draft)]
        if self._adaptive and any(full):
            self._num_propose = -(-sum(full) // len(full))

    def plan_proposals(
        self, planned: Sequence[tuple[Request, int]], drafts: Mapping[str, Sequence[int]], kv: AnyKVManager
    ) -> dict[str, int]:
        """Return how many tokens the draft model proposes for each request that samples in this step, by request id.

        Blocks for these tokens are allocated; a request for which too few are free is left out. `planned`: the step's
        requests, each with its number of tokens. `drafts`: what the step verifies, by request id."""
        proposals: dict[str, int] = {}
        if not self.is_on(len(planned)):
            return proposals
        for request, count in planned:
            known = request.num_known + request.num_draft + len(drafts.get(request.id, ()))
            length = min(self._num_propose, request.max_len - known)
            if request.num_planned + count < request.num_known or not request.allows_drafts or length <= 0:
                continue
            if not self._context.is_known(request.id, request.num_known):
                continue
            if kv.extend_block_table(request, known + length, reserved_blocks=len(planned)):
                proposals[request.id] = length
                request.can_continue_on_device = (
                    self._continues_on_device and not request.prediction and not request.params.has_rules
                )
        return proposals

    def complete_plan(self, plan: StepPlan) -> StepPlan:
        """Return the plan, with flags for what the step must compute for later drafts.

        If drafts are on, the step reports the tokens that grammars force. The draft model runs if it can draft for a
        request of the step, or if the step has a prompt. If drafts are off for a short time, so that steps without them
        are measured, the draft model runs for prompts only. If they are off for longer, it does not run."""
        rows = len(plan.work)
        is_on, runs = self.is_on(rows), False
        if self.uses_draft_model:
            self._newest_ids = {w.id for w in plan.work}
            has_prompt = any(len(w.tokens) - w.num_draft > 1 for w in plan.work)
            if is_on:
                runs = has_prompt or self._context.count_known(plan.work) > 0
            else:
                runs = has_prompt and self._switch.is_measuring(rows)
            note = self._context.run if runs else self._context.skip
            note(plan.work)
        return replace(plan, reports_forced=is_on, runs_draft_model=runs) if is_on or runs else plan

    def expects_draft(self, running: Sequence[Request]) -> bool:
        """Return whether the next step should wait for the running step's result, so that it can have drafts.

        A draft continues a request's newest token, which is still being sampled. Here the proposers guess that token
        too, and the answer is True if drafts behind it would increase the tokens per second."""
        if any(r.awaits_draft for r in running):
            return True  # these cannot be planned before their result is known
        if not self.is_on(len(running)) or self.uses_draft_model:
            return False
        pending = [r for r in running if r.num_pending and r.allows_drafts]
        later = {
            r.id: Proposal(found.tokens[1:], found.confidence[1:])
            for r in pending
            if len((found := self._propose(r)).tokens) > 1
        }
        return bool(later and self._choose_lengths({r.id: r for r in pending}, later, len(running), len(later)))

    def record_result(self, request: Request, work: WorkItem, sampled: SampledToken, num_kept: int) -> None:
        """Update the acceptance statistics with the result of a work item's draft.

        `sampled`: the request's first sampled token; `sampled.further` has the others. `num_kept`: how many of these
        tokens were added to the output."""
        drafted = work.tokens[len(work.tokens) - work.num_draft :]
        if PENDING_TOKEN in drafted:  # of the sampled tokens, only the last differs from the draft
            accepted = min(num_kept, len(sampled.further))
        else:
            kept = [sampled, *sampled.further][:num_kept]
            accepted = sum(one.token == token for one, token in zip(kept, drafted, strict=False))
        request.num_drafted += work.num_draft
        request.num_accepted += accepted
        self.num_drafts += 1
        self.drafted_tokens += work.num_draft
        self.accepted_tokens += accepted
        for position in range(accepted):
            self._accepted_per_position[position] += 1
        num_known = work.start + len(work.tokens) - work.num_draft
        self._acceptance.record(request.id, num_known, work.num_draft, accepted)
        if request.id in self._model_draft_ids:
            self._model_acceptance.record(work.num_draft, accepted)

    def record_step(self, plan: StepPlan, result: StepResult, now: float, open_ids: Container[str]) -> None:
        """Keep the forced tokens and the draft model's tokens as later drafts, and record how long the step took.

        The duration is the time between the previous result and this one, so it includes planning, which without drafts
        overlaps the previous step. After an idle period, the step's own time is used. Steps with prompt chunks are not
        recorded. Nor are steps during which, or just before which, the runner prepared a new kind of step, for example
        by capturing it. `now`: time of this result in seconds. `open_ids`: ids of the requests that have not ended."""
        for proposed in (self._forced, self._drafted):
            if proposed:
                for work in plan.work:
                    proposed.pop(work.id, None)
        for proposed, found in ((self._forced, result.forced), (self._drafted, result.drafted)):
            proposed.update((name, tokens) for name, tokens in found.items() if name in open_ids)
        self._model_acceptance.end_step()
        interval, self._last_result_at = now - self._last_result_at, now
        was_busy = any(w.id in self._last_ids for w in plan.work)
        self._last_ids = frozenset(w.id for w in plan.work)
        is_idle = interval >= MAX_GAP * result.seconds + (MAX_HOST_S if was_busy and result.seconds else 0.0)
        seconds = result.seconds if is_idle else max(result.seconds, interval)
        # A step is launched before the previous result is read, so a capture delays both.
        was_prepared = self._num_prepared == [result.num_prepared] * 2
        self._num_prepared = [self._num_prepared[1], result.num_prepared]
        if seconds > 0 and was_prepared and plan.work and all(len(w.tokens) - w.num_draft == 1 for w in plan.work):
            self._cost.record(plan.num_tokens, seconds)
            self._record_rate(plan, result, seconds)

    def _record_rate(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Record the tokens per second of a step, by which drafting is switched on and off.

        A draft model is judged only by steps in which it can draft for most requests."""
        rows = len(plan.work)
        if self.uses_draft_model and self.is_on(rows) and self._context.count_known(plan.work) < MIN_KNOWN * rows:
            return
        num_tokens = rows + sum(len(one.further) for one in result.sampled.values())
        self._switch.record(rows, num_tokens, seconds)

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended."""
        self._context.forget(request.id)
        self._acceptance.forget(request.id)
        self._model_draft_ids.discard(request.id)
        self._forced.pop(request.id, None)
        self._drafted.pop(request.id, None)
        for proposer in self._proposers:
            proposer.forget(request)

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            self.num_drafts, self.drafted_tokens, self.accepted_tokens, list(self._accepted_per_position)
        )

    def _propose(self, request: Request) -> Proposal:
        limit = min(self._max_draft, request.max_len - request.num_known - request.num_draft - 1)
        if request.num_pending and request.can_continue_on_device:
            length = max(0, min(limit, request.num_proposing))
            return self._make_model_proposal([PENDING_TOKEN] * length, limit)
        if limit > 0 and (forced := self._forced.get(request.id)):
            return Proposal(forced[:limit], [FORCED_CONFIDENCE] * min(limit, len(forced)))
        if limit > 0:
            for proposer in self._proposers:
                if (proposal := proposer.propose(request, limit)).tokens:
                    return proposal
            drafted = self._drafted.get(request.id, ())
            if drafted and (drafted[0] != PENDING_TOKEN or request.id in self._newest_ids):
                return self._make_model_proposal(drafted[:limit], limit)
        return EMPTY_PROPOSAL

    def _make_model_proposal(self, tokens: Sequence[int], limit: int) -> Proposal:
        """Return a proposal of these tokens of the draft model, with its confidence in up to `limit` tokens."""
        count = limit if self._adaptive else len(tokens)
        return Proposal(tokens, self._model_acceptance.confidence(max(0, count)), from_model=True)

    def _choose_lengths(
        self, requests: Mapping[str, Request], proposals: Mapping[str, Proposal], rows: int, room: int
    ) -> dict[str, int]:
        limit = room if self._max_rows is None else min(room, self._max_rows - rows)
        if not self._adaptive and sum(len(proposal.tokens) for proposal in proposals.values()) <= limit:
            return {name: len(proposal.tokens) for name, proposal in proposals.items()}
        probabilities = {
            name: self._acceptance.probabilities(
                name, requests[name].num_known, proposal.confidence, by_draft_position=proposal.from_model
            )
            for name, proposal in proposals.items()
        }
        room = min(limit, sum(map(len, probabilities.values())))
        if room <= 0:
            return {}
        seconds = self._cost.estimate(rows, room + 1) if self._adaptive else np.ones(room + 1)
        # The steps of a draft model are captured for each number of tokens, so few numbers are used.
        return choose_lengths(probabilities, rows, room, seconds, grain=rows if self.uses_draft_model else 1)
