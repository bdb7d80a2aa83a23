"""Ideogram: images."""

from __future__ import annotations

from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.inference_paths import InferencePaths, without_model_name


class Ideogram(Provider):
    slug = "ideogram"
    base_url = "https://api.ideogram.ai"
    inference_paths = InferencePaths(
        without_model_name("generate", "remix", "edit", "reframe", "describe", "v1/ideogram-v3/{}", "v1/{}/generate")
    )

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        headers["api-key"] = key
