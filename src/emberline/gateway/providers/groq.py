"""Groq: no logprobs, and no names in messages."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.gateway.call import Call
from emberline.gateway.providers.base import report
from emberline.gateway.providers.chatty import Chatty, decoded_field


class Groq(Chatty):
    slug = "groq"
    base_url = "https://api.groq.com/openai/v1"
    max_tokens_name = "max_completion_tokens"
    refuses = frozenset({"logprobs", "top_logprobs", "logit_bias"})

    def reword(self, fields: dict[str, Any], call: Call) -> None:
        if b'"name"' not in bytes(fields.get("messages", b"")):
            return
        messages = decoded_field(fields, "messages")
        named = [each for each in messages or () if isinstance(each, dict) and each.pop("name", None) is not None]
        if named:
            fields["messages"] = msgspec.Raw(msgspec.json.encode(messages))
            report(call, "messages[].name", f"{self.slug} does not accept it")
