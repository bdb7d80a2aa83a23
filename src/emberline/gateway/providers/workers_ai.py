"""Cloudflare Workers AI. A path that is a model's name runs that model; OpenAI's API is under v1/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.paths import DEFAULT_NAME
from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.inference_paths import OPENAI_INFERENCE, InferencePaths
from emberline.gateway.upstream.provider_request import ProviderRequest


class WorkersAI(Provider):
    """Cloudflare Workers AI.

    Requests use the Cloudflare account that the gateway's URL names, unless base_url contains an account.
    """

    slug = "workers-ai"
    base_url = "https://api.cloudflare.com/client/v4/accounts/{account}/ai"
    prefix = "v1/"
    has_own_error_format = True
    paths: ClassVar[Mapping[Dialect, str]] = {
        "openai-chat": "v1/chat/completions",
        "openai-responses": "v1/responses",
        "openai-embeddings": "v1/embeddings",
    }
    inference_paths = InferencePaths((*(f"v1/{endpoint}" for endpoint in OPENAI_INFERENCE), "run/{model...}"))
    max_tokens_field = "max_tokens"

    def model_from_path(self, endpoint: str) -> str:
        return "" if endpoint.startswith("v1/") else endpoint.removeprefix("run/")

    def normalize_endpoint(self, endpoint: str) -> str:
        return endpoint if endpoint.startswith(("v1/", "run/")) else f"run/{endpoint}"

    def build_url(self, endpoint: str, query: str) -> str:
        return super().build_url(self.normalize_endpoint(endpoint), query)

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        request = super().build_request(call, key)
        if "{account}" not in request.url:
            return request
        if call.account == DEFAULT_NAME:
            raise InvalidRequest(
                "the Cloudflare account of workers-ai is not set",
                hint="name it in the path, or in the provider's base_url: .../client/v4/accounts/ACCOUNT/ai",
            )
        return msgspec.structs.replace(request, url=request.url.replace("{account}", call.account, 1))
