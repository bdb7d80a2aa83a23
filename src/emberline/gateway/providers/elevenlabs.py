"""ElevenLabs: speech. Its key has a header of its own."""

from __future__ import annotations

from emberline.gateway.providers.base import Provider


class ElevenLabs(Provider):
    slug = "elevenlabs"
    base_url = "https://api.elevenlabs.io"

    def authorize(self, headers: dict[str, str], key: str) -> None:
        headers["xi-api-key"] = key
