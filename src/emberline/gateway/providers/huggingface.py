"""Hugging Face: chat through its inference router. A path that is a model's name runs that model."""

from __future__ import annotations

from emberline.gateway.providers.chat_provider import ChatProvider


class HuggingFaceProvider(ChatProvider):
    slug = "huggingface"
    base_url = "https://router.huggingface.co/v1"
    has_own_error_format = True

    def model_from_path(self, endpoint: str) -> str:
        is_model_path = self.dialect_at(endpoint) == "raw" and not endpoint.startswith("v1/")
        return endpoint.removeprefix("models/") if is_model_path else ""

    def build_url(self, endpoint: str, query: str) -> str:
        if self.dialect_at(endpoint) != "raw" or endpoint.startswith("v1/"):
            return super().build_url(endpoint, query)
        root = self._base_url.removesuffix("/v1")
        return f"{root}/hf-inference/models/{endpoint.removeprefix('models/')}" + (f"?{query}" if query else "")
