"""Parallel: web research, through a chat API and a task API."""

from __future__ import annotations

from emberline.gateway.providers.chat_provider import ChatProvider
from emberline.gateway.providers.inference_paths import OPENAI_INFERENCE, InferencePaths, without_model_name


class Parallel(ChatProvider):
    slug = "parallel"
    base_url = "https://api.parallel.ai"
    inference_paths = InferencePaths(
        (*OPENAI_INFERENCE, *without_model_name("search", "extract", "v1beta/search", "v1beta/extract"))
    )

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        """Send the key in two headers: the chat API reads authorization, the other APIs read x-api-key."""
        headers["authorization"] = f"Bearer {key}"
        headers["x-api-key"] = key

    def build_url(self, endpoint: str, query: str) -> str:
        if self.dialect_at(endpoint) == "openai-chat":
            endpoint = endpoint.removeprefix("v1/")
        return super().build_url(endpoint, query)
