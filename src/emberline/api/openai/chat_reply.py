"""Makes the writer that renders a reply of the engine as a chat completion."""

from __future__ import annotations

from emberline.api.openai.chat import OpenAIChatCall
from emberline.core.request import Priority
from emberline.wire.chat import ChatWriter
from emberline.wire.chat_choice import EngineChatOptions
from emberline.wire.reply_context import ReplyContext


def make_writer(call: OpenAIChatCall, id: str, created: int, fingerprint: str) -> ChatWriter:
    tier = "flex" if call.common.priority is Priority.BATCH else "default"
    options = EngineChatOptions(
        head_fields={"system_fingerprint": fingerprint, "service_tier": tier},
        num_choices=call.params.n,
        running_usage=call.running_usage,
        has_logprobs=call.params.logprobs is not None,
        tokens_as_ids=call.tokens_as_ids,
        uses_legacy_functions=call.uses_legacy_functions,
        shows_reasoning=call.shows_reasoning,
        echoed_text=call.echoed_text,
        metadata=call.metadata,
    )
    context = ReplyContext(call.common.model, call.includes_usage, created=created, id=id)
    return ChatWriter(context, options, stream=call.stream)
