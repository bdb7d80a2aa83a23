from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from emberline.gateway.core.request import Dialect
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.inference_paths import OPENAI_FAMILIES, OPENAI_INFERENCE, InferencePaths


class OpenAI(Provider):
    slug = "openai"
    base_url = "https://api.openai.com/v1"
    paths: ClassVar[Mapping[Dialect, str]] = {
        "openai-chat": "chat/completions",
        "openai-responses": "responses",
        "openai-embeddings": "embeddings",
    }
    realtime_path = "realtime"
    unified_families = OPENAI_FAMILIES
    inference_paths = InferencePaths(OPENAI_INFERENCE)
    realtime_paths = InferencePaths(("realtime",))

    def normalize_endpoint(self, endpoint: str) -> str:
        return endpoint.removeprefix("v1/")

    def dialect_at(self, endpoint: str, query: str = "") -> Dialect:
        return super().dialect_at(self.normalize_endpoint(endpoint), query)

    def build_url(self, endpoint: str, query: str) -> str:
        """Return the URL. A version at the start of the path is dropped, because base_url contains it."""
        if self._base_url.endswith("/v1"):
            endpoint = endpoint.removeprefix("v1/")
        return super().build_url(endpoint, query)
