"""Generator: runs a call on the engine and yields groups of deltas."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

from emberline.api.call import ChatCall, CompletionCall
from emberline.api.reasoning import ReasoningStyle
from emberline.api.toolstyle import ToolStyle
from emberline.core.errors import InvalidRequest
from emberline.core.events import Output
from emberline.engine.grammar_guard import GrammarGuard
from emberline.engine.stream import AsyncEngine
from emberline.server.metrics import Metrics
from emberline.server.worker.choice import output_error
from emberline.server.worker.errand import Errand
from emberline.server.worker.groups import Group, Groups
from emberline.server.worker.journey import Journey
from emberline.server.worker.order import Order
from emberline.server.worker.past import Past
from emberline.server.worker.phases import Phases
from emberline.server.worker.preparation import Preparation
from emberline.server.worker.prompts import Prompts
from emberline.tokens.blockhash import last_full, root_hash

Call = ChatCall | CompletionCall


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
        timeout: float = math.inf,
        token_timeout: float = 600.0,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self.engine = engine
        self.prompts = prompts
        self.served_name = served_name
        self._preparer = Preparation(prompts, guard, tool_style, reasoning, ends)
        self._metrics = metrics
        self._timeout = timeout
        self._token_timeout = token_timeout

    def ignored(self, call: Call) -> list[str]:
        """Return the request fields without effect on this model. Raises InvalidRequest for any but hints."""
        return self.prompts.ignored(call) if isinstance(call, ChatCall) else []

    async def count(self, call: ChatCall) -> int:
        text = await self.prompts.rendered(call)
        return len(await self.prompts.encode(text, add_special=call.add_special_tokens, param="messages"))

    async def run(self, call: Call, journey: Journey) -> AsyncGenerator[Group, None]:
        """Yield the reply as groups of deltas; closing the generator aborts the request."""
        prepared = await self._preparer.order(call, journey.id, journey.created)
        generation = self._generation(prepared, journey)
        chain = self._last_block(prepared) if journey.chained else ""
        phase_spans = self._phase_spans(prepared, journey)
        assembler = Groups(prepared, self.prompts.tokenizer, self._metrics, journey.handoff, phase_spans)
        if journey.handoff.started and not journey.handoff.said:
            yield assembler.opening()
        try:
            async with aclosing(generation.steps(assembler.choices)) as steps:
                async for step in steps:
                    group = assembler.take(step, self.engine.now())
                    choice = assembler.choices[step.job.first + step.output.index]
                    if choice.stopped_early and not step.told:
                        choice.stopped_early = False
                        self.engine.abort_one(step.output.id, step.output.index)
                    if chain and not group.told:
                        group.chain, chain = chain, ""
                    if group.deltas or group.output:
                        yield group
        finally:
            if phase_spans is not None:
                phase_spans.close(self.engine.now())
        yield assembler.ending()

    async def prefill(self, call: Call, journey: Journey) -> AsyncGenerator[Output, None]:
        """Compute the prompt only, for another worker that continues the request, and yield the engine's outputs."""
        prepared = await self._preparer.order(call, journey.id, journey.created)
        prompt = prepared.jobs[0]
        if len(prepared.jobs) > 1 or prepared.params.n > 1 or prompt.echo:
            given = f"{len(prepared.jobs)} prompts, n={prepared.params.n}, echo={prompt.echo}"
            raise InvalidRequest(f"a separate prefill takes one prompt, n=1 and no echo; got {given}", param="n")
        self._metrics.asked(len(prompt.ids), 1, prepared.params.max_tokens)
        phase_spans = self._phase_spans(prepared, journey)
        try:
            async with aclosing(self._generation(prepared, journey).prefill()) as outputs:
                async for output in outputs:
                    if phase_spans is not None:
                        phase_spans.take(0, output)
                    if output.error is not None:
                        raise output_error(output.error)
                    if output.finish is not None:
                        self._metrics.began(len(prompt.ids), output.cached_tokens)
                        self._metrics.ended(output.finish.value, output.timing, len(output.tokens))
                    yield output
        finally:
            if phase_spans is not None:
                phase_spans.close(self.engine.now())

    def _phase_spans(self, prepared: Order, journey: Journey) -> Phases | None:
        if journey.span is None:
            return None
        return Phases(journey.span, self.served_name, [len(prompt.ids) for prompt in prepared.jobs])

    def _last_block(self, prepared: Order) -> str:
        """Return hash and number of the last full KV block of the first prompt, as the engine will compute them."""
        facts = self.engine.ready[self.served_name]
        end = last_full(root_hash(facts.layout, prepared.caller.salt), prepared.jobs[0].ids, facts.block_size)
        return f"{end[0].hex()} {end[1]}" if end is not None else ""

    def _generation(self, prepared: Order, journey: Journey) -> Errand:
        tokenizer, handoff = self.prompts.tokenizer, journey.handoff
        return Errand(
            self.engine,
            prepared,
            model=self.served_name,
            max_context=self.prompts.max_context,
            timeout=min(self._timeout, journey.timeout),
            token_timeout=self._token_timeout,
            past=Past(handoff.said, len(prepared.jobs) * prepared.params.n, tokenizer.vocab_size),
            source=handoff.source,
            merging=not journey.tracked,  # a router that may move the stream relies on one event for each token
        )
