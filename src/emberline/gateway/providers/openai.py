"""OpenAI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from emberline.gateway.call import Dialect
from emberline.gateway.providers.base import Provider


class OpenAI(Provider):
    slug = "openai"
    base_url = "https://api.openai.com/v1"
    paths: ClassVar[Mapping[Dialect, str]] = {
        "openai-chat": "chat/completions",
        "openai-responses": "responses",
        "openai-embeddings": "embeddings",
    }
    realtime = "realtime"
