"""Errand: one order on its way to the engine and back. What was said elsewhere comes first, as if it were new."""

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

AT_ONCE = 256  # groups gone through again before others have their turn


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
        """`merging`: outputs that wait to be read may be merged into one."""
        self._engine = engine
        self._order = order
        self._model = model
        self._max_context = max_context
        self._deadline = engine.now() + timeout
        self._token_timeout = token_timeout
        self._past = past
        self._source = source
        self._merging = merging

    def prefill(self) -> AsyncGenerator[Output, None]:
        """The next token, and where blocks can be had: of the prompt, and of what was said elsewhere. Where reasoning
        has a budget, the prompt's alone: what follows it may be two requests."""
        job = self._order.jobs[0]
        resumed = self._past.resumed([0]) if job.budget is None else ()
        return self._submit(job.ids, self._order.params, resumed, publish=True)

    def steps(self, choices: Sequence[Choice]) -> AsyncGenerator[Step, None]:
        """`choices` take each before the next is asked for. Leaving early, or an error, aborts everything."""
        job = self._order.jobs[0]
        return self._free(choices) if job.budget is None else self._within(job.budget, job, choices[0])

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
        caller, time_left = self._order.caller, max(0.0, self._deadline - self._engine.now())
        head = (uuid.uuid4().hex, ids, params, caller.priority, caller.salt, time_left, self._model)
        submission = Submission(*head, resumed, source, publish, self._token_timeout)
        return self._engine.submit(submission, merging=merging)

    async def _score(self, top: int) -> None:
        """Log-probabilities do not travel: they are computed again, as those of a prompt."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top)
        for index, said in self._past:
            ids = self._order.job_of(index).ids
            async with aclosing(self._submit([*ids, *said], params)) as outputs:
                async for output in outputs:
                    if output.error is not None:
                        raise output_error(output.error)
                    if output.prompt_logprobs is not None:
                        self._past.score(index, output.prompt_logprobs[len(ids) - 1 :])

    # -- jobs as they come ---------------------------------------------------------------------------------------------

    async def _free(self, choices: Sequence[Choice]) -> AsyncGenerator[Step, None]:
        gone, top = 0, self._order.params.logprobs
        if self._past and top is not None:
            await self._score(top)
        while self._past:
            index, output = self._past.next()
            job = self._order.job_of(index)
            output.index = index - job.first
            yield Step(job, output, told=True)
            gone += 1
            if gone % AT_ONCE == 0:
                await asyncio.sleep(0)
        unfinished = [job for job in self._order.jobs if not all(choices[i].finished for i in self._indices(job))]
        merging = self._merging and not any(choice.splits for choice in choices)
        if len(unfinished) == 1:  # without the tasks that several need: most requests, and a third of an event's cost
            async with aclosing(self._outputs(unfinished[0], merging)) as outputs:
                async for output in outputs:
                    yield Step(unfinished[0], output)
            return
        async with aclosing(self._together(unfinished, merging)) as steps:
            async for step in steps:
                yield step

    async def _together(self, jobs: Sequence[Job], merging: bool) -> AsyncGenerator[Step, None]:
        queue: asyncio.Queue[Step | BaseException | None] = asyncio.Queue()
        feeders = [asyncio.create_task(self._feed(job, queue, merging)) for job in jobs]
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

    def _outputs(self, job: Job, merging: bool) -> AsyncGenerator[Output, None]:
        resumed = self._past.resumed(self._indices(job))
        return self._submit(job.ids, self._order.params, resumed, source=self._source, merging=merging)

    async def _feed(self, job: Job, queue: asyncio.Queue[Step | BaseException | None], merging: bool) -> None:
        try:
            async with aclosing(self._outputs(job, merging)) as outputs:
                async for output in outputs:
                    queue.put_nowait(Step(job, output))
            queue.put_nowait(None)
        except BaseException as e:
            queue.put_nowait(e)
            if not isinstance(e, Exception):
                raise

    def _indices(self, job: Job) -> range:
        return range(job.first, job.first + self._order.params.n)

    # -- one job, whose reasoning has a budget -------------------------------------------------------------------------

    async def _within(self, budget: Budget, job: Job, choice: Choice) -> AsyncGenerator[Step, None]:
        """When the budget is spent, the closing marker comes as if the model had written it, and a second request takes
        the place of the first, in the same breath so that nobody gets in between, with what is left of its tokens and
        its time."""
        params = self._order.params
        said, timing = list[int](), None
        most = self._max_context - len(job.ids)
        most = most if params.max_tokens is None else min(most, params.max_tokens)
        async with aclosing(self._part(job, job.ids, params, choice)) as steps:
            async for step in steps:
                timing = timing or step.output.timing
                said += step.output.tokens
                yield step
                if step.output.finish is not None or not budget.spent(choice, said):
                    continue
                left = most - len(said) - len(budget.closing)
                if left < 1:  # nothing could follow the marker
                    ended = _until(timing, self._engine.now())
                    yield self._ours(job, Output(step.output.id, finish=FinishReason.LENGTH, timing=ended))
                    return
                said += budget.closing
                yield self._ours(job, Output(step.output.id, tokens=budget.closing))
                if not choice.finished:  # by a stop string in the marker
                    break
            else:
                return
        at_least = min(left, max(0, params.min_tokens - len(said)))
        after = replace(budget.after, max_tokens=left, min_tokens=at_least, prompt_logprobs=None)
        async with aclosing(self._part(job, [*job.ids, *said], after, choice)) as steps:
            async for step in steps:
                if (last := step.output.timing) is not None:
                    step.output.timing = _until(timing or last, last.finished)
                yield step

    def _ours(self, job: Job, output: Output) -> Step:
        """What we say in place of the engine, unless it has been said."""
        return Step(job, self._past.next()[1], told=True) if self._past else Step(job, output)

    async def _part(
        self, job: Job, ids: list[int], params: SamplingParams, choice: Choice
    ) -> AsyncGenerator[Step, None]:
        """One request of the two, from wherever it stands."""
        said = list[int]()
        while self._past and not choice.finished:
            _, output = self._past.next()
            said += output.tokens
            yield Step(job, output, told=True)
        if choice.finished:
            return
        source = self._source if ids is job.ids else None
        async with aclosing(self._submit(ids, params, (tuple(said),) if said else (), source=source)) as outputs:
            async for output in outputs:
                yield Step(job, output)


def _until(timing: Timing | None, finished: float | None) -> Timing | None:
    return timing and replace(timing, finished=finished)
