"""CallPreparer: converts a parsed request to PreparedPrompts, which the engine can run.

PromptBuilder makes the tokens. CallPreparer adds the grammar for tools and response formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import count

from emberline.api import reasoning as reasoning_styles
from emberline.api import tools
from emberline.api.call import ChatCall, CompletionCall, ToolChoice
from emberline.api.lark import build_either_grammar
from emberline.api.output_parser import OutputParser
from emberline.api.parser_choice import make_output_parser
from emberline.api.reasoning import ReasoningStyle
from emberline.api.tool_styles.style import ToolStyle
from emberline.core.params import GrammarSpec, SamplingParams
from emberline.worker.grammar_checker import GrammarChecker
from emberline.worker.prepared_prompt import PreparedPrompt, ReasoningBudget
from emberline.worker.prompt_builder import PromptBuilder

PREDICTION_PARAM = "prediction.content"


class CallPreparer:
    def __init__(
        self,
        prompt_builder: PromptBuilder,
        grammar_checker: GrammarChecker,
        tool_style: ToolStyle,
        reasoning: ReasoningStyle | None,
        eos_token_ids: frozenset[int] = frozenset(),
        uses_predictions: bool = False,
    ) -> None:
        """`uses_predictions`: whether the engine drafts tokens, and can use the predictions of requests for that."""
        self._prompt_builder = prompt_builder
        self._grammar_checker = grammar_checker
        self._tool_style = tool_style
        self._reasoning = reasoning
        self._eos_token_ids = eos_token_ids
        self._uses_predictions = uses_predictions

    async def prepare(self, call: ChatCall | CompletionCall, reply_id: str, created: int) -> Sequence[PreparedPrompt]:
        """Return the prompts of the call. A chat has one, a text completion may have several."""
        if isinstance(call, ChatCall):
            return [await self._prepare_chat(call, reply_id, created)]
        return await self._prepare_completion(call)

    async def _prepare_chat(self, call: ChatCall, reply_id: str, created: int) -> PreparedPrompt:
        text = await self._prompt_builder.render_off_loop(call, created)
        ids = await self._encode(text, call, "messages", add_special=call.add_special_tokens)
        ids = self._prompt_builder.truncate(ids, call)
        self._prompt_builder.check_length(ids, "messages")
        style = self._tool_style if call.tools and call.tool_choice.mode != "none" else None
        opens_reasoning = self._reasoning is not None and self._reasoning.is_opened_by(text)
        call = replace(call, params=await self._prompt_builder.params_with_bad_words(call))
        params = await self._params_with_grammar(call, style, opens_reasoning)
        read_style = style.accepting_mistakes() if style is not None and params.grammar is None else style

        def make_parser(index: int) -> OutputParser | None:
            new_id = _make_tool_call_id_factory(reply_id, index)
            return make_output_parser(index, new_id, read_style, self._reasoning, opens_reasoning, call.tools)

        budget = None
        if call.thinking_budget is not None and self._prompt_builder.reasoning_end_tokens:
            after = await self._params_with_grammar(call, style, opens_reasoning, prompt_ends_after_reasoning=True)
            budget = ReasoningBudget(call.thinking_budget, self._prompt_builder.reasoning_end_tokens, after)
        return PreparedPrompt(
            token_ids=ids,
            params=params,
            echo=params.prompt_logprobs is not None,
            prediction=await self._encode_prediction(call),
            budget=budget,
            make_parser=make_parser,
            visible_special_tokens=frozenset(self._special_marker_ids(style).values()),
            continues_prompt=call.continues_last_message,
            return_token_ids=call.return_token_ids,
            eos_token_ids=self._eos_token_ids,
        )

    async def _encode_prediction(self, call: ChatCall) -> tuple[int, ...]:
        """Return the tokens of the call's prediction, or no tokens if the engine cannot use them."""
        if not (call.prediction and self._uses_predictions):
            return ()
        ids = await self._encode(call.prediction, call, PREDICTION_PARAM, add_special=False)
        self._prompt_builder.check_length(ids, PREDICTION_PARAM)
        return tuple(ids)

    async def _prepare_completion(self, call: CompletionCall) -> list[PreparedPrompt]:
        prompt_ids = []
        for text in call.prompts:
            ids = await self._encode(text, call, "prompt", add_special=call.add_special_tokens)
            ids = self._prompt_builder.truncate(ids, call)
            self._prompt_builder.check_length(ids, "prompt")
            prompt_ids.append(ids)
        params = await self._prompt_builder.params_with_bad_words(call)
        if params.grammar is not None:
            await self._grammar_checker.check(params.grammar, "response_format", call.common.tenant)
        markers = frozenset(self._special_marker_ids(None).values()) - self._eos_token_ids
        return [
            PreparedPrompt(
                token_ids=ids,
                params=params,
                first_choice=i * params.n,
                echo=call.echo or params.prompt_logprobs is not None,
                make_parser=lambda index: None,
                visible_special_tokens=markers,
                continues_prompt=True,
                return_token_ids=call.return_token_ids,
                eos_token_ids=self._eos_token_ids,
            )
            for i, ids in enumerate(prompt_ids)
        ]

    async def _encode(
        self, text: str | list[int], call: ChatCall | CompletionCall, param: str, *, add_special: bool
    ) -> list[int]:
        return await self._prompt_builder.encode(text, call.common.tenant, add_special=add_special, param=param)

    async def _params_with_grammar(
        self,
        call: ChatCall,
        style: ToolStyle | None,
        prompt_ends_in_reasoning: bool,
        prompt_ends_after_reasoning: bool = False,
    ) -> SamplingParams:
        """Return the sampling parameters with a grammar for the response format and the tools."""
        special = self._special_marker_ids(style)
        grammar: GrammarSpec | None = call.params.grammar
        if grammar is not None and self._reasoning is not None:
            grammar = reasoning_styles.frame_answer(grammar, self._reasoning, special)
        param = "response_format"
        if style is not None:
            # The reply either has the requested format or consists of tool calls.
            allows_format = grammar is not None and call.tool_choice.mode == "auto"
            choice = ToolChoice("required") if allows_format else call.tool_choice
            text_markers = self._reasoning.dropped_markers if self._reasoning else ()
            tool_grammar = tools.build_tool_call_grammar(
                call.tools, choice, style, call.parallel_tool_calls, special, text_markers
            )
            if tool_grammar is not None:
                grammar = (
                    build_either_grammar(tool_grammar, grammar)
                    if allows_format and grammar is not None
                    else tool_grammar
                )
                param = "tools"
        if grammar is None:
            return call.params
        if self._reasoning is not None:
            grammar = (
                reasoning_styles.constrain_answer(grammar)
                if prompt_ends_after_reasoning
                else reasoning_styles.constrain_after_reasoning(
                    grammar, self._reasoning, prompt_ends_in_reasoning, special
                )
            )
        await self._grammar_checker.check(grammar, param, call.common.tenant)
        return replace(call.params, grammar=grammar)

    def _special_marker_ids(self, style: ToolStyle | None) -> dict[str, int]:
        """Return the special tokens that mark tool calls and reasoning: their ids by marker text."""
        tokenizer = self._prompt_builder.tokenizer
        markers = (*(style.markers if style else ()), *(self._reasoning.markers if self._reasoning else ()))
        ids = {marker: tokenizer.token_id(marker) for marker in markers}
        return {marker: id_ for marker, id_ in ids.items() if id_ is not None}


def _make_tool_call_id_factory(reply_id: str, choice_index: int) -> Callable[[], str]:
    """Return a function that creates a new tool call id each time that it is called.

    The ids depend only on the reply's id and the index of the choice, so that a different worker creates the same ids.
    """
    numbers = count()
    return lambda: sha256(f"{reply_id}/{choice_index}/{next(numbers)}".encode()).hexdigest()[:24]
