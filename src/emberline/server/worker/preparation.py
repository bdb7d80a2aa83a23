"""CallPreparer: converts a call to a PreparedCall: its messages to tokens, its tools and formats to a grammar."""

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
        self._prompt_builder = prompts
        self._grammar_guard = guard
        self._tool_style = tool_style
        self._reasoning = reasoning
        self._eos_token_ids = ends

    async def order(self, call: ChatCall | CompletionCall, reply_id: str, created: int) -> Order:
        return await (
            self._prepare_chat(call, reply_id, created)
            if isinstance(call, ChatCall)
            else self._prepare_completion(call)
        )

    async def _prepare_chat(self, call: ChatCall, reply_id: str, created: int) -> Order:
        text = await self._prompt_builder.rendered(call, created)
        ids = await self._prompt_builder.encode(text, add_special=call.add_special_tokens, param="messages")
        ids = self._prompt_builder.truncated(ids, call)
        self._prompt_builder.check_length(ids, "messages")
        style = self._tool_style if call.tools and call.tool_choice.mode != "none" else None
        opened = self._reasoning is not None and self._reasoning.opened_by(text)
        call = replace(call, params=self._prompt_builder.forbidding(call))
        params = await self._constrain(call, style, opened)

        def make_parser(index: int) -> Splitter | None:
            if style is None and self._reasoning is None:
                return None
            return Splitter(index, _call_ids(reply_id, index), style, self._reasoning, inside=opened)

        budget = None
        if call.thinking_budget is not None and self._prompt_builder.closing:
            after = await self._constrain(call, style, opened, closed=True)
            budget = Budget(call.thinking_budget, self._prompt_builder.closing, after)
        prompt = Job(ids, 0, params.prompt_logprobs is not None, budget)
        kept = frozenset(self._special_markers(style).values())
        reading = (
            make_parser,
            kept,
            call.continue_last,
            call.running_usage,
            call.return_token_ids,
            self._eos_token_ids,
        )
        return Order([prompt], params, call.caller, *reading)

    async def _prepare_completion(self, call: CompletionCall) -> Order:
        prompts = []
        for i, text in enumerate(call.prompts):
            ids = await self._prompt_builder.encode(text, add_special=call.add_special_tokens, param="prompt")
            ids = self._prompt_builder.truncated(ids, call)
            self._prompt_builder.check_length(ids, "prompt")
            prompts.append(Job(ids, i * call.params.n, call.echo or call.params.prompt_logprobs is not None))
        params = self._prompt_builder.forbidding(call)
        if params.grammar is not None:
            await asyncio.to_thread(self._grammar_guard.check, params.grammar)
        kept = frozenset(self._special_markers(None).values())
        reading = (kept, True, call.running_usage, call.return_token_ids, self._eos_token_ids)
        return Order(prompts, params, call.caller, lambda index: None, *reading)

    async def _constrain(
        self, call: ChatCall, style: ToolStyle | None, opened: bool, closed: bool = False
    ) -> SamplingParams:
        """Return the parameters with the grammar for the format and the tools.

        `opened`, `closed`: whether the prompt opens or closes the reasoning.
        """
        special = self._special_markers(style)
        grammar: Grammar | None = call.params.grammar
        param = "response_format"
        if style is not None:
            # The reply either has the requested format or consists of tool calls.
            allows_format = grammar is not None and call.tool_choice.mode == "auto"
            choice = ToolChoice("required") if allows_format else call.tool_choice
            tool_grammar = tools.grammar_for(call.tools, choice, style, call.parallel_tool_calls, special)
            if tool_grammar is not None:
                grammar = either(tool_grammar, grammar) if allows_format and grammar is not None else tool_grammar
                param = "tools"
        if grammar is None:
            return call.params
        if self._reasoning is not None:
            grammar = (
                thinking.answered(grammar) if closed else thinking.reasoned(grammar, self._reasoning, opened, special)
            )
        await asyncio.to_thread(self._grammar_guard.check, grammar, param)
        return replace(call.params, grammar=grammar)

    def _special_markers(self, style: ToolStyle | None) -> dict[str, int]:
        """Return the ids of the markers that are special tokens: the detokenizer keeps them, grammars refer to them."""
        tokenizer = self._prompt_builder.tokenizer
        markers = (*(style.markers if style else ()), *(self._reasoning.markers if self._reasoning else ()))
        ids = {marker: tokenizer.token_id(marker) for marker in markers}
        return {marker: id_ for marker, id_ in ids.items() if id_ is not None}


def _call_ids(reply_id: str, index: int) -> Callable[[], str]:
    """Return a generator of tool call ids that depend on the reply only, so that another worker makes the same."""
    numbers = count()
    return lambda: sha256(f"{reply_id}/{index}/{next(numbers)}".encode()).hexdigest()[:24]
