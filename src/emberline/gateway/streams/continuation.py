"""Builds the request that continues a reply whose stream broke.

The text sent so far becomes the assistant's last message. A provider that cannot continue such a message gets a further
user message with the instruction to continue.
"""

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
_CONFIGS = ("generationConfig", "generation_config")  # objects that hold Gemini's limits
# Fields that refer to state at one provider, or that ask for more than text.
_BOUND = frozenset({"previous_response_id", "conversation", "background", "prompt", "modalities", "audio",
                    "web_search_options"})  # fmt: skip


def continuable(body: bytes, dialect: Spoken) -> Conversation | None:
    """Return the parsed request if another provider could continue its reply, else None.

    The reply must be a single text. Enforced JSON is excluded: a provider's grammar restarts with every request.
    """
    try:
        request = GRAMMARS[dialect].parse(decode(body, Json))
    except InvalidRequest:
        return None  # the provider reports the error
    has_json_format = request.response_format is not None and request.response_format.kind != "text"
    has_many_outputs = (request.n or 1) > 1 or request.logprobs is not None
    is_provider_bound = any(isinstance(tool, Opaque) for tool in request.tools) or bool(_BOUND & request.extra.keys())
    ends_with_assistant = not request.messages or request.messages[-1].role == "assistant"
    return None if has_json_format or has_many_outputs or is_provider_bound or ends_with_assistant else request


def continuable_outline(body: bytes, dialect: Spoken) -> Conversation | None:
    """Return the result of `parse_continuable` without messages and tools, which may be large."""
    if (request := continuable(body, dialect)) is None:
        return None
    return Conversation(request.dialect, request.model, reasoning=request.reasoning)


def claude_goes_on(model: str, request: Conversation) -> bool:
    """Return whether the model continues a final assistant message: Claude before 4.6, without thinking."""
    claude = Recipient(model).claude
    return claude is not None and claude < (4, 6) and request.reasoning is None


def continued(body: bytes, request: Conversation, sent_text: str, prefill: Prefill) -> bytes:
    """Return the request body that continues the reply after `sent_text`.

    Trailing whitespace of the text is dropped, because some providers reject it.
    """
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
    """Reduce the token limits of `config` by `tokens`, to no less than `minimum`."""
    for name in _LIMITS:
        if isinstance(limit := config.get(name), int):
            config[name] = min(limit, max(limit - tokens, minimum))
