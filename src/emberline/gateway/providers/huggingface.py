"""Hugging Face: chat through its router; a path that is a model's name runs that model."""

from __future__ import annotations

from emberline.gateway.providers.chatty import Chatty


class HuggingFace(Chatty):
    slug = "huggingface"
    base_url = "https://router.huggingface.co/v1"
    own_errors = True

    def model_in(self, endpoint: str) -> str:
        own = self.dialect_of(endpoint) == "raw" and not endpoint.startswith("v1/")
        return endpoint.removeprefix("models/") if own else ""

    def url(self, endpoint: str, query: str) -> str:
        if self.dialect_of(endpoint) != "raw" or endpoint.startswith("v1/"):
            return super().url(endpoint, query)
        root = self._base_url.removesuffix("/v1")
        return f"{root}/hf-inference/models/{endpoint.removeprefix('models/')}" + (f"?{query}" if query else "")
