"""Deepgram: speech to text, and text to speech."""

from __future__ import annotations

from emberline.gateway.providers.base import Provider


class Deepgram(Provider):
    slug = "deepgram"
    base_url = "https://api.deepgram.com"

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        headers["authorization"] = f"Token {key}"
