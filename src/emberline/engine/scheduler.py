"""Scheduler: decides what the next step computes, and applies its result to each request.

There are no prefill and decode steps: every running request has one or more tokens that are known but not computed, and
a step computes as many of them as the budget allows. A request whose tokens are all computed samples its next token in
this step, so a step usually mixes both. A step may be planned while the previous one runs: plans run in order, so an
earlier plan never uses a block that a later one has freed. Needs no torch, wall clock or I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from emberline.core.clock import Clock
from emberline.core.engine_config import SchedulerConfig
from emberline.core.events import Output
from emberline.core.plan import Admission, SampledToken, StepPlan, StepResult, TokenLogprob, WorkItem
from emberline.core.request import FinishReason, Request, RequestStatus
from emberline.engine.admission import WaitingQueue
from emberline.engine.finish import append_sampled, ends_with_stop_token, finish_reason, make_last_output, make_timing
from emberline.engine.pacing import PromptBacklog, make_pacing, max_prompt_tokens
from emberline.engine.preemption import choose_victim
from emberline.engine.publisher import BlockPublisher
from emberline.engine.work_items import end_draft, make_run_output, make_work
from emberline.kv.rank_managers import AnyKVManager

if TYPE_CHECKING:  # needs numpy, and the memory plan, which imports this module, is made before that is loaded
    from emberline.engine.speculation.drafter import Drafter

MAX_SCORED_TOKENS = 512  # per step, prompt tokens with log-probabilities: each needs a row of logits
RUNNING, STOP = RequestStatus.RUNNING, FinishReason.STOP  # globals, because they are looked up for every token


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        kv: AnyKVManager,
        clock: Clock,
        eos: frozenset[int] = frozenset(),
        publisher: BlockPublisher | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.config, self.kv, self.clock, self.eos = config, kv, clock, eos
        self.publisher, self.drafter = publisher, drafter
        self._plan_share = 1
        self.waiting = WaitingQueue(config.ageing_seconds)
        self.running: list[Request] = []  # in the order of WaitingQueue.sort_key
        self.requests: dict[str, Request] = {}  # all open ones
        self.preemptions = self.prompt_tokens = self.generated_tokens = self._step = 0
        self._pacing = make_pacing(config, num_stages=1)
        self._scored_budget = MAX_SCORED_TOKENS  # remaining in this step
        self._is_full = False  # the last step had no room for a waiting request
        self._followers: dict[str, list[Request]] = {}  # siblings that wait until their leader has computed the prompt
        self._loading: dict[str, Request] = {}  # wait for blocks from a lower tier or another engine
        self._new_to_runner: dict[str, Request] = {}  # running requests without an Admission in a plan yet
        self._known_to_runner: set[str] = set()
        self._first_num_cached: dict[str, int] = {}  # of preempted requests: cached tokens when they first started
        self._ended_ids: list[str] = []
        self._shifted_work: dict[str, WorkItem] = {}  # by request: work in flight with a max_shift
        self._prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        self._outputs: list[Output] = []
        self.has_early_outputs = False  # outputs made while planning, for which another engine or a moved stream waits

    @property
    def plan_share(self) -> int:
        """Plans among which running requests are divided; above 1, plans in flight do not share any."""
        return self._plan_share

    @plan_share.setter
    def plan_share(self, share: int) -> None:
        self._plan_share, self._pacing = share, make_pacing(self.config, share)

    # -- requests and outputs -----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        assert request.id not in self.requests
        self.requests[request.id] = request
        request.needs_sync_steps |= self.plan_share > 1
        self.kv.keep_source_lease_alive(request)
        if request.leader is not None and request.leader in self.requests:
            self._followers.setdefault(request.leader, []).append(request)
        else:
            self.waiting.push(request)
        if request.num_resumed and (finish := finish_reason(request, self.eos)) is not None:
            self._end_request(request, finish)  # its output was already complete when it moved here

    def abort(self, request_id: str, error: str | None = None) -> None:
        """End a request as aborted and free its KV blocks at once. The id of an ended request is ignored."""
        self.end(request_id, FinishReason.ABORT if error is None else FinishReason.ERROR, error)

    def end(self, request_id: str, finish: FinishReason, error: str | None = None) -> None:
        """End a request with this finish reason and free its KV blocks at once. An unknown id is ignored."""
        if request := self.requests.get(request_id):
            self._end_request(request, finish, error)

    def drain_outputs(self) -> list[Output]:
        outputs, self._outputs, self.has_early_outputs = self._outputs, [], False
        return outputs

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.running)

    @property
    def num_deferred(self) -> int:
        return sum(map(len, self._followers.values()))

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def idle(self) -> bool:
        return not self.requests and not self.kv.copies.has_saves and not self._outputs

    # -- one step -----------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Return the plan of the next step, or None if there is nothing to do."""
        self._end_expired_requests()
        if self.kv.retained.num_quarantined:
            self.kv.retained.release_ended()
        for request in list(self._loading.values()):
            self._continue_loading(request)
        streams, chunks, planned = list[Request](), list[Request](), dict[str, int]()
        for request in self.running:
            remaining = request.num_schedulable
            if remaining > 1:
                chunks.append(request)
            elif remaining:
                streams.append(request)
        drafts: Mapping[str, Sequence[int]] = {}
        num_startable = 0 if self._is_full else max(0, self.config.max_running - len(self.running))
        prompts = PromptBacklog(chunks, self.waiting, num_startable, self.clock.now())
        streams_wait = self._pacing.streams_wait(len(streams), prompts)
        if not streams_wait:
            drafts = self._plan_streams(streams, planned)
        prompt_tokens = self._plan_prompts(prompts, len(planned) + sum(map(len, drafts.values())), planned)
        if streams_wait and not planned:  # no prompt could start: the cache is full, or too many requests run
            drafts = self._plan_streams(streams, planned)
        self._pacing.record_plan(prompt_tokens)
        saves, loads = self.kv.copies.take_saves(), self.kv.copies.take_loads()  # last: requests ended above too
        if not (planned or self._ended_ids or saves or loads):
            return None
        self._step += 1
        admissions = self._take_admissions(planned) if self._new_to_runner else ()
        work = make_work([(self.requests[i], n) for i, n in planned.items()], drafts, self.drafter, self.kv)
        plan = StepPlan(self._step, admissions, work, self._ended_ids, saves, loads)
        if self.drafter is not None:
            plan = self.drafter.complete_plan(plan)
            self._shifted_work |= {w.id: w for w in work if w.max_shift}
        self._ended_ids = []
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Apply the result of a plan to its requests. Results must be given in the order of the plans."""
        assert plan.step == result.step
        self.kv.copies.finish(plan.saves, plan.loads)
        if plan.work:
            chunks = (len(work.tokens) for work in plan.work if len(work.tokens) - work.num_draft > 1)
            self._pacing.record_step_time(sum(chunks), result.seconds)
        now = self.clock.now()
        if self.drafter is not None:
            self.drafter.record_step(plan, result, now, self.requests)
        for work in plan.work:
            request = self.requests.get(work.id)
            if request is None:
                continue  # it ended while the step ran
            if result.failed and (why := result.failed.get(work.id)) is not None:
                self._end_request(request, FinishReason.ERROR, error=why)
                continue
            if work.num_draft:
                self._apply_draft_result(request, work, result, now)
                continue
            if work.preemptions == request.preemptions:  # else its blocks were freed since
                self._record_computed_tokens(request, work, result, work.start + len(work.tokens))
            if work.samples:
                request.num_pending -= 1
                if work.num_propose and not request.num_pending:
                    request.num_proposing = 0
                self.generated_tokens += 1
                self._append_token(request, result.sampled[work.id], now)

    def should_wait_for_result(self) -> bool:
        """Return whether to wait for the newest tokens, so that the next plan can have drafts that follow them."""
        return self.drafter is not None and self.plan_share == 1 and self.drafter.expects_draft(self.running)

    # -- parts of a step ------------------------------------------------------------------------------------------

    def _plan_streams(self, streams: Sequence[Request], planned: dict[str, int]) -> Mapping[str, Sequence[int]]:
        """Plan a token for each decoding request, and return the drafts that follow these tokens."""
        max_single = -(-len(self.running) // self.plan_share)
        for request in streams:
            if request.status is RUNNING and len(planned) < max_single:  # and not preempted just now
                self._plan_tokens(request, 1, planned)
        room = self.config.max_batch_tokens - len(planned)
        if self.drafter is None or room <= 0:
            return {}
        return self.drafter.plan_drafts([self.requests[i] for i in planned], room, self.kv)

    def _plan_prompts(self, prompts: PromptBacklog, decoded: int, planned: dict[str, int]) -> int:
        """Plan chunks of prompts beside `decoded` tokens of decoding requests; return their number of tokens."""
        budget = total_budget = self._chunk_budget(decoded, prompts)
        self._scored_budget = MAX_SCORED_TOKENS
        for request in prompts.chunks:
            if request.status is RUNNING and (count := self._take_chunk_size(request, budget)):
                budget -= self._plan_tokens(request, count, planned)
        while budget > 0 and (admitted := self._admit_next()) is not None:
            if admitted.status is RUNNING:
                budget -= self._plan_tokens(admitted, self._take_chunk_size(admitted, budget), planned)
        self._is_full = budget > 0 and len(self.waiting) > 0
        return total_budget - budget

    def _apply_draft_result(self, request: Request, work: WorkItem, result: StepResult, now: float) -> None:
        """Append the sampled tokens of a request with a draft, up to the one that ends it, as if sampled one by one."""
        assert self.drafter is not None
        first = result.sampled[work.id]
        kept, finish = append_sampled(request, first, self.eos)
        self.drafter.record_result(request, work, first, len(kept))
        if work.preemptions == request.preemptions:
            request.num_planned += len(kept) - 1
            computed = work.start + len(work.tokens) - work.num_draft + len(kept) - 1
            self._record_computed_tokens(request, work, result, computed)
        end_draft(request, self._shifted_work.pop(request.id, None), len(kept) - 1)
        self.generated_tokens += len(kept)
        if finish is not None or first.logprob is not None or request.first_token_at is None:
            self._output_tokens(request, kept, finish, now)
        else:  # the usual case
            request.token_deadline = now + request.token_timeout
            self._outputs.append(make_run_output(request, kept))

    def _record_computed_tokens(self, request: Request, work: WorkItem, result: StepResult, computed: int) -> None:
        request.num_computed = computed
        if work.start < request.prompt_len:
            self.prompt_tokens += min(computed, request.prompt_len) - work.start
        if work.prompt_logprobs:
            self._prompt_logprobs.setdefault(request.id, []).extend(result.prompt_logprobs[work.id])
        if len(work.tokens) > 1 or computed % self.config.block_size == 0 or work.saves_states:  # else nothing is new
            self.kv.index_full_blocks(request)
        if request.publish and self.publisher is not None:
            self.publisher.publish_and_output_ticket(request, self._outputs)
        if self._followers and request.num_computed >= request.prompt_len:
            self._release_waiting_siblings(request)

    def _admit_next(self) -> Request | None:
        """Start the first waiting request and return it; None if it cannot start now.

        A request starts when blocks for all of its known tokens are free, so it cannot stall in its prompt."""
        request = self.waiting.first_unblocked()
        if request is None or request.num_pending or len(self.running) >= self.config.max_running:
            return None
        is_scored_later = request.needs_prompt_logprobs and not self._scored_budget
        if is_scored_later or not self.kv.admit(request, reserved_blocks=len(self.running)):
            return None  # later requests must not overtake it, or a long prompt would wait for ever
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        if request.admitted_at is None:
            request.admitted_at = self.clock.now()
        if request.id not in self._known_to_runner:
            self._new_to_runner[request.id] = request
        self.running.append(request)
        self.running.sort(key=self.waiting.sort_key)
        if self.kv.is_loading(request):
            request.status = RequestStatus.LOADING
            self._loading[request.id] = request
            self._continue_loading(request)
        elif request.publish and self.publisher is not None:  # publish what was found in the cache
            self.has_early_outputs |= self.publisher.publish_and_output_ticket(request, self._outputs)
        return request

    def _continue_loading(self, request: Request) -> None:
        """Use KV blocks that have arrived for a request; let it run once all have arrived or time is up.

        If the engine that computed the prompt also sampled the first token, that token is used."""
        if not self.kv.update_loaded_prefix(request):
            self._return_to_queue(request)
        elif not self.kv.is_loading(request):
            del self._loading[request.id]
            request.status = RequestStatus.RUNNING
            if (result := request.usable_prefill_result) is not None:
                self.has_early_outputs = True
                self._append_token(request, SampledToken(result.tokens[0], stop=result.stop), self.clock.now())

    def _take_admissions(self, planned: dict[str, int]) -> list[Admission]:
        """Return an Admission for each planned request that is new to the runner.

        A request is admitted with its first work item, so that the runner can report an error in that step's result."""
        new = [request for name, request in self._new_to_runner.items() if name in planned]
        for request in new:
            del self._new_to_runner[request.id]
            self._known_to_runner.add(request.id)
        return [Admission(r.id, list(r.tokens), r.prompt_len, r.params, r.seed) for r in new]

    def _take_chunk_size(self, request: Request, budget: int) -> int:
        """Return how many tokens to plan, within `budget` and the step's budget for prompt log-probabilities."""
        count = min(request.num_schedulable, budget)
        if request.needs_prompt_logprobs:
            count = min(count, self._scored_budget)
            self._scored_budget -= count
        return count

    def _plan_tokens(self, request: Request, count: int, planned: dict[str, int]) -> int:
        """Plan `count` tokens of a request if there are blocks for them; return how many were planned."""
        tokens = request.num_planned + count + request.num_draft  # all of that draft may be accepted
        if len(planned) >= self.config.max_batch_tokens or not (
            self.kv.extend_block_table(request, tokens) or self._preempt_until_fits(request, tokens, planned)
        ):
            return 0
        planned[request.id] = count
        return count

    def _chunk_budget(self, decoded: int, prompts: PromptBacklog) -> int:
        """Return how many prompt tokens may be planned in addition to `decoded` tokens of decoding requests."""
        left = max_prompt_tokens(self.config.max_batch_tokens, decoded, self.plan_share, prompts)
        allowed = self._pacing.max_prompt_tokens(decoded, prompts.waited_seconds)
        return left if allowed is None else min(left, allowed)

    def _preempt_until_fits(self, request: Request, tokens: int, planned: dict[str, int]) -> bool:
        while not self.kv.extend_block_table(request, tokens):
            victim = choose_victim(request, self.running, self.waiting.sort_key, self.kv)
            planned.pop(victim.id, None)
            self._preempt_request(victim)
            if victim is request:
                return False
        return True

    def _preempt_request(self, request: Request) -> None:
        if request.num_computed > request.num_cached:
            self._first_num_cached.setdefault(request.id, request.num_cached)
        request.preemptions += 1
        self.preemptions += 1
        self._prompt_logprobs.pop(request.id, None)
        self._return_to_queue(request)

    def _return_to_queue(self, request: Request) -> None:
        """Free the KV blocks of a running or loading request, and let it wait until it is admitted again."""
        self.kv.free_request(request)
        self.running.remove(request)
        self._loading.pop(request.id, None)
        request.status = RequestStatus.WAITING
        request.num_computed = request.num_planned = request.num_cached = 0
        self.waiting.push(request)

    def _append_token(self, request: Request, sampled: SampledToken, now: float) -> None:
        """Append a sampled token to the request, add an Output, and end the request if the token is its last."""
        token = sampled.token
        request.tokens.append(token)
        is_special = sampled.stop or token in self.eos or token in request.params.stop_token_ids or sampled.logprob
        if is_special or len(request.tokens) >= request.max_len or request.first_token_at is None or request.publish:
            self._output_tokens(request, [sampled], finish_reason(request, self.eos, sampled.stop), now)
        else:  # the usual case
            request.token_deadline = now + request.token_timeout
            self._outputs.append(Output(request.submission_id, request.index, [token]))

    def _output_tokens(
        self, request: Request, sampled: Sequence[SampledToken], finish: FinishReason | None, now: float
    ) -> None:
        """Add an Output with the newest tokens of a request, and end the request if `finish` says so."""
        request.token_deadline = now + request.token_timeout
        ticket, tokens, first = None, [one.token for one in sampled], request.first_token_at is None
        if first:
            request.first_token_at = now
            request.num_cached = min(request.num_cached, self._first_num_cached.get(request.id, request.num_cached))
        request.check_invariants()
        if request.publish and self.publisher is not None:
            finish, ticket = FinishReason.HANDOFF, self.publisher.complete_ticket(request, sampled[-1])
        prompt_logprobs = self._prompt_logprobs.pop(request.id, None)
        output = Output(
            request.submission_id,
            request.index,
            tokens,
            [one.logprob for one in sampled if one.logprob],
            prompt_logprobs[: request.prompt_len - 1] if prompt_logprobs is not None else None,
            cached_tokens=min(request.num_cached, request.prompt_len) if first else 0,
            finish=finish,
            stop_token=tokens[-1] if finish is STOP and ends_with_stop_token(request, self.eos) else None,
            timing=make_timing(request, now if finish else None) if first or finish else None,
            ticket=ticket,
        )
        output.drafted_tokens, output.accepted_tokens = request.take_draft_counts()
        self._outputs.append(output)
        if finish is not None:
            self._remove_request(request)

    # -- endings ---------------------------------------------------------------------------------------------------

    def _end_expired_requests(self) -> None:
        now = self.clock.now()
        for request in [r for r in self.requests.values() if min(r.deadline, r.token_deadline) <= now]:
            self._end_request(request, FinishReason.ERROR, error="deadline_exceeded")

    def _end_request(self, request: Request, finish: FinishReason, error: str | None = None) -> None:
        self._outputs.append(make_last_output(request, finish, error, self.clock.now()))
        self._remove_request(request)

    def _remove_request(self, request: Request) -> None:
        """Free the KV blocks of a request and delete all its state. Every request ends here."""
        if request.status in (RequestStatus.RUNNING, RequestStatus.LOADING):
            self.kv.free_request(request)
            self.running.remove(request)
            self._loading.pop(request.id, None)
        elif request.leader in self._followers and request in self._followers[request.leader]:
            self._followers[request.leader].remove(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.ENDED
        del self.requests[request.id]
        if request.source is not None:
            self.kv.drop_unadmitted_request(request)
        if request.publish and self.publisher is not None:
            self.publisher.end_request(request)
        self._prompt_logprobs.pop(request.id, None)
        if request.id in self._known_to_runner:
            self._known_to_runner.remove(request.id)
            self._ended_ids.append(request.id)
        self._new_to_runner.pop(request.id, None)
        self._first_num_cached.pop(request.id, None)
        self._shifted_work.pop(request.id, None)
        if self.drafter is not None:
            self.drafter.forget(request)
        self._release_waiting_siblings(request)

    def _release_waiting_siblings(self, leader: Request) -> None:
        for follower in self._followers.pop(leader.id, ()):
            follower.leader = None
            self.waiting.push(follower)
