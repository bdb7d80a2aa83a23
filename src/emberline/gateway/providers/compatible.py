"""Any server at a configured URL with an OpenAI- or Anthropic-compatible API, such as vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.request import Dialect
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.inference_paths import OPENAI_FAMILIES, OPENAI_INFERENCE, InferencePaths

ENDPOINTS: dict[str, tuple[Dialect, str]] = {
    "openai-chat": ("openai-chat", "v1/chat/completions"),
    "openai-responses": ("openai-responses", "v1/responses"),
    "openai-embeddings": ("openai-embeddings", "v1/embeddings"),
    "anthropic": ("anthropic", "v1/messages"),
}
DEFAULT_DIALECTS = ("openai-chat", "openai-embeddings")


class CompatibleProvider(Provider):
    prefix = "v1/"
    needs_key = False
    max_tokens_field = "max_tokens"
    unified_families = OPENAI_FAMILIES | {"rerank"}
    inference_paths = InferencePaths(
        (
            *(f"v1/{endpoint}" for endpoint in OPENAI_INFERENCE),
            *("v1/score", "v1/pooling", "v1/classify", "v2/rerank"),
            *("rerank", "score", "pooling", "classify", "tokenize", "detokenize", "embed", "predict"),
        )
    )
    realtime_paths = InferencePaths(("v1/realtime",))

    def __init__(
        self,
        slug: str,
        base_url: str,
        *,
        speaks: tuple[str, ...] = DEFAULT_DIALECTS,
        headers: Mapping[str, str] | None = None,
        public_only: bool = False,
    ) -> None:
        if not base_url:
            raise InvalidRequest(
                f"custom provider {slug!r} has no base_url",
                param=f"providers.{slug}.base_url",
                hint=f"set providers.{slug}.base_url",
            )
        if unknown := set(speaks) - set(ENDPOINTS):
            raise InvalidRequest(
                f"the setting `speaks` of provider {slug!r} contains an unknown wire format: {min(unknown)[:40]!r}",
                param=f"providers.{slug}.speaks",
                hint=f"use {', '.join(ENDPOINTS)}",
            )
        super().__init__(base_url, headers, public_only=public_only)
        self.slug = slug
        self.endpoints = dict(ENDPOINTS[dialect] for dialect in speaks)
