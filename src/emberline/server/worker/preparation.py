"""Preparation: a call becomes an order. Its messages become tokens, its tools and formats a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from itertools import count

from emberline.api import reasoning as thinking
from emberline.api import tools
from emberline.api.call import ChatCall, CompletionCall, ToolChoice
from emberline.api.lark import either
from emberline.api.reasoning import ReasoningStyle
from emberline.api.splitter import Splitter
from emberline.api.toolstyle import ToolStyle
from emberline.core.params import Grammar, SamplingParams
from emberline.engine.grammar_guard import GrammarGuard
from emberline.server.worker.order import Budget, Job, Order
from emberline.server.worker.prompts import Prompts


class Preparation:
    def __init__(
        self,
        prompts: Prompts,
        guard: GrammarGuard,
        tool_style: ToolStyle,
        reasoning: ReasoningStyle | None,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self._prompts = prompts
        self._guard = guard
        self._tool_style = tool_style
        self._reasoning = reasoning
        self._ends = ends  # the model's end tokens

    async def order(self, call: ChatCall | CompletionCall, reply_id: str, created: int) -> Order:
        return await (self._chat(call, reply_id, created) if isinstance(call, ChatCall) else self._complete(call))

    async def _chat(self, call: ChatCall, reply_id: str, created: int) -> Order:
        text = await self._prompts.rendered(call, created)
        ids = await self._prompts.encode(text, add_special=call.add_special_tokens, param="messages")
        ids = self._prompts.truncated(ids, call)
        self._prompts.check_length(ids, "messages")
        style = self._tool_style if call.tools and call.tool_choice.mode != "none" else None
        opened = self._reasoning is not None and self._reasoning.opened_by(text)
        call = replace(call, params=self._prompts.forbidding(call))
        params = await self._constrain(call, style, opened)

        def splitter(index: int) -> Splitter | None:
            if style is None and self._reasoning is None:
                return None
            return Splitter(index, _call_ids(reply_id, index), style, self._reasoning, inside=opened)

        budget = None
        if call.thinking_budget is not None and self._prompts.closing:
            after = await self._constrain(call, style, opened, closed=True)
            budget = Budget(call.thinking_budget, self._prompts.closing, after)
        job = Job(ids, 0, params.prompt_logprobs is not None, budget)
        kept = frozenset(self._special_markers(style).values())
        how = (splitter, kept, call.continue_last, call.running_usage, call.return_token_ids, self._ends)
        return Order([job], params, call.caller, *how)

    async def _complete(self, call: CompletionCall) -> Order:
        jobs = []
        for i, prompt in enumerate(call.prompts):
            ids = await self._prompts.encode(prompt, add_special=call.add_special_tokens, param="prompt")
            ids = self._prompts.truncated(ids, call)
            self._prompts.check_length(ids, "prompt")
            jobs.append(Job(ids, i * call.params.n, call.echo or call.params.prompt_logprobs is not None))
        params = self._prompts.forbidding(call)
        if params.grammar is not None:
            await asyncio.to_thread(self._guard.check, params.grammar)
        kept = frozenset(self._special_markers(None).values())
        how = (kept, True, call.running_usage, call.return_token_ids, self._ends)
        return Order(jobs, params, call.caller, lambda index: None, *how)

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
        tokenizer = self._prompts.tokenizer
        markers = (*(style.markers if style else ()), *(self._reasoning.markers if self._reasoning else ()))
        ids = {marker: tokenizer.token_id(marker) for marker in markers}
        return {marker: id_ for marker, id_ in ids.items() if id_ is not None}


def _call_ids(reply_id: str, index: int) -> Callable[[], str]:
    """Of one choice's calls, one after the other: the same wherever the reply goes on."""
    numbers = count()
    return lambda: sha256(f"{reply_id}/{index}/{next(numbers)}".encode()).hexdigest()[:24]
