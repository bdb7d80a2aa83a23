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
        asked = GRAMMARS[dialect].parse(decode(body, Json))
    except InvalidRequest:
        return None  # which is its provider's to say
    shaped = asked.response_format is not None and asked.response_format.kind != "text"
    several = (asked.n or 1) > 1 or asked.logprobs is not None
    foreign = any(isinstance(tool, Opaque) for tool in asked.tools) or bool(_BOUND & asked.extra.keys())
    begun = not asked.messages or asked.messages[-1].role == "assistant"
    return None if shaped or several or foreign or begun else asked


def continuable_outline(body: bytes, dialect: Spoken) -> Conversation | None:
    """As `continuable`, without what may be large: who continues takes the messages from the body again."""
    if (asked := continuable(body, dialect)) is None:
        return None
    return Conversation(asked.dialect, asked.model, reasoning=asked.reasoning)


def claude_goes_on(model: str, asked: Conversation) -> bool:
    """Those from 4.6 on refuse it, and all do while they think."""
    claude = Recipient(model).claude
    return claude is not None and claude < (4, 6) and asked.reasoning is None


def continued(body: bytes, asked: Conversation, said: str, prefill: Prefill) -> bytes:
    """The request, once more, after `said`. Space at its end is left out: some refuse it, and none needs it."""
    if not said.strip():
        return body
    whole = decode(body, Json)
    name, text = _TURNS[asked.dialect], said.rstrip()
    turns = whole[name] if isinstance(whole[name], list) else [{"role": "user", "content": whole[name]}]
    ours = [("assistant", text)] if prefill else [("assistant", text), ("user", GO_ON)]
    whole[name] = [*turns, *(_turn(asked.dialect, *each) for each in ours)]
    least = 1 + (asked.reasoning.budget or 0 if asked.reasoning else 0)
    for place in (whole, *(whole.get(config) for config in _CONFIGS)):
        if isinstance(place, dict):
            _lower(place, -(-len(said) // CHARACTERS), least)
    return msgspec.json.encode(whole)


def _turn(dialect: Spoken, role: str, text: str) -> Json:
    if dialect == "gemini":
        return {"role": "model" if role == "assistant" else role, "parts": [{"text": text}]}
    return {"role": role, "content": text}


def _lower(place: Json, tokens: int, least: int) -> None:
    """What may still be said, where there is a limit."""
    for name in _LIMITS:
        if isinstance(limit := place.get(name), int):
            place[name] = min(limit, max(limit - tokens, least))
