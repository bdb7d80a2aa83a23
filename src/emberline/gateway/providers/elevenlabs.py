"""ElevenLabs: speech. The key is sent in xi-api-key."""

from __future__ import annotations

from emberline.gateway.providers.base import Provider


class ElevenLabs(Provider):
    slug = "elevenlabs"
    base_url = "https://api.elevenlabs.io"

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        headers["xi-api-key"] = key
