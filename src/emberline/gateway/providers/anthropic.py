"""Anthropic: the key is sent in x-api-key, and every request names a version of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.inference_paths import InferencePaths
from emberline.gateway.upstream.provider_request import ProviderRequest

API_VERSION = "2023-06-01"


class Anthropic(Provider):
    slug = "anthropic"
    base_url = "https://api.anthropic.com"
    prefix = "v1/"
    paths: ClassVar[Mapping[Dialect, str]] = {"anthropic": "v1/messages"}
    inference_paths = InferencePaths(("v1/messages", "v1/messages/count_tokens", "v1/complete"))

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        headers["x-api-key"] = key

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        request = super().build_request(call, key)
        request.headers.setdefault("anthropic-version", API_VERSION)
        return request
