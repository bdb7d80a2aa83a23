"""Generator: a call in, deltas out. Prompts and grammars on the way in; text, tools and usage on the way back."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from emberline.api import reasoning as thinking
from emberline.api import tools
from emberline.api.call import Caller, ChatCall, CompletionCall, ToolChoice
from emberline.api.deltas import Delta, Progress, PromptDelta, Started, Usage
from emberline.api.lark import either
from emberline.api.reasoning import ReasoningStyle
from emberline.api.splitter import Splitter
from emberline.api.toolstyle import ToolStyle
from emberline.core.events import Output, Timing
from emberline.core.params import Grammar, SamplingParams
from emberline.core.plan import TokenLogprob
from emberline.core.request import FinishReason, Submission
from emberline.engine.grammar_guard import GrammarGuard
from emberline.engine.stream import AsyncEngine
from emberline.server.choice import Choice, token_info
from emberline.server.metrics import Metrics
from emberline.server.prompts import Prompts

MakeSplitter = Callable[[int], Splitter | None]


@dataclass(frozen=True, slots=True)
class Budget:
    """How long the reasoning may be, and how the reply goes on once it was closed for the model."""

    tokens: int
    closing: list[int]
    after: SamplingParams

    def spent(self, choice: Choice, said: list[int]) -> bool:
        """A marker that the model wrote itself may be held back still, as the beginning of a stop string."""
        closed = said[-len(self.closing) :] == self.closing
        return choice.thinking and choice.reasoning_tokens >= self.tokens and not closed


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and the choices it gets: [first, first + n)."""

    ids: list[int]
    first: int
    echo: bool = False
    budget: Budget | None = None  # then it is the only job, with one choice


def _cost(choices: Iterable[Choice]) -> tuple[int, int]:
    """Tokens of all choices so far, and how many of them were reasoning."""
    pairs = [(choice.num_tokens, choice.reasoning_tokens) for choice in choices]
    return sum(n for n, _ in pairs), sum(r for _, r in pairs)


def _until(timing: Timing | None, finished: float | None) -> Timing | None:
    return timing and replace(timing, finished=finished)


def _call_id() -> str:
    return uuid.uuid4().hex[:24]


