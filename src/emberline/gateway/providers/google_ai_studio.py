"""Google AI Studio: Gemini. The model, and whether the reply is streamed, are in the path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import quote, unquote

from emberline.core.errors import InvalidRequest
from emberline.gateway.call import Call, Dialect
from emberline.gateway.providers.base import Provider
from emberline.gateway.upstream.outgoing import Outgoing

WHOLE, STREAM = "generateContent", "streamGenerateContent"


class Gemini(Provider):
    """What Google AI Studio and Vertex AI have in common."""

    paths: ClassVar[Mapping[Dialect, str]] = {"gemini": "models/{model}"}

    def dialect_of(self, endpoint: str, query: str = "") -> Dialect:
        """Return "gemini" for generateContent and for streams with alt=sse; others are a JSON list."""
        return "gemini" if endpoint.endswith(f":{WHOLE}") or Gemini.streams_at(self, endpoint, query) else "raw"

    def model_in(self, endpoint: str) -> str:
        model, action, _ = endpoint.rpartition("/")[2].partition(":")
        return unquote(model) if action else ""

    def streams_at(self, endpoint: str, query: str = "") -> bool:
        """Return whether the path asks for events; a JSON list is not streamed, because its usage comes last."""
        return endpoint.endswith(f":{STREAM}") and "alt=sse" in query.split("&")

    def action(self, model: str, stream: bool) -> str:
        return f"models/{quote(model, safe='')}:{STREAM if stream else WHOLE}"

    def request(self, call: Call, key: str | None) -> Outgoing:
        if call.plain and call.dialect == "gemini" and call.stream:
            call = call.moved(query="alt=sse")
        elif call.settings.guardrails and call.dialect == "raw" and call.endpoint.endswith(f":{STREAM}"):
            raise InvalidRequest(
                "this gateway has guardrails, which can check a Gemini stream only with alt=sse",
                param="alt",
                hint="add ?alt=sse to the URL",
            )
        return super().request(call, key)


class GoogleAIStudio(Gemini):
    slug = "google-ai-studio"
    base_url = "https://generativelanguage.googleapis.com"
    prefix = "v1beta/openai/"
    paths: ClassVar[Mapping[Dialect, str]] = {
        "gemini": "v1beta/models/{model}",
        "openai-embeddings": "v1beta/openai/embeddings",
    }
    realtime = "ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent"

    def dialect_of(self, endpoint: str, query: str = "") -> Dialect:
        if endpoint == self.paths["openai-embeddings"]:
            return "openai-embeddings"
        return "openai-chat" if endpoint.endswith("openai/chat/completions") else super().dialect_of(endpoint, query)

    def endpoint_for(self, dialect: Dialect, model: str, stream: bool) -> str:
        if dialect == "gemini":
            return f"v1beta/{self.action(model, stream)}"
        return super().endpoint_for(dialect, model, stream)

    def authorize(self, headers: dict[str, str], key: str) -> None:
        headers["x-goog-api-key"] = key

    def request(self, call: Call, key: str | None) -> Outgoing:
        if call.endpoint == self.realtime:  # the session's first message names the model
            call = call.moved(query="&".join(e for e in call.query.split("&") if not e.startswith("model=")))
        request = super().request(call, key)
        if "/openai/" in call.endpoint and (given := request.headers.pop("x-goog-api-key", None)):
            request.headers["authorization"] = f"Bearer {given}"
        return request
