"""What rendering a reply in the client's wire format needs from the request that it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from emberline.api.parse import decode
from emberline.gateway.dialects.canonical import CanonicalReply, ChatDialect, Json
from emberline.gateway.dialects.deltas import StreamStart

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


@dataclass(frozen=True, slots=True)
class ReplyContext:
    model: str = ""  # model name of the reply; "": the provider's
    include_usage: bool = True  # whether a chat stream ends with its usage
    echoed_fields: Json = field(default_factory=dict)  # request fields that a Responses reply repeats
    created: int = 0  # Unix time in seconds, for replies of providers that send none
    id: str = ""  # reply id, for providers that send none

    def set_identity(self, reply: CanonicalReply | StreamStart) -> None:
        """Set the id, model and creation time that the client sees, where the provider sent none."""
        reply.id = reply.id or self.id
        reply.model = self.model or reply.model
        reply.created = reply.created or self.created


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
