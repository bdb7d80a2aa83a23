"""Groq: the chat API rejects logprobs, logit_bias, and names in messages."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.gateway.core.request import GatewayRequest
from emberline.gateway.providers.base import report_change
from emberline.gateway.providers.chat_provider import ChatProvider, decode_field
from emberline.gateway.providers.inference_paths import AUDIO, STORAGE, TEXT


class Groq(ChatProvider):
    slug = "groq"
    base_url = "https://api.groq.com/openai/v1"
    unified_families = AUDIO | STORAGE | TEXT
    max_tokens_field = "max_completion_tokens"
    unsupported_fields = frozenset({"logprobs", "top_logprobs", "logit_bias"})

    def adapt_fields(self, fields: dict[str, Any], call: GatewayRequest) -> None:
        if b'"name"' not in bytes(fields.get("messages", b"")):
            return
        messages = decode_field(fields, "messages")
        named = [
            message for message in messages or () if isinstance(message, dict) and message.pop("name", None) is not None
        ]
        if named:
            fields["messages"] = msgspec.Raw(msgspec.json.encode(messages))
            report_change(call, "messages[].name", f"{self.slug} does not accept it")
