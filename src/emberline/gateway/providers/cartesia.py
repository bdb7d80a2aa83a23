"""Cartesia: speech. Clients name the API version in the header `cartesia-version`."""

from __future__ import annotations

from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.inference_paths import InferencePaths, without_model_name


class Cartesia(Provider):
    slug = "cartesia"
    base_url = "https://api.cartesia.ai"
    inference_paths = InferencePaths(
        without_model_name("tts/bytes", "tts/sse", "stt", "infill/bytes", "voice-changer/bytes")
    )
    realtime_paths = InferencePaths(without_model_name("tts/websocket", "stt/websocket"))

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        headers["x-api-key"] = key
