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
from emberline.api.lark import match_either
from emberline.api.output_parser import OutputParser
from emberline.api.reasoning import ReasoningStyle
from emberline.api.tool_style import ToolStyle
from emberline.core.params import GrammarSpec, SamplingParams
from emberline.engine.grammar_guard import GrammarGuard
from emberline.worker.prepared_call import PreparedCall, PreparedPrompt, ReasoningBudget
from emberline.worker.prompt_builder import PromptBuilder


class CallPreparer:
    def __init__(
        self,
        prompt_builder: PromptBuilder,
        guard: GrammarGuard,
        tool_style: ToolStyle,
        reasoning: ReasoningStyle | None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._prompt_builder = prompt_builder
        self._grammar_guard = guard
        self._tool_style = tool_style
        self._reasoning = reasoning
        self._eos_token_ids = eos_token_ids

    async def prepare(self, call: ChatCall | CompletionCall, reply_id: str, created: int) -> PreparedCall:
        return await (
            self._prepare_chat(call, reply_id, created)
            if isinstance(call, ChatCall)
            else self._prepare_completion(call)
        )

    async def _prepare_chat(self, call: ChatCall, reply_id: str, created: int) -> PreparedCall:
        text = await self._prompt_builder.render_off_loop(call, created)
        ids = await self._prompt_builder.encode(text, add_special=call.add_special_tokens, param="messages")
        ids = self._prompt_builder.truncate(ids, call)
        self._prompt_builder.check_length(ids, "messages")
        style = self._tool_style if call.tools and call.tool_choice.mode != "none" else None
        opened = self._reasoning is not None and self._reasoning.is_opened_by(text)
        call = replace(call, params=self._prompt_builder.params_with_bad_words(call))
        params = await self._constrain(call, style, opened)

        def make_parser(index: int) -> OutputParser | None:
            if style is None and self._reasoning is None:
                return None
            return OutputParser(index, _call_ids(reply_id, index), style, self._reasoning, starts_in_reasoning=opened)

        budget = None
        if call.thinking_budget is not None and self._prompt_builder.reasoning_end_tokens:
            after = await self._constrain(call, style, opened, closed=True)
            budget = ReasoningBudget(call.thinking_budget, self._prompt_builder.reasoning_end_tokens, after)
        prompt = PreparedPrompt(ids, 0, params.prompt_logprobs is not None, budget)
        kept = frozenset(self._special_markers(style).values())
        reading = (
            make_parser,
            kept,
            call.continues_last_message,
            call.running_usage,
            call.return_token_ids,
            self._eos_token_ids,
        )
        return PreparedCall([prompt], params, call.common, *reading)

    async def _prepare_completion(self, call: CompletionCall) -> PreparedCall:
        prompts = []
        for i, text in enumerate(call.prompts):
            ids = await self._prompt_builder.encode(text, add_special=call.add_special_tokens, param="prompt")
            ids = self._prompt_builder.truncate(ids, call)
            self._prompt_builder.check_length(ids, "prompt")
            prompts.append(PreparedPrompt(ids, i * call.params.n, call.echo or call.params.prompt_logprobs is not None))
        params = self._prompt_builder.params_with_bad_words(call)
        if params.grammar is not None:
            await asyncio.to_thread(self._grammar_guard.check, params.grammar)
        kept = frozenset(self._special_markers(None).values())
        reading = (kept, True, call.running_usage, call.return_token_ids, self._eos_token_ids)
        return PreparedCall(prompts, params, call.common, lambda index: None, *reading)

    async def _constrain(
        self, call: ChatCall, style: ToolStyle | None, opened: bool, closed: bool = False
    ) -> SamplingParams:
        """Return the parameters with the grammar for the format and the tools.

        `opened`, `closed`: whether the prompt opens or closes the reasoning.
        """
        special = self._special_markers(style)
        grammar: GrammarSpec | None = call.params.grammar
        param = "response_format"
        if style is not None:
            # The reply either has the requested format or consists of tool calls.
            allows_format = grammar is not None and call.tool_choice.mode == "auto"
            choice = ToolChoice("required") if allows_format else call.tool_choice
            tool_grammar = tools.tool_call_grammar(call.tools, choice, style, call.parallel_tool_calls, special)
            if tool_grammar is not None:
                grammar = match_either(tool_grammar, grammar) if allows_format and grammar is not None else tool_grammar
                param = "tools"
        if grammar is None:
            return call.params
        if self._reasoning is not None:
            grammar = (
                thinking.constrain_answer(grammar)
                if closed
                else thinking.constrain_after_reasoning(grammar, self._reasoning, opened, special)
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
