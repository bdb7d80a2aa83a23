"""OpenRouter: many providers behind one API. It can report an error in the middle of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from emberline.gateway.core.request import Dialect
from emberline.gateway.core.request_body import BodyFields
from emberline.gateway.providers.chat_provider import ChatProvider


class OpenRouter(ChatProvider):
    slug = "openrouter"
    base_url = "https://openrouter.ai/api/v1"
    paths: ClassVar[Mapping[Dialect, str]] = {"openai-chat": "chat/completions", "openai-embeddings": "embeddings"}

    def other_models(self, fields: BodyFields) -> list[str]:
        """Return the models that OpenRouter tries if the first fails."""
        return [str(model) for model in fields.models] if isinstance(fields.models, list) else []
