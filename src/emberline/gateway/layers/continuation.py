"""ContinuationLayer: continues a broken stream at a different provider.

The header `x-emberline-continue` or the gateway's setting `continuation` enables it. The request's remaining steps are
tried. If no step remains, the same provider is tried once more. Only a stream with a single text is continued; all
other streams pass unchanged.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from emberline.core.errors import EmberlineError, WorkTooLarge
from emberline.core.offload import LARGE_INPUT_BYTES, offload
from emberline.gateway.core.assistant_prefill import AssistantPrefill
from emberline.gateway.core.errors import ProviderErrorReply, UpstreamTimeout
from emberline.gateway.core.request import GatewayReply, GatewayRequest, Handler, RequestStep
from emberline.gateway.dialects.canonical import CanonicalRequest
from emberline.gateway.dialects.reply_context import read_reply_context
from emberline.gateway.layers.fallbacks import call_for_step, fallback_steps
from emberline.gateway.providers.provider_call import CHAT_DIALECTS, choose_dialect
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.gateway.streams.continuation import (
    build_continuation,
    claude_accepts_prefill,
    parse_continuable_request,
    parse_continuable_request_outline,
)
from emberline.gateway.streams.continued_stream import ContinuedStream
from emberline.gateway.streams.repetition_filter import RepetitionFilter
from emberline.wire.deltas import ChatDialect
from emberline.wire.reply_context import ReplyContext


class ContinuationLayer:
    def __init__(self, retry_handler: Handler, registry: ProviderRegistry) -> None:
        self._retry_handler = retry_handler
        self._registry = registry

    def wrap(self, inner: Handler) -> Handler:
        def handle(call: GatewayRequest) -> Awaitable[GatewayReply]:
            requested = call.options.continuation
            if call.stream and (call.settings.continuation if requested is None else requested):
                return handle_stream(call)
            return inner(call)

        async def handle_stream(call: GatewayRequest) -> GatewayReply:
            dialect = next((each for each in CHAT_DIALECTS if each == call.dialect), None)
            conversation = (
                await _continuable_conversation(call, dialect)
                if dialect is not None and _may_be_continued(call)
                else None
            )
            context = None if conversation is None else await _read_context(call, conversation.dialect)
            reply = await inner(call)
            if conversation is None or context is None or isinstance(reply.body, bytes):
                return reply
            steps = list(enumerate(call.steps or fallback_steps(call)))
            rest = steps[reply.step_index + 1 :]
            continuation = _StreamContinuation(
                call, conversation, rest or steps[-1:], not rest, self._retry_handler, self._registry
            )
            return ContinuedStream(call, conversation.dialect, context, reply, continuation.continue_stream).reply

        return handle


async def _continuable_conversation(call: GatewayRequest, dialect: ChatDialect) -> CanonicalRequest | None:
    """Return the request's conversation if its stream can be continued, else None.

    A large body is read in a child process, and the result then contains no messages. If reading takes too long, the
    result is None.
    """
    if len(call.body) < LARGE_INPUT_BYTES:
        return parse_continuable_request(call.body, dialect)
    try:
        return await offload.run(len(call.body), parse_continuable_request_outline, call.body, dialect)
    except WorkTooLarge:
        return None


async def _read_context(call: GatewayRequest, dialect: ChatDialect) -> ReplyContext | None:
    """Return the fields of the request that its stream repeats. If reading takes too long, the result is None."""
    try:
        return await offload.run_inline_if_small(len(call.body), read_reply_context, call.body, dialect, id=call.id)
    except WorkTooLarge:
        return None


def _may_be_continued(call: GatewayRequest) -> bool:
    """Return whether the text received so far may be sent to a different provider.

    This is forbidden if guardrails check prompts, because they have not checked this text. It is also forbidden if
    steps have bodies of their own, because these may contain a different prompt.
    """
    rules = call.settings.guardrails
    guarded = any(rule.applies_to("prompt") for rule in rules.patterns) or any(
        judge.category_actions("prompt") for judge in rules.judges
    )
    return not guarded and all(step.body is None for step in call.steps)


@dataclass(slots=True)
class _StreamContinuation:
    call: GatewayRequest
    conversation: CanonicalRequest
    remaining_steps: list[tuple[int, RequestStep]]
    is_same_provider: bool  # the remaining step is the one that broke
    retry_handler: Handler
    registry: ProviderRegistry

    async def continue_stream(
        self, text_so_far: str, broken_reply: GatewayReply
    ) -> tuple[GatewayReply, RepetitionFilter] | None:
        """Return a reply that continues the text, and a filter that removes repeated text.

        Return None if every step failed.
        """
        attempts = self.call.options.max_attempts or self.call.settings.retries.attempts
        timed_out = broken_reply.error == UpstreamTimeout.code  # such a provider is not tried again
        if self.is_same_provider and (attempts == 1 or timed_out):
            return None
        while self.remaining_steps:
            number, step = self.remaining_steps.pop(0)
            try:
                return await self._send_continuation(
                    call_for_step(self.call, step, number, not self.remaining_steps), text_so_far
                )
            except EmberlineError as e:
                if isinstance(e, ProviderErrorReply) and e.reason == "filtered":
                    return None
        return None

    async def _send_continuation(self, call: GatewayRequest, text_so_far: str) -> tuple[GatewayReply, RepetitionFilter]:
        prefill = self._prefill_mode(call) if text_so_far.strip() else ""
        body = await offload.run_inline_if_small(
            len(call.body), build_continuation, call.body, self.conversation, text_so_far, prefill
        )
        reply = await self.retry_handler(call.with_changes(body=body, prefill=prefill, body_summary=call.body_summary))
        return reply, RepetitionFilter(text_so_far, prefill)

    def _prefill_mode(self, call: GatewayRequest) -> AssistantPrefill:
        provider = self.registry.find_provider(call.provider, call.settings)
        dialect = choose_dialect(call, provider)
        configured = call.settings.providers.get(call.provider)
        own = provider.prefill if configured is None or configured.prefill is None else configured.prefill
        if dialect == "anthropic":
            return "bare" if own or claude_accepts_prefill(call.model, self.conversation) else ""
        return own if dialect == "openai-chat" else ""
