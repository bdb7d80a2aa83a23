"""Continuation: a request that asks to go on where the answer to another broke off. What was said becomes the
assistant's last turn; who cannot begin its answer with that is told in a further turn what to do."""

from __future__ import annotations

import msgspec

from emberline.api.parse import decode
from emberline.core.errors import InvalidRequest
from emberline.gateway.dialects.inner import Conversation, Json, Opaque, Spoken
from emberline.gateway.dialects.prefill import Prefill
from emberline.gateway.dialects.recipient import Recipient
from emberline.gateway.dialects.translate import GRAMMARS
from emberline.gateway.streams.meter import CHARACTERS

GO_ON = (
    "The connection broke in the middle of your last message. Go on with it exactly where it ends, in the middle of a"
    " word if need be. Repeat nothing of it, and do not mention the interruption."
)
_TURNS: dict[Spoken, str] = {
    "openai-chat": "messages",
    "anthropic": "messages",
    "openai-responses": "input",
    "gemini": "contents",
}
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "maxOutputTokens")
_CONFIGS = ("generationConfig", "generation_config")  # where Gemini has them
# What only one provider knows the rest of, or what is more than text.
_BOUND = frozenset({"previous_response_id", "conversation", "background", "prompt", "modalities", "audio",
                    "web_search_options"})  # fmt: skip


def continuable(body: bytes, dialect: Spoken) -> Conversation | None:
    """The conversation, if its answer is one text that anybody could go on with. A form of JSON is kept by grammars,
    and those begin anew with every request."""
    try:
        request = GRAMMARS[dialect].parse(decode(body, Json))
    except InvalidRequest:
        return None  # which is its provider's to say
    has_json_format = request.response_format is not None and request.response_format.kind != "text"
    has_many_outputs = (request.n or 1) > 1 or request.logprobs is not None
    is_provider_bound = any(isinstance(tool, Opaque) for tool in request.tools) or bool(_BOUND & request.extra.keys())
    ends_with_assistant = not request.messages or request.messages[-1].role == "assistant"
    return None if has_json_format or has_many_outputs or is_provider_bound or ends_with_assistant else request


def continuable_outline(body: bytes, dialect: Spoken) -> Conversation | None:
    """As `continuable`, without what may be large: who continues takes the messages from the body again."""
    if (request := continuable(body, dialect)) is None:
        return None
    return Conversation(request.dialect, request.model, reasoning=request.reasoning)


def claude_goes_on(model: str, request: Conversation) -> bool:
    """Those from 4.6 on refuse it, and all do while they think."""
    claude = Recipient(model).claude
    return claude is not None and claude < (4, 6) and request.reasoning is None


def continued(body: bytes, request: Conversation, sent_text: str, prefill: Prefill) -> bytes:
    """The request, once more, after `said`. Space at its end is left out: some refuse it, and none needs it."""
    if not sent_text.strip():
        return body
    data = decode(body, Json)
    name, text = _TURNS[request.dialect], sent_text.rstrip()
    messages = data[name] if isinstance(data[name], list) else [{"role": "user", "content": data[name]}]
    new_messages = [("assistant", text)] if prefill else [("assistant", text), ("user", GO_ON)]
    data[name] = [*messages, *(_turn(request.dialect, *each) for each in new_messages)]
    minimum = 1 + (request.reasoning.budget or 0 if request.reasoning else 0)
    for config in (data, *(data.get(name) for name in _CONFIGS)):
        if isinstance(config, dict):
            _lower(config, -(-len(sent_text) // CHARACTERS), minimum)
    return msgspec.json.encode(data)


def _turn(dialect: Spoken, role: str, text: str) -> Json:
    if dialect == "gemini":
        return {"role": "model" if role == "assistant" else role, "parts": [{"text": text}]}
    return {"role": role, "content": text}


def _lower(config: Json, tokens: int, minimum: int) -> None:
    """What may still be said, where there is a limit."""
    for name in _LIMITS:
        if isinstance(limit := config.get(name), int):
            config[name] = min(limit, max(limit - tokens, minimum))
