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
from emberline.engine.stream import AsyncEngine
from emberline.server.worker.choice import Choice, output_error
from emberline.server.worker.groups import Step
from emberline.server.worker.order import Budget, Job, Order
from emberline.server.worker.past import Past

AT_ONCE = 256  # replayed groups before the event loop runs other tasks


class Errand:
    def __init__(
        self,
        engine: AsyncEngine,
        order: Order,
        *,
        model: str,
        max_context: int,
        timeout: float,
        token_timeout: float,
        past: Past,
        source: dict[str, Any] | None = None,
        merging: bool = False,
    ) -> None:
        """`merges_outputs`: several outputs that wait to be read may be merged into one."""
        self._engine = engine
        self._call = order
        self._model = model
        self._max_context = max_context
        self._deadline = engine.now() + timeout
        self._token_timeout = token_timeout
        self._resumed = past
        self._source = source
        self._merges_outputs = merging

    def prefill(self) -> AsyncGenerator[Output, None]:
        """Compute the prompt and resumed tokens; yield the next token and the ticket for pulling the KV blocks.

        With a reasoning budget only the prompt is computed: the tokens after it may belong to two engine requests.
        """
        prompt = self._call.jobs[0]
        resumed = self._resumed.resumed([0]) if prompt.budget is None else ()
        return self._submit(prompt.ids, self._call.params, resumed, publish=True)

    def steps(self, choices: Sequence[Choice]) -> AsyncGenerator[Step, None]:
        """Yield the outputs; `choices` must process each before the next. Closing the generator aborts all requests."""
        prompt = self._call.jobs[0]
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
        caller, time_left = self._call.caller, max(0.0, self._deadline - self._engine.now())
        head = (uuid.uuid4().hex, ids, params, caller.priority, caller.salt, time_left, self._model)
        submission = Submission(*head, resumed, source, publish, self._token_timeout)
        return self._engine.submit(submission, merging=merging)

    async def _compute_logprobs(self, top: int) -> None:
        """Compute the log-probabilities of resumed tokens again, as those of a prompt: a handoff does not have them."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top)
        for index, tokens in self._resumed:
            ids = self._call.job_of(index).ids
            async with aclosing(self._submit([*ids, *tokens], params)) as outputs:
                async for output in outputs:
                    if output.error is not None:
                        raise output_error(output.error)
                    if output.prompt_logprobs is not None:
                        self._resumed.score(index, output.prompt_logprobs[len(ids) - 1 :])

    # -- any number of prompts -----------------------------------------------------------------------------------------

    async def _all_outputs(self, choices: Sequence[Choice]) -> AsyncGenerator[Step, None]:
        num_replayed, top = 0, self._call.params.logprobs
        if self._resumed and top is not None:
            await self._compute_logprobs(top)
        while self._resumed:
            index, output = self._resumed.next()
            prompt = self._call.job_of(index)
            output.index = index - prompt.first
            yield Step(prompt, output, told=True)
            num_replayed += 1
            if num_replayed % AT_ONCE == 0:
                await asyncio.sleep(0)
        unfinished = [
            prompt for prompt in self._call.jobs if not all(choices[i].finished for i in self._choice_range(prompt))
        ]
        merging = self._merges_outputs and not any(choice.splits for choice in choices)
        if len(unfinished) == 1:  # most requests; the tasks that several prompts need are a third of an event's cost
            async with aclosing(self._prompt_outputs(unfinished[0], merging)) as outputs:
                async for output in outputs:
                    yield Step(unfinished[0], output)
            return
        async with aclosing(self._concurrent_outputs(unfinished, merging)) as steps:
            async for step in steps:
                yield step

    async def _concurrent_outputs(self, prompts: Sequence[Job], merging: bool) -> AsyncGenerator[Step, None]:
        queue: asyncio.Queue[Step | BaseException | None] = asyncio.Queue()
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

    def _prompt_outputs(self, prompt: Job, merging: bool) -> AsyncGenerator[Output, None]:
        resumed = self._resumed.resumed(self._choice_range(prompt))
        return self._submit(prompt.ids, self._call.params, resumed, source=self._source, merging=merging)

    async def _feed(self, prompt: Job, queue: asyncio.Queue[Step | BaseException | None], merging: bool) -> None:
        try:
            async with aclosing(self._prompt_outputs(prompt, merging)) as outputs:
                async for output in outputs:
                    queue.put_nowait(Step(prompt, output))
            queue.put_nowait(None)
        except BaseException as e:
            queue.put_nowait(e)
            if not isinstance(e, Exception):
                raise

    def _choice_range(self, prompt: Job) -> range:
        return range(prompt.first, prompt.first + self._call.params.n)

    # -- one prompt with a reasoning budget ----------------------------------------------------------------------------

    async def _budgeted_outputs(self, budget: Budget, prompt: Job, choice: Choice) -> AsyncGenerator[Step, None]:
        """Yield the outputs; when the budget is spent, close the reasoning and continue with a second engine request.

        The closing marker is yielded as if the model had written it. The second request replaces the first in the same
        step of the event loop, so that no other request can take its place, with the tokens and the time left.
        """
        params = self._call.params
        tokens, timing = list[int](), None
        max_tokens = self._max_context - len(prompt.ids)
        max_tokens = max_tokens if params.max_tokens is None else min(max_tokens, params.max_tokens)
        async with aclosing(self._request_outputs(prompt, prompt.ids, params, choice)) as steps:
            async for step in steps:
                timing = timing or step.output.timing
                tokens += step.output.tokens
                yield step
                if step.output.finish is not None or not budget.spent(choice, tokens):
                    continue
                left = max_tokens - len(tokens) - len(budget.closing)
                if left < 1:  # no token could follow the marker
                    ended = _with_finished(timing, self._engine.now())
                    yield self._own_output(prompt, Output(step.output.id, finish=FinishReason.LENGTH, timing=ended))
                    return
                tokens += budget.closing
                yield self._own_output(prompt, Output(step.output.id, tokens=budget.closing))
                if not choice.finished:  # by a stop string in the marker
                    break
            else:
                return
        min_tokens = min(left, max(0, params.min_tokens - len(tokens)))
        after = replace(budget.after, max_tokens=left, min_tokens=min_tokens, prompt_logprobs=None)
        async with aclosing(self._request_outputs(prompt, [*prompt.ids, *tokens], after, choice)) as steps:
            async for step in steps:
                if (last := step.output.timing) is not None:
                    step.output.timing = _with_finished(timing or last, last.finished)
                yield step

    def _own_output(self, prompt: Job, output: Output) -> Step:
        """Return an output made here in place of the engine, or its replay if another worker has sent it."""
        return Step(prompt, self._resumed.next()[1], told=True) if self._resumed else Step(prompt, output)

    async def _request_outputs(
        self, prompt: Job, ids: list[int], params: SamplingParams, choice: Choice
    ) -> AsyncGenerator[Step, None]:
        """Yield the outputs of one of the two engine requests: first the resumed ones, then new ones."""
        tokens = list[int]()
        while self._resumed and not choice.finished:
            _, output = self._resumed.next()
            tokens += output.tokens
            yield Step(prompt, output, told=True)
        if choice.finished:
            return
        source = self._source if ids is prompt.ids else None
        async with aclosing(self._submit(ids, params, (tuple(tokens),) if tokens else (), source=source)) as outputs:
            async for output in outputs:
                yield Step(prompt, output)


def _with_finished(timing: Timing | None, finished: float | None) -> Timing | None:
    return timing and replace(timing, finished=finished)
