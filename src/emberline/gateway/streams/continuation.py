"""Builds the request that continues a reply whose stream broke.

The text that the client already received becomes the assistant's last message. For a provider that cannot continue an
assistant message (no assistant prefill), a user message with the instruction to continue is added.
"""

from __future__ import annotations

import msgspec

from emberline.api.parse import decode
from emberline.core.errors import InvalidRequest
from emberline.gateway.core.assistant_prefill import AssistantPrefill
from emberline.gateway.dialects.canonical import CanonicalRequest, Json, OpaqueContent
from emberline.gateway.dialects.target_model import TargetModel
from emberline.gateway.dialects.translate import CODECS
from emberline.gateway.streams.meter import CHARACTERS_PER_TOKEN
from emberline.wire.deltas import ChatDialect

CONTINUE_INSTRUCTION = (
    "The connection broke in the middle of your last message. Go on with it exactly where it ends, in the middle of a"
    " word if need be. Repeat nothing of it, and do not mention the interruption."
)
_MESSAGE_FIELDS: dict[ChatDialect, str] = {
    "openai-chat": "messages",
    "anthropic": "messages",
    "openai-responses": "input",
    "gemini": "contents",
}
_MAX_TOKENS_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "maxOutputTokens")
_CONFIG_FIELDS = ("generationConfig", "generation_config")  # objects that hold Gemini's limits
# Fields that refer to state at one provider, or that ask for more than text.
_PROVIDER_BOUND_FIELDS = frozenset(
    {
        "previous_response_id",
        "conversation",
        "background",
        "prompt",
        "modalities",
        "audio",
        "web_search_options",
    }
)


def parse_continuable_request(body: bytes, dialect: ChatDialect) -> CanonicalRequest | None:
    """Return the parsed request if a different provider could continue its reply, else None.

    The request must ask for one text. JSON output cannot be continued: the provider's JSON grammar would start anew.
    """
    try:
        request = CODECS[dialect].parse_request(decode(body, Json))
    except InvalidRequest:
        return None  # the provider reports the error
    has_json_format = request.response_format is not None and request.response_format.kind != "text"
    has_many_outputs = (request.n or 1) > 1 or request.logprobs is not None
    is_provider_bound = any(isinstance(tool, OpaqueContent) for tool in request.tools) or bool(
        _PROVIDER_BOUND_FIELDS & request.extra.keys()
    )
    ends_with_assistant = not request.messages or request.messages[-1].role == "assistant"
    return None if has_json_format or has_many_outputs or is_provider_bound or ends_with_assistant else request


def parse_continuable_request_outline(body: bytes, dialect: ChatDialect) -> CanonicalRequest | None:
    """Return only the dialect, model and reasoning of a request whose reply can be continued.

    Return None if no other provider could continue the reply. The result is small, so a child process can return it.
    """
    if (request := parse_continuable_request(body, dialect)) is None:
        return None
    return CanonicalRequest(request.dialect, request.model, reasoning=request.reasoning)


def claude_accepts_prefill(model: str, request: CanonicalRequest) -> bool:
    """Return whether the model supports assistant prefill for this request.

    Only Claude models before 4.6 support it, and only if the request sets no reasoning options.
    """
    claude = TargetModel(model).claude_version
    return claude is not None and claude < (4, 6) and request.reasoning is None


def build_continuation(body: bytes, request: CanonicalRequest, sent_text: str, prefill: AssistantPrefill) -> bytes:
    """Return the request body that continues the reply after `sent_text`.

    Trailing whitespace of the text is dropped, because some providers reject it.
    """
    if not sent_text.strip():
        return body
    data = decode(body, Json)
    name, text = _MESSAGE_FIELDS[request.dialect], sent_text.rstrip()
    messages = data[name] if isinstance(data[name], list) else [{"role": "user", "content": data[name]}]
    new_messages = [("assistant", text)] if prefill else [("assistant", text), ("user", CONTINUE_INSTRUCTION)]
    data[name] = [*messages, *(_render_message(request.dialect, *each) for each in new_messages)]
    minimum = 1 + (request.reasoning.budget or 0 if request.reasoning else 0)
    for config in (data, *(data.get(name) for name in _CONFIG_FIELDS)):
        if isinstance(config, dict):
            _lower_token_limits(config, -(-len(sent_text) // CHARACTERS_PER_TOKEN), minimum)
    return msgspec.json.encode(data)


def _render_message(dialect: ChatDialect, role: str, text: str) -> Json:
    if dialect == "gemini":
        return {"role": "model" if role == "assistant" else role, "parts": [{"text": text}]}
    return {"role": role, "content": text}


def _lower_token_limits(config: Json, tokens: int, minimum: int) -> None:
    """Reduce the token limits of `config` by `tokens`, to no less than `minimum`."""
    for name in _MAX_TOKENS_FIELDS:
        if isinstance(limit := config.get(name), int):
            config[name] = min(limit, max(limit - tokens, minimum))
