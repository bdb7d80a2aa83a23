"""DeepSeek: accepts earlier reasoning in the history. Its JSON output does not support schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from emberline.gateway.core.request import GatewayRequest
from emberline.gateway.providers.base import report_change
from emberline.gateway.providers.chat_provider import ChatProvider, decode_field

_DEVELOPER_ROLE_JSON = msgspec.json.encode("developer")


class DeepSeek(ChatProvider):
    slug = "deepseek"
    base_url = "https://api.deepseek.com"
    accepts_reasoning = True

    def __init__(
        self, base_url: str | None = None, headers: Mapping[str, str] | None = None, *, public_only: bool = False
    ) -> None:
        super().__init__(base_url, headers, public_only=public_only)
        self.prefill = "prefix" if self._base_url.endswith("/beta") else ""  # only the beta API supports it

    def adapt_fields(self, fields: dict[str, Any], call: GatewayRequest) -> None:
        response_format = decode_field(fields, "response_format")
        if isinstance(response_format, dict) and response_format.get("type") == "json_schema":
            fields["response_format"] = {"type": "json_object"}
            report_change(call, "response_format", f"{self.slug} supports JSON output, but no schema")
        if "messages" in fields and _DEVELOPER_ROLE_JSON in bytes(fields["messages"]):
            messages = decode_field(fields, "messages")
            for message in messages:
                if isinstance(message, dict) and message.get("role") == "developer":
                    message["role"] = "system"
            fields["messages"] = messages
