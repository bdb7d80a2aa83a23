"""Parallel: research on the web, as chat and as tasks."""

from __future__ import annotations

from emberline.gateway.providers.chatty import Chatty


class Parallel(Chatty):
    slug = "parallel"
    base_url = "https://api.parallel.ai"

    def authorize(self, headers: dict[str, str], key: str) -> None:
        """Chat takes the one, everything else the other."""
        headers["authorization"] = f"Bearer {key}"
        headers["x-api-key"] = key

    def url(self, endpoint: str, query: str) -> str:
        if self.dialect_of(endpoint) == "openai-chat":
            endpoint = endpoint.removeprefix("v1/")
        return super().url(endpoint, query)
