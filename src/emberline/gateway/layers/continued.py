"""ContinuationLayer: lets another provider continue a stream that broke off.

It is enabled by the header `x-emberline-continue` or the gateway's setting `continuation`. The next steps are tried; if
there is none, the same provider once more. A stream that is not a single text that a model can continue passes
unchanged."""

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
            requested = call.options.continuation
            if call.stream and (call.settings.continuation if requested is None else requested):
                return handle_stream(call)
            return inner(call)

        async def handle_stream(call: Call) -> Reply:
            dialect = next((each for each in TALK if each == call.dialect), None)
            conversation = await _continuable(call, dialect) if dialect is not None and _open(call) else None
            reply = await inner(call)
            if conversation is None or isinstance(reply.body, bytes):
                return reply
            steps = list(enumerate(call.steps or steps_of(call)))
            rest = steps[reply.step + 1 :]
            continuation = _Onward(call, conversation, rest or steps[-1:], not rest, self._attempts, self._registry)
            return Spliced(call, conversation.dialect, reply, continuation.ask).reply

        return handle


async def _continuable(call: Call, dialect: Spoken) -> Conversation | None:
    """Return the call's conversation if its stream can be continued, else None.

    A large body is read in another process, and the result then has no messages. If that takes too long, the stream is
    not continued.
    """
    if len(call.body) < LARGE:
        return continuable(call.body, dialect)
    try:
        return await offload.run(len(call.body), continuable_outline, call.body, dialect)
    except WorkTooLarge:
        return None


def _open(call: Call) -> bool:
    """Return whether the text so far may be sent to another provider.

    It may not if guardrails check prompts, because they have not checked this text, or if steps have their own bodies,
    because they ask something else.
    """
    rules = call.settings.guardrails
    guarded = any(rule.looks_at("prompt") for rule in rules.patterns) or any(j.asked("prompt") for j in rules.judges)
    return not guarded and all(step.body is None for step in call.steps)


@dataclass(slots=True)
class _Onward:
    call: Call
    asked: Conversation
    ahead: list[tuple[int, Step]]
    again: bool  # the remaining step is the one that broke
    attempts: Handler
    registry: Registry

    async def ask(self, said: str, broken: Reply) -> tuple[Reply, Seam] | None:
        """Return a reply that continues the text, and the seam to join it at, or None if no step can."""
        attempts = self.call.options.max_attempts or self.call.settings.retries.attempts
        if self.again and (attempts == 1 or broken.error == TimedOut.code):  # no retry of a provider that timed out
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
        configured = call.settings.providers.get(call.provider)
        own = provider.prefill if configured is None or configured.prefill is None else configured.prefill
        if dialect == "anthropic":
            return "bare" if own or claude_goes_on(call.model, self.asked) else ""
        return own if dialect == "openai-chat" else ""
