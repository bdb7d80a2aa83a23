"""Google Vertex AI: Gemini models, and Claude models in Anthropic's wire format.

URLs contain a project and a region. A provider key is a service account's key, a user's credentials, or an access
token.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import quote

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.providers.google_ai_studio import INFERENCE_METHODS, GeminiProvider
from emberline.gateway.providers.google_token import GoogleCredentials, GoogleTokenCache
from emberline.gateway.providers.hosted_claude import build_hosted_claude_body
from emberline.gateway.providers.inference_paths import InferencePaths
from emberline.gateway.upstream.client import UpstreamClient
from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.net.client_response import HTTPClientResponse

ANTHROPIC_VERSION = "vertex-2023-10-16"
_UNARY_METHOD, _STREAM_METHOD = "rawPredict", "streamRawPredict"
_REGIONAL_HOST = re.compile(r"https://([a-z0-9-]+)-aiplatform\.")
_REGION_IN_PATH = re.compile(r"(?:^|/)locations/([a-z0-9-]+)/")


class VertexAI(GeminiProvider):
    """Google Vertex AI. A model name is PUBLISHER/MODEL, or MODEL for Google's models.

    base_url may contain the project and the region.
    """

    slug = "google-vertex-ai"
    base_url = "https://{region}aiplatform.googleapis.com"
    paths: ClassVar[Mapping[Dialect, str]] = {"gemini": "", "anthropic": ""}
    inference_paths = InferencePaths(
        (
            *(
                f"{prefix}publishers/{{}}/models/{{model}}:{method}"
                for prefix in ("", "v1/projects/{}/locations/{}/", "v1beta1/projects/{}/locations/{}/")
                for method in (*INFERENCE_METHODS, _UNARY_METHOD, _STREAM_METHOD)
            ),
            *(
                f"{version}/projects/{{}}/locations/{{}}/endpoints/openapi/chat/completions"
                for version in ("v1", "v1beta1")
            ),
        )
    )

    def __init__(
        self, base_url: str | None = None, headers: Mapping[str, str] | None = None, *, public_only: bool = False
    ) -> None:
        super().__init__(base_url, headers, public_only=public_only)
        self._tokens = GoogleTokenCache(self._base_url, public_only=public_only)

    def supports(self, dialect: Dialect, model: str = "") -> bool:
        return dialect == "raw" or dialect == ("anthropic" if "claude" in model else "gemini")

    def dialect_at(self, endpoint: str, query: str = "") -> Dialect:
        if endpoint.endswith("/endpoints/openapi/chat/completions"):
            return "raw"  # OpenAI's chat, but with Google's model names
        if "/publishers/anthropic/" in endpoint and endpoint.endswith((f":{_UNARY_METHOD}", f":{_STREAM_METHOD}")):
            return "anthropic"
        return super().dialect_at(endpoint, query)

    def is_stream_path(self, endpoint: str, query: str = "") -> bool:
        return endpoint.endswith(f":{_STREAM_METHOD}") or super().is_stream_path(endpoint, query)

    def endpoint_for(self, dialect: Dialect, model: str, stream: bool) -> str:
        publisher, _, name = model.rpartition("/")
        if dialect == "anthropic":
            action = f"models/{quote(name, safe='')}:{_STREAM_METHOD if stream else _UNARY_METHOD}"
            return f"publishers/{quote(publisher or 'anthropic', safe='')}/{action}"
        return f"publishers/{quote(publisher or 'google', safe='')}/{self.model_method_path(name, stream)}"

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        if call.is_dialect_endpoint:
            if call.dialect == "anthropic":
                call = call.with_changes(body=build_hosted_claude_body(call, ANTHROPIC_VERSION))
            call = call.with_changes(endpoint=self._add_project_and_region(call.endpoint, key))
        return super().build_request(call, key)

    def _add_project_and_region(self, endpoint: str, key: str | None) -> str:
        if "/projects/" in self._base_url:
            return endpoint
        credentials = GoogleCredentials.parse(key or "") or GoogleCredentials()
        region = credentials.region or (match[1] if (match := _REGIONAL_HOST.match(self._base_url)) else "")
        if not credentials.project or not region:
            raise InvalidRequest(
                f"the project or the region of {self.slug} is not set",
                hint="add region to the service account's JSON, or put both into the provider's base_url",
            )
        return f"v1/projects/{quote(credentials.project, safe='')}/locations/{quote(region, safe='')}/{endpoint}"

    def build_url(self, endpoint: str, query: str) -> str:
        base = self._base_url
        if "{region}" in base:
            region = match[1] if (match := _REGION_IN_PATH.search(endpoint)) else "global"
            base = base.replace("{region}", "" if region == "global" else f"{region}-")
        elif endpoint.startswith("v1"):  # the endpoint already has project and region
            base = re.sub(r"/v1[^/]*/projects/.*", "", base)
        return f"{base}/{endpoint}" + (f"?{query}" if query else "")

    async def send(
        self, request: ProviderRequest, upstream: UpstreamClient, timeout_s: float, now: float
    ) -> HTTPClientResponse:
        credentials = GoogleCredentials.parse(request.headers.get("authorization", "").removeprefix("Bearer "))
        if credentials is None:
            return await upstream.send(request, timeout_s)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        token = await self._tokens.get_token(credentials, upstream, timeout_s, now)
        headers = {**request.headers, "authorization": f"Bearer {token}"}
        incoming = await upstream.send(msgspec.structs.replace(request, headers=headers), deadline - loop.time())
        if incoming.status == 401:
            self._tokens.forget_token(credentials)
        return incoming
