"""Anthropic: the key is sent in x-api-key, and every request names a version of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from emberline.gateway.call import Call, Dialect
from emberline.gateway.providers.base import Provider
from emberline.gateway.upstream.outgoing import Outgoing

VERSION = "2023-06-01"


class Anthropic(Provider):
    slug = "anthropic"
    base_url = "https://api.anthropic.com"
    prefix = "v1/"
    paths: ClassVar[Mapping[Dialect, str]] = {"anthropic": "v1/messages"}

    def authorize(self, headers: dict[str, str], key: str) -> None:
        headers["x-api-key"] = key

    def request(self, call: Call, key: str | None) -> Outgoing:
        request = super().request(call, key)
        request.headers.setdefault("anthropic-version", VERSION)
        return request
