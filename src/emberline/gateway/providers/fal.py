"""fal: models for images, video and sound. A path is the name of a model."""

from __future__ import annotations

from emberline.gateway.providers.base import Provider


class Fal(Provider):
    slug = "fal"
    base_url = "https://fal.run"

    def model_in(self, endpoint: str) -> str:
        return endpoint

    def authorize(self, headers: dict[str, str], key: str) -> None:
        headers["authorization"] = f"Key {key}"
