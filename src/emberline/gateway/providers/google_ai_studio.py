"""Google AI Studio: Gemini models. The path names the model and says whether the reply is streamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import quote, unquote

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.inference_paths import InferencePaths
from emberline.gateway.upstream.provider_request import ProviderRequest

UNARY_METHOD, STREAM_METHOD = "generateContent", "streamGenerateContent"
INFERENCE_METHODS = (UNARY_METHOD, STREAM_METHOD, "countTokens", "embedContent", "batchEmbedContents", "predict")
GEMINI_SOCKET = "ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent"


class GeminiProvider(Provider):
    """The base class of Google AI Studio and Vertex AI."""

    paths: ClassVar[Mapping[Dialect, str]] = {"gemini": "models/{model}"}

    def dialect_at(self, endpoint: str, query: str = "") -> Dialect:
        """Return "gemini" for generateContent and for streams of server-sent events (alt=sse).

        Other paths are "raw": a stream without alt=sse is a JSON list.
        """
        return (
            "gemini"
            if endpoint.endswith(f":{UNARY_METHOD}") or GeminiProvider.is_stream_path(self, endpoint, query)
            else "raw"
        )

    def model_from_path(self, endpoint: str) -> str:
        model, action, _ = endpoint.rpartition("/")[2].partition(":")
        return unquote(model) if action else ""

    def is_stream_path(self, endpoint: str, query: str = "") -> bool:
        """Return whether the path asks for server-sent events.

        A stream in the form of a JSON list is handled like a reply that is not streamed.
        """
        return endpoint.endswith(f":{STREAM_METHOD}") and "alt=sse" in query.split("&")

    def model_method_path(self, model: str, stream: bool) -> str:
        return f"models/{quote(model, safe='')}:{STREAM_METHOD if stream else UNARY_METHOD}"

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        if call.is_dialect_endpoint and call.dialect == "gemini" and call.stream:
            call = call.with_changes(query="alt=sse")
        elif call.settings.guardrails and call.dialect == "raw" and call.endpoint.endswith(f":{STREAM_METHOD}"):
            raise InvalidRequest(
                "this gateway has guardrails, which can check a Gemini stream only with alt=sse",
                param="alt",
                hint="add ?alt=sse to the URL",
            )
        return super().build_request(call, key)


class GoogleAIStudio(GeminiProvider):
    slug = "google-ai-studio"
    base_url = "https://generativelanguage.googleapis.com"
    prefix = "v1beta/openai/"
    paths: ClassVar[Mapping[Dialect, str]] = {
        "gemini": "v1beta/models/{model}",
        "openai-embeddings": "v1beta/openai/embeddings",
    }
    is_gemini_api = True
    unified_families = frozenset({"images/generations"})
    inference_paths = InferencePaths(
        (
            *(
                f"{version}/models/{{model}}:{method}"
                for version in ("v1", "v1alpha", "v1beta")
                for method in INFERENCE_METHODS
            ),
            *(f"v1beta/openai/{each}" for each in ("chat/completions", "embeddings", "images/generations")),
        )
    )
    realtime_paths = InferencePaths((GEMINI_SOCKET,))
    realtime_path = GEMINI_SOCKET

    def normalize_endpoint(self, endpoint: str) -> str:
        return endpoint

    def dialect_at(self, endpoint: str, query: str = "") -> Dialect:
        if endpoint == self.paths["openai-embeddings"]:
            return "openai-embeddings"
        return "openai-chat" if endpoint.endswith("openai/chat/completions") else super().dialect_at(endpoint, query)

    def endpoint_for(self, dialect: Dialect, model: str, stream: bool) -> str:
        if dialect == "gemini":
            return f"v1beta/{self.model_method_path(model, stream)}"
        return super().endpoint_for(dialect, model, stream)

    def set_auth_headers(self, headers: dict[str, str], key: str) -> None:
        headers["x-goog-api-key"] = key

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        if call.endpoint == self.realtime_path:  # the session's first message names the model
            call = call.with_changes(
                query="&".join(parameter for parameter in call.query.split("&") if not parameter.startswith("model="))
            )
        request = super().build_request(call, key)
        if "/openai/" in call.endpoint and (key_header := request.headers.pop("x-goog-api-key", None)):
            request.headers["authorization"] = f"Bearer {key_header}"
        return request
