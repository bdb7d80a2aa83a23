"""Generator: a call in, groups of deltas out. Between them is the engine, and what another worker has said before."""

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
        self._preparation = Preparation(prompts, guard, tool_style, reasoning, ends)
        self._metrics = metrics
        self._timeout = timeout
        self._token_timeout = token_timeout

    def ignored(self, call: Call) -> list[str]:
        """The fields that have no effect with this model. Raises InvalidRequest for those that should have had one."""
        return self.prompts.ignored(call) if isinstance(call, ChatCall) else []

    async def count(self, call: ChatCall) -> int:
        text = await self.prompts.rendered(call)
        return len(await self.prompts.encode(text, add_special=call.add_special_tokens, param="messages"))

    async def run(self, call: Call, journey: Journey) -> AsyncGenerator[Group, None]:
        order = await self._preparation.order(call, journey.id, journey.created)
        errand = self._errand(order, journey)
        chain = self._chain(order) if journey.chained else ""
        phases = self._phases(order, journey)
        groups = Groups(order, self.prompts.tokenizer, self._metrics, journey.handoff, phases)
        if journey.handoff.started and not journey.handoff.said:
            yield groups.opening()
        try:
            async with aclosing(errand.steps(groups.choices)) as steps:
                async for step in steps:
                    group = groups.take(step, self.engine.now())
                    choice = groups.choices[step.job.first + step.output.index]
                    if choice.stopped_early and not step.told:
                        choice.stopped_early = False
                        self.engine.abort_one(step.output.id, step.output.index)
                    if chain and not group.told:
                        group.chain, chain = chain, ""
                    if group.deltas or group.output:
                        yield group
        finally:
            if phases is not None:
                phases.close(self.engine.now())
        yield groups.ending()

    async def prefill(self, call: Call, journey: Journey) -> AsyncGenerator[Output, None]:
        """The prompt alone, for another worker to go on."""
        order = await self._preparation.order(call, journey.id, journey.created)
        job = order.jobs[0]
        if len(order.jobs) > 1 or order.params.n > 1 or job.echo:
            raise InvalidRequest("only one plain reply to one prompt can be begun here and go on elsewhere", param="n")
        self._metrics.asked(len(job.ids), 1, order.params.max_tokens)
        phases = self._phases(order, journey)
        try:
            async with aclosing(self._errand(order, journey).prefill()) as outputs:
                async for output in outputs:
                    if phases is not None:
                        phases.take(0, output)
                    if output.error is not None:
                        raise output_error(output.error)
                    if output.finish is not None:
                        self._metrics.began(len(job.ids), output.cached_tokens)
                        self._metrics.ended(output.finish.value, output.timing, len(output.tokens))
                    yield output
        finally:
            if phases is not None:
                phases.close(self.engine.now())

    def _phases(self, order: Order, journey: Journey) -> Phases | None:
        if journey.span is None:
            return None
        return Phases(journey.span, self.served_name, [len(job.ids) for job in order.jobs])

    def _chain(self, order: Order) -> str:
        """Where its first prompt ends, as the engine will name its blocks."""
        facts = self.engine.ready[self.served_name]
        end = last_full(root_hash(facts.layout, order.caller.salt), order.jobs[0].ids, facts.block_size)
        return f"{end[0].hex()} {end[1]}" if end is not None else ""

    def _errand(self, order: Order, journey: Journey) -> Errand:
        tokenizer, handoff = self.prompts.tokenizer, journey.handoff
        return Errand(
            self.engine,
            order,
            model=self.served_name,
            max_context=self.prompts.max_context,
            timeout=min(self._timeout, journey.timeout),
            token_timeout=self._token_timeout,
            past=Past(handoff.said, len(order.jobs) * order.params.n, tokenizer.vocab_size),
            source=handoff.source,
            merging=not journey.tracked,  # a router that moves a stream counts on one event for each token
        )
