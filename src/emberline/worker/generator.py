"""Generator: runs a call on the engine and yields groups of deltas."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

from emberline.api.call import ChatCall, CompletionCall
from emberline.api.reasoning import ReasoningStyle
from emberline.api.tool_style import ToolStyle
from emberline.core.errors import InvalidRequest
from emberline.core.events import Output
from emberline.engine.async_engine import AsyncEngine
from emberline.engine.grammar_guard import GrammarGuard
from emberline.server.metrics import ModelMetrics
from emberline.tokens.blockhash import last_full_block, root_hash
from emberline.worker.call_preparer import CallPreparer
from emberline.worker.choice import error_from_output
from emberline.worker.delta_assembler import DeltaAssembler, DeltaGroup
from emberline.worker.generation import Generation
from emberline.worker.phase_spans import PhaseSpans
from emberline.worker.prepared_call import PreparedCall
from emberline.worker.prompt_builder import PromptBuilder
from emberline.worker.request_context import RequestContext
from emberline.worker.resumed_output import ResumedOutput

Call = ChatCall | CompletionCall


class Generator:
    def __init__(
        self,
        engine: AsyncEngine,
        prompt_builder: PromptBuilder,
        guard: GrammarGuard,
        metrics: ModelMetrics,
        *,
        served_name: str,
        tool_style: ToolStyle,
        reasoning: ReasoningStyle | None,
        timeout: float = math.inf,
        token_timeout: float = 600.0,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.engine = engine
        self.prompt_builder = prompt_builder
        self.served_name = served_name
        self._preparer = CallPreparer(prompt_builder, guard, tool_style, reasoning, eos_token_ids)
        self._metrics = metrics
        self._timeout = timeout
        self._token_timeout = token_timeout

    def find_ignored_fields(self, call: Call) -> list[str]:
        """Return the request fields without effect on this model. Raises InvalidRequest for any but hints."""
        return self.prompt_builder.find_ignored_fields(call) if isinstance(call, ChatCall) else []

    async def count_prompt_tokens(self, call: ChatCall) -> int:
        text = await self.prompt_builder.render_off_loop(call)
        return len(await self.prompt_builder.encode(text, add_special=call.add_special_tokens, param="messages"))

    async def generate(self, call: Call, context: RequestContext) -> AsyncGenerator[DeltaGroup, None]:
        """Yield the reply as groups of deltas; closing the generator aborts the request."""
        prepared = await self._preparer.prepare(call, context.id, context.created)
        generation = self._generation(prepared, context)
        chain = self._last_block(prepared) if context.reports_chain else ""
        phase_spans = self._phase_spans(prepared, context)
        assembler = DeltaAssembler(prepared, self.prompt_builder.tokenizer, self._metrics, context.handoff, phase_spans)
        if context.handoff.started and not context.handoff.groups:
            yield assembler.replay_start()
        try:
            async with aclosing(generation.outputs(assembler.choices)) as prompt_outputs:
                async for prompt_output in prompt_outputs:
                    group = assembler.process_output(prompt_output, self.engine.now())
                    choice = assembler.choices[prompt_output.prompt.first_choice + prompt_output.output.index]
                    if choice.needs_engine_abort and not prompt_output.is_replayed:
                        choice.needs_engine_abort = False
                        self.engine.abort_completion(prompt_output.output.id, prompt_output.output.index)
                    if chain and not group.is_replayed:
                        group.chain, chain = chain, ""
                    if group.deltas or group.output:
                        yield group
        finally:
            if phase_spans is not None:
                phase_spans.close(self.engine.now())
        yield assembler.final_usage()

    async def prefill(self, call: Call, context: RequestContext) -> AsyncGenerator[Output, None]:
        """Compute the prompt only, for another worker that continues the request, and yield the engine's outputs."""
        prepared = await self._preparer.prepare(call, context.id, context.created)
        prompt = prepared.prompts[0]
        if len(prepared.prompts) > 1 or prepared.params.n > 1 or prompt.echo:
            given = f"{len(prepared.prompts)} prompts, n={prepared.params.n}, echo={prompt.echo}"
            raise InvalidRequest(f"a separate prefill takes one prompt, n=1 and no echo; got {given}", param="n")
        self._metrics.record_request(len(prompt.token_ids), 1, prepared.params.max_tokens)
        phase_spans = self._phase_spans(prepared, context)
        try:
            async with aclosing(self._generation(prepared, context).prefill_outputs()) as outputs:
                async for output in outputs:
                    if phase_spans is not None:
                        phase_spans.record_output(0, output)
                    if output.error is not None:
                        raise error_from_output(output.error)
                    if output.finish is not None:
                        self._metrics.record_admission(len(prompt.token_ids), output.cached_tokens)
                        self._metrics.record_completion(output.finish.value, output.timing, len(output.tokens))
                    yield output
        finally:
            if phase_spans is not None:
                phase_spans.close(self.engine.now())

    def _phase_spans(self, prepared: PreparedCall, context: RequestContext) -> PhaseSpans | None:
        if context.span is None:
            return None
        return PhaseSpans(context.span, self.served_name, [len(prompt.token_ids) for prompt in prepared.prompts])

    def _last_block(self, prepared: PreparedCall) -> str:
        """Return hash and number of the last full KV block of the first prompt, as the engine will compute them."""
        info = self.engine.model_info[self.served_name]
        end = last_full_block(
            root_hash(info.layout, prepared.common.cache_salt), prepared.prompts[0].token_ids, info.block_size
        )
        return f"{end[0].hex()} {end[1]}" if end is not None else ""

    def _generation(self, prepared: PreparedCall, context: RequestContext) -> Generation:
        tokenizer, handoff = self.prompt_builder.tokenizer, context.handoff
        return Generation(
            self.engine,
            prepared,
            model=self.served_name,
            max_context=self.prompt_builder.max_context,
            timeout=min(self._timeout, context.timeout),
            token_timeout=self._token_timeout,
            resumed=ResumedOutput(handoff.groups, len(prepared.prompts) * prepared.params.n, tokenizer.vocab_size),
            source=handoff.source,
            merges_outputs=not context.is_tracked,  # a router that may move the stream needs one event per token
        )
