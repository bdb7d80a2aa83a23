"""xAI's Grok. Its reasoning models reject penalties and stop sequences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from emberline.gateway.call import Dialect
from emberline.gateway.providers.chatty import Chatty

_REASONS = re.compile(r"grok-(3-mini|[4-9]|code)")


class Grok(Chatty):
    slug = "grok"
    base_url = "https://api.x.ai/v1"
    own_errors = True
    paths: ClassVar[Mapping[Dialect, str]] = {
        "openai-chat": "chat/completions",
        "openai-responses": "responses",
        "anthropic": "messages",
    }
    max_tokens_name = "max_completion_tokens"

    def refused(self, model: str) -> frozenset[str]:
        if _REASONS.match(model) and "non-reasoning" not in model:
            return frozenset({"presence_penalty", "frequency_penalty", "stop", "logit_bias"})
        return frozenset({"logit_bias"})
