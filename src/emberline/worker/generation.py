"""Generation: runs the prompts of one request on the engine and yields the reply as groups of deltas.

If a different worker has started the reply, the output of that worker is replayed first. This restores the state of the
detokenizer and the parsers.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from emberline.api.call import ChatCall, CompletionCall
from emberline.core.events import Output, Timing
from emberline.core.handoff import DraftCounts, TokenGroup
from emberline.core.params import SamplingParams
from emberline.core.request import FinishReason, Submission
from emberline.engine.async_engine import AsyncEngine
from emberline.server.metrics import ModelMetrics
from emberline.tokens.blockhash import hash_last_full_block, root_hash
from emberline.tokens.tokenizer import Tokenizer
from emberline.wire.deltas import Delta, ReplyStart, UsageUpdate
from emberline.wire.usage import EngineUsage
from emberline.worker.choice import error_from_output
from emberline.worker.phase_spans import PhaseSpans
from emberline.worker.prepared_prompt import PreparedPrompt, ReasoningBudget
from emberline.worker.request_context import RequestContext
from emberline.worker.resumed_output import ResumedOutput

REPLAY_GROUPS_PER_YIELD = 256  # replayed groups before the event loop runs other tasks


@dataclass(slots=True)
class DeltaGroup:
    """The deltas (parts of the reply) that one engine output led to."""

    deltas: list[Delta]
    is_replayed: bool = False  # another worker has already sent them to the client
    cached_tokens: int | None = None  # prompt tokens found in a cache so far; None: as in the group before
    drafts: DraftCounts | None = None  # of the whole reply so far; None: as in the group before
    chain: str = ""  # hash and number of the prompt's last full KV block, if the router asked for it
    index: int = 0  # of the choice
    output: Output | None = None  # the engine output; None for deltas that no engine output caused

    @property
    def token_group(self) -> TokenGroup:
        """The output's tokens and finish reason, in the form in which routers pass them between workers."""
        if self.output is None:
            return TokenGroup(0, ())
        finish = self.output.finish.value if self.output.finish is not None else ""
        return TokenGroup(self.index, tuple(self.output.tokens), finish)


