"""Cartesia: speech. Clients name the API version in the header `cartesia-version`."""

from __future__ import annotations

from emberline.gateway.providers.base import Provider


class Cartesia(Provider):
    slug = "cartesia"
    base_url = "https://api.cartesia.ai"

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        headers["x-api-key"] = key
