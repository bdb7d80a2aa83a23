"""Generator: answers the requests for one model. It prepares each request's prompts and runs its Generation."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from emberline.api.call import ChatCall, CompletionCall
from emberline.api.reasoning import ReasoningStyle
from emberline.api.tool_styles.style import ToolStyle
from emberline.core.errors import InvalidRequest
from emberline.core.events import Output
from emberline.engine.async_engine import AsyncEngine
from emberline.server.metrics import ModelMetrics
from emberline.worker.generation import DeltaGroup, Generation
from emberline.worker.grammar_checker import GrammarChecker
from emberline.worker.preparation import CallPreparer
from emberline.worker.prepared_prompt import PreparedPrompt
from emberline.worker.prompt_builder import PromptBuilder
from emberline.worker.request_context import RequestContext

Call = ChatCall | CompletionCall


class Generator:
    def __init__(
        self,
        engine: AsyncEngine,
        prompt_builder: PromptBuilder,
        grammar_checker: GrammarChecker,
        metrics: ModelMetrics,
        *,
        served_name: str,
        tool_style: ToolStyle,
        reasoning: ReasoningStyle | None,
        timeout: float = math.inf,
        token_timeout: float = 600.0,
        eos_token_ids: frozenset[int] = frozenset(),
        speculates: bool = False,
    ) -> None:
        """`speculates`: whether the engine drafts tokens. Otherwise predictions have no effect."""
        self.engine = engine
        self.prompt_builder = prompt_builder
        self.served_name = served_name
        self._preparer = CallPreparer(prompt_builder, grammar_checker, tool_style, reasoning, eos_token_ids, speculates)
        self._speculates = speculates
        self._metrics = metrics
        self._timeout = timeout
        self._token_timeout = token_timeout

    def find_ignored_fields(self, call: Call) -> list[str]:
        """Return the names of request fields that have no effect on this model.

        Raises InvalidRequest for a field that may not be ignored, because the reply would mean something else without
        it.
        """
        if not isinstance(call, ChatCall):
            return []
        unused = ["prediction"] if call.prediction is not None and not self._speculates else []
        return [*unused, *self.prompt_builder.find_ignored_fields(call)]

    async def count_prompt_tokens(self, call: ChatCall) -> int:
        text = await self.prompt_builder.render_off_loop(call)
        ids = await self.prompt_builder.encode(
            text, call.common.tenant, add_special=call.add_special_tokens, param="messages"
        )
        return len(ids)

    async def generate(self, call: Call, context: RequestContext) -> AsyncGenerator[DeltaGroup, None]:
        """Yield the reply as groups of deltas. Closing the generator aborts the request."""
        prompts = await self._preparer.prepare(call, context.id, context.created)
        generation = self._start_generation(prompts, call, context)
        try:
            async with aclosing(generation.delta_groups()) as groups:
                async for group in groups:
                    yield group
        finally:
            generation.close_spans()
        yield generation.final_usage()

    async def prefill(self, call: Call, context: RequestContext) -> AsyncGenerator[Output, None]:
        """Compute only the prompt, for a different worker that generates the reply. Yield the engine's outputs."""
        prompts = await self._preparer.prepare(call, context.id, context.created)
        if len(prompts) > 1 or call.params.n > 1 or prompts[0].echo:
            given = f"{len(prompts)} prompts, n={call.params.n}, echo={prompts[0].echo}"
            raise InvalidRequest(
                f"a prefill-only request must have one prompt, n=1 and no echo; got {given}", param="n"
            )
        generation = self._start_generation(prompts, call, context)
        try:
            async with aclosing(generation.prefill()) as outputs:
                async for output in outputs:
                    yield output
        finally:
            generation.close_spans()

    def _start_generation(self, prompts: Sequence[PreparedPrompt], call: Call, context: RequestContext) -> Generation:
        return Generation(
            self.engine,
            prompts,
            call,
            context,
            tokenizer=self.prompt_builder.tokenizer,
            metrics=self._metrics,
            model=self.served_name,
            max_context=self.prompt_builder.max_context,
            timeout=min(self._timeout, context.timeout),
            token_timeout=self._token_timeout,
        )
