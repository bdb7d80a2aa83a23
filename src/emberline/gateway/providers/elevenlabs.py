"""ElevenLabs: speech. The key is sent in xi-api-key."""

from __future__ import annotations

from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.inference_paths import InferencePaths, without_model_name


class ElevenLabs(Provider):
    slug = "elevenlabs"
    base_url = "https://api.elevenlabs.io"
    inference_paths = InferencePaths(
        without_model_name(
            "v1/text-to-speech/{}",
            "v1/text-to-speech/{}/stream",
            "v1/text-to-speech/{}/with-timestamps",
            "v1/text-to-speech/{}/stream/with-timestamps",
            "v1/speech-to-text",
            "v1/speech-to-speech/{}",
            "v1/speech-to-speech/{}/stream",
            "v1/sound-generation",
        )
    )
    realtime_paths = InferencePaths(
        without_model_name("v1/text-to-speech/{}/stream-input", "v1/text-to-speech/{}/multi-stream-input")
    )

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        headers["xi-api-key"] = key
