"""Hugging Face: chat through its inference router. A path that is a model's name runs that model."""

from __future__ import annotations

from emberline.gateway.providers.chat_provider import ChatProvider
from emberline.gateway.providers.inference_paths import OPENAI_INFERENCE, InferencePaths

CHAT_PATH = "chat/completions"


class HuggingFaceProvider(ChatProvider):
    slug = "huggingface"
    base_url = "https://router.huggingface.co/v1"
    inference_paths = InferencePaths((*OPENAI_INFERENCE, "models/{model...}"))
    has_own_error_format = True

    def normalize_endpoint(self, endpoint: str) -> str:
        if _is_model_path(endpoint):
            return f"models/{endpoint.removeprefix('models/')}"
        return super().normalize_endpoint(endpoint)

    def model_from_path(self, endpoint: str) -> str:
        return endpoint.removeprefix("models/") if _is_model_path(endpoint) else ""

    def build_url(self, endpoint: str, query: str) -> str:
        if not _is_model_path(endpoint):
            return super().build_url(endpoint, query)
        root = self._base_url.removesuffix("/v1")
        return f"{root}/hf-inference/{self.normalize_endpoint(endpoint)}" + (f"?{query}" if query else "")


def _is_model_path(endpoint: str) -> bool:
    return not endpoint.startswith("v1/") and endpoint != CHAT_PATH
