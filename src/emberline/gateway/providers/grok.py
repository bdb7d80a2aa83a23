"""xAI's Grok. Its reasoning models reject penalties and stop sequences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from emberline.gateway.core.request import Dialect
from emberline.gateway.providers.chat_provider import ChatProvider
from emberline.gateway.providers.inference_paths import TEXT

_REASONING_MODEL = re.compile(r"grok-(3-mini|[4-9]|code)")


class Grok(ChatProvider):
    slug = "grok"
    base_url = "https://api.x.ai/v1"
    has_own_error_format = True
    unified_families = TEXT | {"images/generations", "images/edits", "files", "responses"}
    paths: ClassVar[Mapping[Dialect, str]] = {
        "openai-chat": "chat/completions",
        "openai-responses": "responses",
        "anthropic": "messages",
    }
    max_tokens_field = "max_completion_tokens"

    def unsupported_fields_for(self, model: str) -> frozenset[str]:
        if _REASONING_MODEL.match(model) and "non-reasoning" not in model:
            return frozenset({"presence_penalty", "frequency_penalty", "stop", "logit_bias"})
        return frozenset({"logit_bias"})
