"""Generation: submits a prepared call to the engine and yields its outputs, after those of an earlier worker."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from emberline.core.events import Output, Timing
from emberline.core.params import SamplingParams
from emberline.core.request import FinishReason, Submission
from emberline.engine.async_engine import AsyncEngine
from emberline.worker.choice import Choice, error_from_output
from emberline.worker.delta_assembler import PromptOutput
from emberline.worker.prepared_call import PreparedCall, PreparedPrompt, ReasoningBudget
from emberline.worker.resumed_output import ResumedOutput

REPLAY_GROUPS_PER_YIELD = 256  # replayed groups before the event loop runs other tasks


class Generation:
    def __init__(
        self,
        engine: AsyncEngine,
        call: PreparedCall,
        *,
        model: str,
        max_context: int,
        timeout: float,
        token_timeout: float,
        resumed: ResumedOutput,
        source: dict[str, Any] | None = None,
        merges_outputs: bool = False,
    ) -> None:
        """`merges_outputs`: several outputs that wait to be read may be merged into one."""
        self._engine = engine
        self._call = call
        self._model = model
        self._max_context = max_context
        self._deadline = engine.now() + timeout
        self._token_timeout = token_timeout
        self._resumed = resumed
        self._source = source
        self._merges_outputs = merges_outputs

    def prefill_outputs(self) -> AsyncGenerator[Output, None]:
        """Compute the prompt and resumed tokens; yield the next token and the ticket for pulling the KV blocks.

        With a reasoning budget only the prompt is computed: the tokens after it may belong to two engine requests.
        """
        prompt = self._call.prompts[0]
        resumed = self._resumed.tokens_of([0]) if prompt.budget is None else ()
        return self._submit(prompt.token_ids, self._call.params, resumed, publish=True)

    def outputs(self, choices: Sequence[Choice]) -> AsyncGenerator[PromptOutput, None]:
        """Yield the outputs; `choices` must process each before the next. Closing the generator aborts all requests."""
        prompt = self._call.prompts[0]
        if prompt.budget is None:
            return self._all_outputs(choices)
        return self._budgeted_outputs(prompt.budget, prompt, choices[0])

    def _submit(
        self,
        ids: list[int],
        params: SamplingParams,
        resumed: tuple[tuple[int, ...], ...] = (),
        *,
        source: dict[str, Any] | None = None,
        publish: bool = False,
        merging: bool = False,
    ) -> AsyncGenerator[Output, None]:
        common, time_left = self._call.common, max(0.0, self._deadline - self._engine.now())
        head = (uuid.uuid4().hex, ids, params, common.priority, common.cache_salt, time_left, self._model)
        submission = Submission(*head, resumed, source, publish, self._token_timeout)
        return self._engine.submit(submission, merges=merging)

    async def _compute_logprobs(self, top: int) -> None:
        """Compute the log-probabilities of resumed tokens again, as those of a prompt: a handoff does not have them."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top)
        for index, tokens in self._resumed:
            ids = self._call.prompt_of(index).token_ids
            async with aclosing(self._submit([*ids, *tokens], params)) as outputs:
                async for output in outputs:
                    if output.error is not None:
                        raise error_from_output(output.error)
                    if output.prompt_logprobs is not None:
                        self._resumed.set_logprobs(index, output.prompt_logprobs[len(ids) - 1 :])

    # -- any number of prompts -----------------------------------------------------------------------------------------

    async def _all_outputs(self, choices: Sequence[Choice]) -> AsyncGenerator[PromptOutput, None]:
        num_replayed, top = 0, self._call.params.logprobs
        if self._resumed and top is not None:
            await self._compute_logprobs(top)
        while self._resumed:
            index, output = self._resumed.next_output()
            prompt = self._call.prompt_of(index)
            output.index = index - prompt.first_choice
            yield PromptOutput(prompt, output, is_replayed=True)
            num_replayed += 1
            if num_replayed % REPLAY_GROUPS_PER_YIELD == 0:
                await asyncio.sleep(0)
        unfinished = [
            prompt
            for prompt in self._call.prompts
            if not all(choices[i].is_finished for i in self._choice_range(prompt))
        ]
        merging = self._merges_outputs and not any(choice.parses_output for choice in choices)
        if len(unfinished) == 1:  # most requests; the tasks that several prompts need are a third of an event's cost
            async with aclosing(self._prompt_outputs(unfinished[0], merging)) as outputs:
                async for output in outputs:
                    yield PromptOutput(unfinished[0], output)
            return
        async with aclosing(self._concurrent_outputs(unfinished, merging)) as prompt_outputs:
            async for prompt_output in prompt_outputs:
                yield prompt_output

    async def _concurrent_outputs(
        self, prompts: Sequence[PreparedPrompt], merging: bool
    ) -> AsyncGenerator[PromptOutput, None]:
        queue: asyncio.Queue[PromptOutput | BaseException | None] = asyncio.Queue()
        feeders = [asyncio.create_task(self._feed(prompt, queue, merging)) for prompt in prompts]
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

    def _prompt_outputs(self, prompt: PreparedPrompt, merging: bool) -> AsyncGenerator[Output, None]:
        resumed = self._resumed.tokens_of(self._choice_range(prompt))
        return self._submit(prompt.token_ids, self._call.params, resumed, source=self._source, merging=merging)

    async def _feed(
        self, prompt: PreparedPrompt, queue: asyncio.Queue[PromptOutput | BaseException | None], merging: bool
    ) -> None:
        try:
            async with aclosing(self._prompt_outputs(prompt, merging)) as outputs:
                async for output in outputs:
                    queue.put_nowait(PromptOutput(prompt, output))
            queue.put_nowait(None)
        except BaseException as e:
            queue.put_nowait(e)
            if not isinstance(e, Exception):
                raise

    def _choice_range(self, prompt: PreparedPrompt) -> range:
        return range(prompt.first_choice, prompt.first_choice + self._call.params.n)

    # -- one prompt with a reasoning budget ----------------------------------------------------------------------------

    async def _budgeted_outputs(
        self, budget: ReasoningBudget, prompt: PreparedPrompt, choice: Choice
    ) -> AsyncGenerator[PromptOutput, None]:
        """Yield the outputs; when the budget is spent, close the reasoning and continue with a second engine request.

        The closing marker is yielded as if the model had written it. The second request replaces the first in the same
        step of the event loop, so that no other request can take its place, with the tokens and the time left.
        """
        params = self._call.params
        tokens, timing = list[int](), None
        max_tokens = self._max_context - len(prompt.token_ids)
        max_tokens = max_tokens if params.max_tokens is None else min(max_tokens, params.max_tokens)
        async with aclosing(self._request_outputs(prompt, prompt.token_ids, params, choice)) as prompt_outputs:
            async for prompt_output in prompt_outputs:
                timing = timing or prompt_output.output.timing
                tokens += prompt_output.output.tokens
                yield prompt_output
                if prompt_output.output.finish is not None or not budget.is_spent(choice, tokens):
                    continue
                left = max_tokens - len(tokens) - len(budget.closing_tokens)
                if left < 1:  # no token could follow the marker
                    final_timing = _with_finished(timing, self._engine.now())
                    yield self._own_output(
                        prompt, Output(prompt_output.output.id, finish=FinishReason.LENGTH, timing=final_timing)
                    )
                    return
                tokens += budget.closing_tokens
                yield self._own_output(prompt, Output(prompt_output.output.id, tokens=budget.closing_tokens))
                if not choice.is_finished:  # by a stop string in the marker
                    break
            else:
                return
        min_tokens = min(left, max(0, params.min_tokens - len(tokens)))
        after = replace(budget.params_after, max_tokens=left, min_tokens=min_tokens, prompt_logprobs=None)
        async with aclosing(
            self._request_outputs(prompt, [*prompt.token_ids, *tokens], after, choice)
        ) as prompt_outputs:
            async for prompt_output in prompt_outputs:
                if (last := prompt_output.output.timing) is not None:
                    prompt_output.output.timing = _with_finished(timing or last, last.finished)
                yield prompt_output

    def _own_output(self, prompt: PreparedPrompt, output: Output) -> PromptOutput:
        """Return an output made here in place of the engine, or its replay if another worker has sent it."""
        return (
            PromptOutput(prompt, self._resumed.next_output()[1], is_replayed=True)
            if self._resumed
            else PromptOutput(prompt, output)
        )

    async def _request_outputs(
        self, prompt: PreparedPrompt, ids: list[int], params: SamplingParams, choice: Choice
    ) -> AsyncGenerator[PromptOutput, None]:
        """Yield the outputs of one of the two engine requests: first the resumed ones, then new ones."""
        tokens = list[int]()
        while self._resumed and not choice.is_finished:
            _, output = self._resumed.next_output()
            tokens += output.tokens
            yield PromptOutput(prompt, output, is_replayed=True)
        if choice.is_finished:
            return
        source = self._source if ids is prompt.token_ids else None
        async with aclosing(self._submit(ids, params, (tuple(tokens),) if tokens else (), source=source)) as outputs:
            async for output in outputs:
                yield PromptOutput(prompt, output)


def _with_finished(timing: Timing | None, finished: float | None) -> Timing | None:
    return timing and replace(timing, finished=finished)
