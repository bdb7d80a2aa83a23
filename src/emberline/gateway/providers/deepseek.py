"""DeepSeek: reasoning is sent back in the history, and JSON output has no schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from emberline.gateway.call import Call
from emberline.gateway.providers.base import report
from emberline.gateway.providers.chatty import Chatty, decoded_field

_DEVELOPER = msgspec.json.encode("developer")


class DeepSeek(Chatty):
    slug = "deepseek"
    base_url = "https://api.deepseek.com"
    takes_thoughts = True

    def __init__(
        self, base_url: str | None = None, headers: Mapping[str, str] | None = None, *, public: bool = False
    ) -> None:
        super().__init__(base_url, headers, public=public)
        self.prefill = "prefix" if self._base_url.endswith("/beta") else ""  # only the beta API supports it

    def reword(self, fields: dict[str, Any], call: Call) -> None:
        form = decoded_field(fields, "response_format")
        if isinstance(form, dict) and form.get("type") == "json_schema":
            fields["response_format"] = {"type": "json_object"}
            report(call, "response_format", f"{self.slug} supports JSON output, but no schema")
        if "messages" in fields and _DEVELOPER in bytes(fields["messages"]):
            messages = decoded_field(fields, "messages")
            for message in messages:
                if isinstance(message, dict) and message.get("role") == "developer":
                    message["role"] = "system"
            fields["messages"] = messages
