"""Cerebras: the chat API rejects penalties, logit_bias, parallel_tool_calls and service_tier."""

from __future__ import annotations

from emberline.gateway.providers.chat_provider import ChatProvider
from emberline.gateway.providers.inference_paths import STORAGE, TEXT


class Cerebras(ChatProvider):
    slug = "cerebras"
    base_url = "https://api.cerebras.ai/v1"
    unified_families = STORAGE | TEXT
    max_tokens_field = "max_completion_tokens"
    unsupported_fields = frozenset(
        {"frequency_penalty", "presence_penalty", "logit_bias", "parallel_tool_calls", "service_tier"}
    )
