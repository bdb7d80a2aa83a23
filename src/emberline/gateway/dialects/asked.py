"""Asked: what a reply must know of the request it answers, in the client's dialect."""

from __future__ import annotations

from dataclasses import dataclass, field

from emberline.api.parse import decode
from emberline.gateway.dialects.deltas import Opened
from emberline.gateway.dialects.inner import Answer, Json, Spoken

# What a response repeats of its request; the first three it always has.
_ECHOED = ("parallel_tool_calls", "tool_choice", "tools", "instructions", "max_output_tokens", "max_tool_calls",
           "metadata", "reasoning", "safety_identifier", "temperature", "text", "top_logprobs", "top_p", "truncation",
           "user")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    model: str = ""  # what the reply calls its model; "": what the provider does
    include_usage: bool = True  # chat's streams tell it only when asked
    echo: Json = field(default_factory=dict)  # what a Responses reply repeats
    created: int = 0  # seconds, for dialects that tell the time and providers that do not
    id: str = ""  # for providers that give none

    def name(self, reply: Answer | Opened) -> None:
        """What the client is told of a reply itself."""
        reply.id = reply.id or self.id
        reply.model = self.model or reply.model
        reply.created = reply.created or self.created


def asked_of(body: bytes, dialect: Spoken, *, model: str = "", created: int = 0, id: str = "") -> Asked:
    if dialect == "openai-chat":
        options = decode(body, Json).get("stream_options")
        include_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return Asked(model, include_usage, created=created, id=id)
    echo: Json = {}
    if dialect == "openai-responses":
        request = decode(body, Json)
        echo = {name: request[name] for name in _ECHOED if request.get(name) is not None}
    return Asked(model, True, echo, created, id)
