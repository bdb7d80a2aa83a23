"""Deepgram: speech to text, and text to speech."""

from __future__ import annotations

from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.inference_paths import InferencePaths, without_model_name


class Deepgram(Provider):
    slug = "deepgram"
    base_url = "https://api.deepgram.com"
    inference_paths = InferencePaths(without_model_name("v1/listen", "v1/speak", "v1/read"))
    realtime_paths = InferencePaths(without_model_name("v1/listen", "v1/speak"))

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        headers["authorization"] = f"Token {key}"
