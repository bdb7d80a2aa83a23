"""Emberline's own engine or router, which supports three wire formats.

Only the model API is forwarded. Cluster control, statistics and metrics of that server are for its operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from emberline.api.openapi import is_model_endpoint
from emberline.core.errors import NotFound, Unauthorized
from emberline.core.tenants import TENANT_SALT_HEADER
from emberline.gateway.core.engine_tenants import EngineTenants
from emberline.gateway.core.errors import EngineKeyRefused, ProviderErrorReply, UpstreamFailed
from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.inference_paths import OPENAI_INFERENCE, TEXT, InferencePaths
from emberline.gateway.upstream.provider_request import ProviderRequest


class Emberline(Provider):
    slug = "emberline"
    base_url = "http://127.0.0.1:8000"
    prefix = "v1/"
    paths: ClassVar[Mapping[Dialect, str]] = {
        "openai-chat": "v1/chat/completions",
        "openai-responses": "v1/responses",
        "openai-embeddings": "v1/embeddings",
        "anthropic": "v1/messages",
    }
    unified_families = TEXT | {"responses"}
    inference_paths = InferencePaths((*(f"v1/{each}" for each in OPENAI_INFERENCE), "tokenize", "detokenize"))
    needs_key = False
    accepts_reasoning = True
    prefill = "flag"

    def __init__(
        self, base_url: str | None = None, headers: Mapping[str, str] | None = None, *, public_only: bool = False
    ) -> None:
        super().__init__(base_url, headers, public_only=public_only)
        self.tenants = EngineTenants()  # the registry replaces it by that of the store

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        """Return the request. Raise NotFound for a path outside the engine's model API."""
        path = call.endpoint.partition("?")[0]
        if self._base_url.endswith("/v1"):  # the endpoint may then lack the version
            path = f"v1/{path.removeprefix('v1/')}"
        is_stored_response = call.is_dialect_endpoint and path.startswith("v1/responses/")
        if not is_stored_response and not is_model_endpoint(call.method, f"/{path}"):
            raise NotFound(
                f"the gateway does not forward {call.method[:20]} {path[:200]!r} to the engine",
                hint="use a path of the model API: v1/chat/completions, v1/messages, v1/models, tokenize, ...",
            )
        request = super().build_request(call, key)
        request.headers[TENANT_SALT_HEADER] = self.tenants.salt_of(call.account, call.identity.key_id)
        return request

    def convert_error(self, error: UpstreamFailed, *, is_caller_key: bool) -> UpstreamFailed:
        """Return the error that the caller gets.

        If the engine refused the gateway's key, return EngineKeyRefused, because a 401 would blame the caller's key.
        """
        if is_caller_key or not isinstance(error, ProviderErrorReply) or error.status != Unauthorized.status:
            return error
        return EngineKeyRefused(
            "the local engine refused the gateway's key: it is missing or wrong", provider=self.slug
        )
