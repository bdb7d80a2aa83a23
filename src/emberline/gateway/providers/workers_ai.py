"""Cloudflare Workers AI: a path that is a model's name runs it; OpenAI's API is at v1/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from emberline.core.errors import InvalidRequest
from emberline.gateway.call import Call, Dialect
from emberline.gateway.paths import DEFAULT
from emberline.gateway.providers.base import Provider
from emberline.gateway.upstream.outgoing import Outgoing


class WorkersAI(Provider):
    """Uses the account in the gateway's path, unless base_url names another one."""

    slug = "workers-ai"
    base_url = "https://api.cloudflare.com/client/v4/accounts/{account}/ai"
    prefix = "v1/"
    own_errors = True
    paths: ClassVar[Mapping[Dialect, str]] = {
        "openai-chat": "v1/chat/completions",
        "openai-responses": "v1/responses",
        "openai-embeddings": "v1/embeddings",
    }
    max_tokens_name = "max_tokens"

    def model_in(self, endpoint: str) -> str:
        return "" if endpoint.startswith("v1/") else endpoint.removeprefix("run/")

    def url(self, endpoint: str, query: str) -> str:
        if not endpoint.startswith(("v1/", "run/")):
            endpoint = f"run/{endpoint}"
        return super().url(endpoint, query)

    def request(self, call: Call, key: str | None) -> Outgoing:
        request = super().request(call, key)
        if "{account}" not in request.url:
            return request
        if call.account == DEFAULT:
            raise InvalidRequest(
                "the Cloudflare account of workers-ai is not set",
                hint="name it in the path, or in the provider's base_url: .../client/v4/accounts/ACCOUNT/ai",
            )
        return Outgoing(
            request.method,
            request.url.replace("{account}", call.account, 1),
            request.headers,
            request.body,
            request.public,
        )