class Generator:
    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Prompts,
        guard: GrammarGuard,
        metrics: Metrics,
        *,
        served_name: str,
        tool_style: ToolStyle,
        reasoning: ReasoningStyle | None,
        timeout: float,
    ) -> None:
        self.engine = engine
        self.prompts = prompts
        self.served_name = served_name
        self._guard = guard
        self._metrics = metrics
        self._tool_style = tool_style
        self._reasoning = reasoning
        self._timeout = timeout

    async def count(self, call: ChatCall) -> int:
        text = self.prompts.render(call)
        return len(await self.prompts.encode(text, add_special=call.add_special_tokens, param="messages"))

    async def chat(self, call: ChatCall) -> AsyncGenerator[Delta, None]:
        text = self.prompts.render(call)
        ids = await self.prompts.encode(text, add_special=call.add_special_tokens, param="messages")
        self.prompts.check_length(ids, "messages")
        style = self._tool_style if call.tools and call.tool_choice.mode != "none" else None
        opened = self._reasoning is not None and self._reasoning.opened_by(text)
        params = await self._constrain(call, style, opened)

        def splitter(index: int) -> Splitter | None:
            if style is None and self._reasoning is None:
                return None
            return Splitter(index, _call_id, style, self._reasoning, inside=opened)

        budget = None
        if call.thinking_budget is not None:
            after = await self._constrain(call, style, opened, closed=True)
            budget = Budget(call.thinking_budget, self.prompts.closing, after)
        job = Job(ids, 0, params.prompt_logprobs is not None, budget)
        async with aclosing(self._run([job], params, call, splitter, style)) as deltas:
            async for delta in deltas:
                yield delta

    async def complete(self, call: CompletionCall) -> AsyncGenerator[Delta, None]:
        jobs = []
        for i, prompt in enumerate(call.prompts):
            ids = await self.prompts.encode(prompt, add_special=call.add_special_tokens, param="prompt")
            self.prompts.check_length(ids, "prompt")
            jobs.append(Job(ids, i * call.params.n, call.echo or call.params.prompt_logprobs is not None))
        if call.params.grammar is not None:
            await asyncio.to_thread(self._guard.check, call.params.grammar)
        async with aclosing(self._run(jobs, call.params, call, lambda index: None, None)) as deltas:
            async for delta in deltas:
                yield delta

    # -- the way to the engine --------------------------------------------------------------------------------------

    async def _constrain(
        self, call: ChatCall, style: ToolStyle | None, opened: bool, closed: bool = False
    ) -> SamplingParams:
        """`opened`, `closed`: what the prompt does with the reasoning."""
        special = self._special_markers(style)
        grammar: Grammar | None = call.params.grammar
        param = "response_format"
        if style is not None:
            free = grammar is not None and call.tool_choice.mode == "auto"  # then a reply of that form, or calls
            choice = ToolChoice("required") if free else call.tool_choice
            held = tools.grammar_for(call.tools, choice, style, call.parallel_tool_calls, special)
            if held is not None:
                grammar, param = either(held, grammar) if free and grammar is not None else held, "tools"
        if grammar is None:
            return call.params
        if self._reasoning is not None:
            grammar = (
                thinking.answered(grammar) if closed else thinking.reasoned(grammar, self._reasoning, opened, special)
            )
        await asyncio.to_thread(self._guard.check, grammar, param)
        return replace(call.params, grammar=grammar)

    def _special_markers(self, style: ToolStyle | None) -> dict[str, int]:
        """The ids of those markers that are tokens of their own: the detokenizer keeps them, grammars name them."""
        tokenizer = self.prompts.tokenizer
        markers = (*(style.markers if style else ()), *(self._reasoning.markers if self._reasoning else ()))
        ids = {marker: tokenizer.token_id(marker) for marker in markers}
        return {marker: id_ for marker, id_ in ids.items() if id_ is not None}

    async def _outputs(
        self, jobs: Sequence[Job], params: SamplingParams, caller: Caller
    ) -> AsyncGenerator[tuple[Job, Output], None]:
        """The outputs of all jobs as they come. Leaving early, or an error in one, aborts them all."""
        queue: asyncio.Queue[tuple[Job, Output] | BaseException | None] = asyncio.Queue()

        async def feed(job: Job) -> None:
            try:
                async with aclosing(self._submit(job.ids, params, caller, self._timeout)) as outputs:
                    async for output in outputs:
                        queue.put_nowait((job, output))
                queue.put_nowait(None)
            except BaseException as e:
                queue.put_nowait(e)
                if not isinstance(e, Exception):
                    raise

        feeders = [asyncio.create_task(feed(job)) for job in jobs]
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

    def _submit(
        self, ids: list[int], params: SamplingParams, caller: Caller, timeout: float
    ) -> AsyncGenerator[Output, None]:
        return self.engine.submit(
            Submission(uuid.uuid4().hex, ids, params, caller.priority, caller.salt, max(0.0, timeout), self.served_name)
        )

    async def _outputs_within(
        self, budget: Budget, job: Job, params: SamplingParams, caller: Caller, choice: Choice
    ) -> AsyncGenerator[tuple[Job, Output], None]:
        """The outputs of a job whose reasoning has a budget; `choice` takes each before the next. When the budget is
        spent, the closing marker comes as if the model had written it, and a second request takes the place of the
        first, in the same breath so that nobody gets in between, with what is left of its tokens and its time."""
        began, said, timing = self.engine.now(), list[int](), None
        most = self.prompts.max_context - len(job.ids)
        most = most if params.max_tokens is None else min(most, params.max_tokens)
        async with aclosing(self._submit(job.ids, params, caller, self._timeout)) as outputs:
            async for output in outputs:
                timing = timing or output.timing
                said += output.tokens
                yield job, output
                if output.finish is not None or not budget.spent(choice, said):
                    continue
                left = most - len(said) - len(budget.closing)
                if left < 1:  # nothing could follow the marker
                    yield job, Output(output.id, finish=FinishReason.LENGTH, timing=_until(timing, self.engine.now()))
                    return
                said += budget.closing
                yield job, Output(output.id, tokens=budget.closing)
                if not choice.finished:  # by a stop string in the marker
                    break
            else:
                return
        at_least = min(left, max(0, params.min_tokens - len(said)))
        after = replace(budget.after, max_tokens=left, min_tokens=at_least, prompt_logprobs=None)
        time_left = self._timeout - (self.engine.now() - began)
        async with aclosing(self._submit([*job.ids, *said], after, caller, time_left)) as outputs:
            async for output in outputs:
                ended = output.timing.finished if output.timing else None
                yield job, replace(output, timing=_until(timing, ended))

    # -- the way back --------------------------------------------------------------------------------------------------

    async def _run(
        self,
        jobs: Sequence[Job],
        params: SamplingParams,
        call: ChatCall | CompletionCall,
        splitter: MakeSplitter,
        style: ToolStyle | None,
    ) -> AsyncGenerator[Delta, None]:
        kept = frozenset(self._special_markers(style).values())
        continuing = isinstance(call, CompletionCall) or call.continue_last
        choices: dict[int, Choice] = {}
        prompt_tokens = sum(len(job.ids) for job in jobs)
        cached = 0
        for job in jobs:
            self._metrics.asked(len(job.ids), params.n, params.max_tokens)
            for index in range(job.first, job.first + params.n):
                choices[index] = Choice(
                    index, self.prompts.tokenizer, params, splitter(index), kept=kept, continuing=continuing
                )
        budget = jobs[0].budget
        source = (
            self._outputs(jobs, params, call.caller)
            if budget is None
            else self._outputs_within(budget, jobs[0], params, call.caller, choices[0])
        )
        async with aclosing(source) as outputs:
            first = True
            async for job, output in outputs:
                choice = choices[job.first + output.index]
                if choice.num_tokens == 0 and output.index == 0:
                    cached += output.cached_tokens
                    self._metrics.began(len(job.ids), output.cached_tokens)
                if first:
                    first = False
                    yield Started(prompt_tokens, cached)
                if job.echo and choice.num_tokens == 0 and output.tokens:
                    yield self._echoed(choice.index, job.ids, output.prompt_logprobs)
                pieces = choice.take(output)
                if call.running_usage:
                    yield Progress(*_cost(choices.values()))
                for delta in pieces:
                    yield delta
                if choice.stopped_early:
                    choice.stopped_early = False
                    self.engine.abort_one(output.id, output.index)
                self._measure(choice, output)
        tokens, reasoning_tokens = _cost(choices.values())
        yield Usage(prompt_tokens, tokens, cached, reasoning_tokens)

    def _measure(self, choice: Choice, output: Output) -> None:
        now = self.engine.now()
        if output.tokens:
            if choice.last_token is not None:
                self._metrics.itl.observe(now - choice.last_token)
            choice.last_token = now
        if output.finish is not None:
            reason = choice.reason or output.finish.value
            self._metrics.ended(reason, output.timing, choice.num_tokens)

    def _echoed(self, index: int, ids: list[int], logprobs: list[TokenLogprob] | None) -> PromptDelta:
        tokenizer = self.prompts.tokenizer
        text = tokenizer.decode(ids, skip_special=False)
        if logprobs is None:
            return PromptDelta(index, text)
        infos, offset = [], 0
        for token, logprob in zip(ids, [None, *logprobs], strict=True):
            infos.append(token_info(tokenizer, token, logprob, offset))
            offset += len(infos[-1].text)
        return PromptDelta(index, text, infos)
