"""Ideogram: images."""

from __future__ import annotations

from emberline.gateway.providers.base import Provider


class Ideogram(Provider):
    slug = "ideogram"
    base_url = "https://api.ideogram.ai"

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        headers["api-key"] = key
