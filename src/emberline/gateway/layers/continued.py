"""Continued: a layer that lets another place go on with a stream that broke off, where that is wished
(`x-emberline-continue`, or the gateway's `continuation`): the next steps, or where there are none the same place once
more. What is not one text that anybody could go on with passes as it is, and ends as it does."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from emberline.core.errors import EmberlineError, WorkTooLarge
from emberline.core.offload import LARGE, offload
from emberline.gateway.call import Call, Handler, Reply, Step
from emberline.gateway.dialects.inner import Conversation, Spoken
from emberline.gateway.dialects.prefill import Prefill
from emberline.gateway.errors import Refused, TimedOut
from emberline.gateway.layers.routed import at_step, steps_of
from emberline.gateway.providers.registry import Registry
from emberline.gateway.providers.wire import TALK, spoken_with
from emberline.gateway.streams.continuation import claude_goes_on, continuable, continuable_outline, continued
from emberline.gateway.streams.seam import Seam
from emberline.gateway.streams.spliced import Spliced


class Continued:
    def __init__(self, attempts: Handler, registry: Registry) -> None:
        self._attempts = attempts
        self._registry = registry

    def layer(self, inner: Handler) -> Handler:
        def handle(call: Call) -> Awaitable[Reply]:
            wished = call.options.continuation
            if call.stream and (call.settings.continuation if wished is None else wished):
                return watched(call)
            return inner(call)

        async def watched(call: Call) -> Reply:
            dialect = next((each for each in TALK if each == call.dialect), None)
            asked = await _continuable(call, dialect) if dialect is not None and _open(call) else None
            reply = await inner(call)
            if asked is None or isinstance(reply.body, bytes):
                return reply
            steps = list(enumerate(call.steps or steps_of(call)))
            rest = steps[reply.step + 1 :]
            onward = _Onward(call, asked, rest or steps[-1:], not rest, self._attempts, self._registry)
            return Spliced(call, asked.dialect, reply, onward.ask).reply

        return handle


async def _continuable(call: Call, dialect: Spoken) -> Conversation | None:
    """In another process, where the body is large; what comes back then has none of its messages. A body that takes
    too long to read passes, and its stream is not continued."""
    if len(call.body) < LARGE:
        return continuable(call.body, dialect)
    try:
        return await offload.run(len(call.body), continuable_outline, call.body, dialect)
    except WorkTooLarge:
        return None


def _open(call: Call) -> bool:
    """Whether others may be asked with what was said. Guardrails that look at prompts would not have seen it, and
    steps that have their own bodies ask something else."""
    rails = call.settings.guardrails
    guarded = any(rule.looks_at("prompt") for rule in rails.patterns) or any(j.asked("prompt") for j in rails.judges)
    return not guarded and all(step.body is None for step in call.steps)


@dataclass(slots=True)
class _Onward:
    call: Call
    asked: Conversation
    ahead: list[tuple[int, Step]]
    again: bool  # which is the one that broke
    attempts: Handler
    registry: Registry

    async def ask(self, said: str, broken: Reply) -> tuple[Reply, Seam] | None:
        tries = self.call.options.max_attempts or self.call.settings.retries.attempts
        if self.again and (tries == 1 or broken.error == TimedOut.code):  # who was silent is not asked again
            return None
        while self.ahead:
            number, step = self.ahead.pop(0)
            try:
                return await self._leg(at_step(self.call, step, number, not self.ahead), said)
            except EmberlineError as e:
                if isinstance(e, Refused) and e.kind == "filtered":
                    return None
        return None

    async def _leg(self, call: Call, said: str) -> tuple[Reply, Seam]:
        prefill = self._prefill(call) if said.strip() else ""
        body = await offload.run_by_size(len(call.body), continued, call.body, self.asked, said, prefill)
        reply = await self.attempts(call.moved(body=body, prefill=prefill, surveyed=call.surveyed))
        return reply, Seam(said, prefill)

    def _prefill(self, call: Call) -> Prefill:
        provider = self.registry.find(call.provider, call.settings)
        dialect = spoken_with(call, provider)
        given = call.settings.providers.get(call.provider)
        own = provider.prefill if given is None or given.prefill is None else given.prefill
        if dialect == "anthropic":
            return "bare" if own or claude_goes_on(call.model, self.asked) else ""
        return own if dialect == "openai-chat" else ""
