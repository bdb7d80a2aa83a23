"""fal: models for images, video and audio. The path is the model's name."""

from __future__ import annotations

from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.inference_paths import InferencePaths


class Fal(Provider):
    slug = "fal"
    base_url = "https://fal.run"
    inference_paths = InferencePaths(("{model...}",))

    def model_from_path(self, endpoint: str) -> str:
        return endpoint

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        headers["authorization"] = f"Key {key}"
