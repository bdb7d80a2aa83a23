"""Cerebras."""

from __future__ import annotations

from emberline.gateway.providers.chatty import Chatty


class Cerebras(Chatty):
    slug = "cerebras"
    base_url = "https://api.cerebras.ai/v1"
    max_tokens_name = "max_completion_tokens"
    refuses = frozenset({"frequency_penalty", "presence_penalty", "logit_bias", "parallel_tool_calls", "service_tier"})
