"""Reads the request fields that affect how the reply is written, such as the model's name."""

from __future__ import annotations

from emberline.api.parse import decode
from emberline.gateway.dialects.canonical import Json
from emberline.wire.deltas import ChatDialect
from emberline.wire.reply_context import ReplyContext

# Request fields that a Responses reply repeats; the first three are always present.
_ECHOED_FIELDS = (
    "parallel_tool_calls",
    "tool_choice",
    "tools",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "reasoning",
    "safety_identifier",
    "temperature",
    "text",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
)


def read_reply_context(
    body: bytes, dialect: ChatDialect, *, model: str = "", created: int = 0, id: str = ""
) -> ReplyContext:
    if dialect == "openai-chat":
        options = decode(body, Json).get("stream_options")
        include_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return ReplyContext(model, include_usage, created=created, id=id)
    echoed_fields: Json = {}
    if dialect == "openai-responses":
        request = decode(body, Json)
        echoed_fields = {name: request[name] for name in _ECHOED_FIELDS if request.get(name) is not None}
    return ReplyContext(model, True, echoed_fields, created, id)