class Generation:
    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Sequence[PreparedPrompt],
        call: ChatCall | CompletionCall,
        context: RequestContext,
        *,
        tokenizer: Tokenizer,
        metrics: ModelMetrics,
        model: str,
        max_context: int,
        timeout: float,
        token_timeout: float,
    ) -> None:
        """`timeout` is the time limit of the whole request in seconds, `token_timeout` that of each token."""
        self._engine = engine
        self._prompts = prompts
        self._params = prompts[0].params
        self._common = call.common
        self._reports_running_usage = call.running_usage
        self._metrics = metrics
        self._model = model
        self._max_context = max_context
        self._deadline = engine.now() + timeout
        self._token_timeout = token_timeout
        self._choices = [choice for prompt in prompts for choice in prompt.make_choices(tokenizer)]
        handoff = context.handoff
        self._resumed = ResumedOutput(handoff.groups, len(self._choices), tokenizer.vocab_size)
        self._source = handoff.source
        self._replays_start = handoff.started and not handoff.groups
        self._merges_outputs = not context.is_tracked  # a router that may move the stream needs one event per token
        self._cached_tokens = handoff.cached_tokens or 0
        self._drafts = handoff.drafts
        self._counts_cached = handoff.cached_tokens is None or len(prompts) > 1
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._started_prompts: set[int] = set()  # first choices of the prompts that have output
        self._has_started = False
        self._chain = self._describe_last_block() if context.reports_chain else ""  # until a group has it
        self._phase_spans: PhaseSpans | None = None  # None: tracing is off
        if context.span is not None:
            self._phase_spans = PhaseSpans(context.span, model, [len(prompt.token_ids) for prompt in prompts])
        for prompt in prompts:
            metrics.record_request(len(prompt.token_ids), self._params.n, self._params.max_tokens)

    def _describe_last_block(self) -> str:
        """Return "HASH COUNT": the hash of the first prompt's last full KV block, and the block's number."""
        info = self._engine.model_info[self._model]
        root = root_hash(info.layout, self._common.cache_salt)
        end = hash_last_full_block(root, self._prompts[0].token_ids, info.block_size)
        return f"{end[0].hex()} {end[1]}" if end is not None else ""

    def delta_groups(self) -> AsyncGenerator[DeltaGroup, None]:
        """Yield the reply, without the final usage. Closing the generator aborts the engine's requests."""
        prompt = self._prompts[0]
        return self._generate_groups() if prompt.budget is None else self._budgeted_groups(prompt, prompt.budget)

    def final_usage(self) -> DeltaGroup:
        return DeltaGroup([self._build_usage()])

    def _build_usage(self) -> UsageUpdate:
        """Return the token counts so far: of the prompts, and of the output of all choices."""
        output = sum(choice.num_tokens for choice in self._choices)
        # Tokens after a stop string may have been accepted, but are not part of the output.
        accepted = min(self._drafts.accepted, output)
        usage = EngineUsage(
            input=self._num_prompt_tokens,
            cached_read=self._cached_tokens,
            output=output,
            reasoning=sum(choice.reasoning_tokens for choice in self._choices),
            accepted_drafts=accepted,
            rejected_drafts=self._drafts.drafted - accepted,
        )
        return UsageUpdate(usage)

    async def prefill(self) -> AsyncGenerator[Output, None]:
        """Compute the KV blocks of the prompt and of resumed tokens, for a different worker.

        Yield the outputs of the engine: the next token, and the ticket with which that worker reads the KV blocks. If
        the request has a reasoning budget, only the blocks of the prompt are computed, not those of resumed tokens: a
        reply with a budget may consist of the outputs of two engine requests.
        """
        prompt = self._prompts[0]
        resumed = self._resumed.tokens_of([0]) if prompt.budget is None else ()
        async with aclosing(self._submit(prompt.token_ids, self._params, resumed, publishes_blocks=True)) as outputs:
            async for output in outputs:
                if self._phase_spans is not None:
                    self._phase_spans.record_output(0, output)
                if output.error is not None:
                    raise error_from_output(output.error)
                if output.finish is not None:
                    self._metrics.record_admission(len(prompt.token_ids), output.cached_tokens)
                    self._metrics.record_completion(output.finish.value, output.timing, len(output.tokens))
                yield output

    def close_spans(self) -> None:
        if self._phase_spans is not None:
            self._phase_spans.close(self._engine.now())

    def _submit(
        self,
        ids: list[int],
        params: SamplingParams,
        resumed: tuple[tuple[int, ...], ...] = (),
        prediction: tuple[int, ...] = (),
        *,
        ticket: dict[str, Any] | None = None,
        publishes_blocks: bool = False,
        merges_outputs: bool = False,
    ) -> AsyncGenerator[Output, None]:
        common, time_left = self._common, max(0.0, self._deadline - self._engine.now())
        head = (uuid.uuid4().hex, ids, params, common.priority, common.cache_salt, time_left, self._model)
        submission = Submission(*head, resumed, ticket, publishes_blocks, self._token_timeout, prediction)
        return self._engine.submit(submission, merges=merges_outputs)

    # -- from engine outputs to deltas ---------------------------------------------------------------------------------

    def _replay_start(self) -> DeltaGroup:
        """Return the start of the reply, marked as replayed.

        This is for a stream of which a different worker has sent only the start to the client.
        """
        self._has_started = True
        return DeltaGroup([ReplyStart(self._num_prompt_tokens, self._cached_tokens)], is_replayed=True)

    def _process_output(self, prompt: PreparedPrompt, output: Output, is_replayed: bool = False) -> DeltaGroup | None:
        """Return the deltas of an engine output, or None if its choice had already ended with a stop string."""
        choice = self._choices[prompt.first_choice + output.index]
        group = DeltaGroup([], is_replayed)
        if self._phase_spans is not None and not is_replayed:
            self._phase_spans.record_output(choice.index, output)
        if prompt.first_choice not in self._started_prompts and output.index == 0:
            self._start_prompt(prompt, output, group)
        if not self._has_started:
            self._has_started = True
            group.cached_tokens = self._cached_tokens
            group.deltas.append(ReplyStart(self._num_prompt_tokens, self._cached_tokens))
        if prompt.echo and choice.num_tokens == 0 and output.tokens:
            group.deltas.append(choice.echo_prompt(prompt.token_ids, output.prompt_logprobs))
        if not choice.is_finished:
            group.index, group.output = choice.index, output
        finished_elsewhere = choice.is_finished and choice.num_replayed_tokens == choice.num_tokens
        pieces = choice.process_output(output)
        if output.drafted_tokens:
            group.drafts = self._drafts = self._drafts.add(output.drafted_tokens, output.accepted_tokens)
        if self._reports_running_usage and group.output:
            group.deltas.append(self._build_usage())
        group.deltas += pieces
        if is_replayed:
            choice.num_replayed_tokens = choice.num_tokens
            return group if group.deltas or group.output else None
        if not finished_elsewhere:
            choice.record_metrics(self._metrics, output, self._engine.now())
        if choice.needs_engine_abort:
            choice.needs_engine_abort = False
            self._engine.abort_completion(output.id, output.index)
        group.chain, self._chain = self._chain, ""
        return group if group.deltas or group.output else None

    def _start_prompt(self, prompt: PreparedPrompt, output: Output, group: DeltaGroup) -> None:
        self._started_prompts.add(prompt.first_choice)
        if group.is_replayed:
            return
        cached = min(output.cached_tokens, len(prompt.token_ids))  # resumed output may be cached too
        self._metrics.record_admission(len(prompt.token_ids), cached)
        if self._counts_cached and cached:
            self._cached_tokens += cached
            group.cached_tokens = self._cached_tokens

    # -- any number of prompts -----------------------------------------------------------------------------------------

    async def _generate_groups(self) -> AsyncGenerator[DeltaGroup, None]:
        if self._replays_start:
            yield self._replay_start()
        num_replayed, top = 0, self._params.logprobs
        if self._resumed and top is not None:
            await self._compute_logprobs(top)
        while self._resumed:
            index, output = self._resumed.next_output()
            prompt = self._prompt_of(index)
            output.index = index - prompt.first_choice
            if (group := self._process_output(prompt, output, is_replayed=True)) is not None:
                yield group
            num_replayed += 1
            if num_replayed % REPLAY_GROUPS_PER_YIELD == 0:
                await asyncio.sleep(0)
        unfinished = [
            prompt for prompt in self._prompts if not all(self._choices[i].is_finished for i in prompt.choice_indexes)
        ]
        merges_outputs = self._merges_outputs and not any(choice.parses_output for choice in self._choices)
        if len(unfinished) == 1:  # most requests; the tasks that several prompts need are a third of an event's cost
            prompt = unfinished[0]
            async with aclosing(self._prompt_outputs(prompt, merges_outputs)) as outputs:
                async for output in outputs:
                    if (group := self._process_output(prompt, output)) is not None:
                        yield group
            return
        async with aclosing(self._concurrent_outputs(unfinished, merges_outputs)) as prompt_outputs:
            async for prompt, output in prompt_outputs:
                if (group := self._process_output(prompt, output)) is not None:
                    yield group

    async def _compute_logprobs(self, top_count: int) -> None:
        """Compute the log-probabilities of the resumed tokens, which the handoff does not include.

        The engine computes them like prompt log-probabilities. `top_count`: the number of most likely tokens for each
        position.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top_count)
        for index, tokens in self._resumed:
            ids = self._prompt_of(index).token_ids
            async with aclosing(self._submit([*ids, *tokens], params)) as outputs:
                async for output in outputs:
                    if output.error is not None:
                        raise error_from_output(output.error)
                    if output.prompt_logprobs is not None:
                        self._resumed.set_logprobs(index, output.prompt_logprobs[len(ids) - 1 :])

    def _prompt_of(self, choice_index: int) -> PreparedPrompt:
        return self._prompts[choice_index // self._params.n]

    async def _concurrent_outputs(
        self, prompts: Sequence[PreparedPrompt], merges_outputs: bool
    ) -> AsyncGenerator[tuple[PreparedPrompt, Output], None]:
        queue: asyncio.Queue[tuple[PreparedPrompt, Output] | BaseException | None] = asyncio.Queue()
        feeders = [asyncio.create_task(self._feed_queue(prompt, queue, merges_outputs)) for prompt in prompts]
        try:
            left = len(feeders)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for feeder in feeders:
                feeder.cancel()
            await asyncio.gather(*feeders, return_exceptions=True)

    def _prompt_outputs(self, prompt: PreparedPrompt, merges_outputs: bool) -> AsyncGenerator[Output, None]:
        resumed = self._resumed.tokens_of(prompt.choice_indexes)
        request = (prompt.token_ids, self._params, resumed, prompt.prediction)
        return self._submit(*request, ticket=self._source, merges_outputs=merges_outputs)

    async def _feed_queue(
        self,
        prompt: PreparedPrompt,
        queue: asyncio.Queue[tuple[PreparedPrompt, Output] | BaseException | None],
        merges_outputs: bool,
    ) -> None:
        try:
            async with aclosing(self._prompt_outputs(prompt, merges_outputs)) as outputs:
                async for output in outputs:
                    queue.put_nowait((prompt, output))
            queue.put_nowait(None)
        except BaseException as e:
            queue.put_nowait(e)
            if not isinstance(e, Exception):
                raise

    # -- one prompt with a reasoning budget ----------------------------------------------------------------------------

    async def _budgeted_groups(
        self, prompt: PreparedPrompt, budget: ReasoningBudget
    ) -> AsyncGenerator[DeltaGroup, None]:
        if self._replays_start:
            yield self._replay_start()
        async with aclosing(self._budgeted_outputs(prompt, budget)) as outputs:
            async for output, is_replayed in outputs:
                if (group := self._process_output(prompt, output, is_replayed)) is not None:
                    yield group

    async def _budgeted_outputs(
        self, prompt: PreparedPrompt, budget: ReasoningBudget
    ) -> AsyncGenerator[tuple[Output, bool], None]:
        """Yield pairs (engine output, whether it is replayed), and end the reasoning at the budget.

        To end it, the marker that closes the reasoning is yielded as if the model had written it. Then a second engine
        request generates the answer, with the remaining tokens and time. It is submitted without giving control to the
        event loop, so that no other request can take the first one's place. The caller must process each output before
        it asks for the next.
        """
        params, choice = self._params, self._choices[0]
        tokens, timing = list[int](), None
        max_tokens = self._max_context - len(prompt.token_ids)
        max_tokens = max_tokens if params.max_tokens is None else min(max_tokens, params.max_tokens)
        async with aclosing(self._request_outputs(prompt, prompt.token_ids, params)) as outputs:
            async for output, is_replayed in outputs:
                timing = timing or output.timing
                tokens += output.tokens
                yield output, is_replayed
                if output.finish is not None or not budget.is_spent(choice, tokens):
                    continue
                left = max_tokens - len(tokens) - len(budget.closing_tokens)
                if left < 1:  # no token could follow the marker
                    final_timing = _with_finish_time(timing, self._engine.now())
                    yield self._output_or_replay(Output(output.id, finish=FinishReason.LENGTH, timing=final_timing))
                    return
                tokens += budget.closing_tokens
                yield self._output_or_replay(Output(output.id, tokens=budget.closing_tokens))
                if not choice.is_finished:  # by a stop string in the marker
                    break
            else:
                return
        min_tokens = min(left, max(0, params.min_tokens - len(tokens)))
        after = replace(budget.params_after, max_tokens=left, min_tokens=min_tokens, prompt_logprobs=None)
        async with aclosing(self._request_outputs(prompt, [*prompt.token_ids, *tokens], after)) as outputs:
            async for output, is_replayed in outputs:
                if (last := output.timing) is not None:
                    output.timing = _with_finish_time(timing or last, last.finished)
                yield output, is_replayed

    def _output_or_replay(self, output: Output) -> tuple[Output, bool]:
        """Return `output`, which was created by this server instead of the engine, and False.

        If a different worker has already sent this output, return the replayed output and True instead.
        """
        return (self._resumed.next_output()[1], True) if self._resumed else (output, False)

    async def _request_outputs(
        self, prompt: PreparedPrompt, ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[tuple[Output, bool], None]:
        """Yield the outputs of one engine request, as pairs of an output and whether it is replayed.

        The outputs that a different worker has already sent come first.
        """
        choice, tokens = self._choices[0], list[int]()
        while self._resumed and not choice.is_finished:
            _, output = self._resumed.next_output()
            tokens += output.tokens
            yield output, True
        if choice.is_finished:
            return
        source = self._source if ids is prompt.token_ids else None
        resumed = (tuple(tokens),) if tokens else ()
        async with aclosing(self._submit(ids, params, resumed, prompt.prediction, ticket=source)) as outputs:
            async for output in outputs:
                yield output, False


def _with_finish_time(timing: Timing | None, finished_at: float | None) -> Timing | None:
    return timing and replace(timing, finished=finished_at)
