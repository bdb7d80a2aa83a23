"""ProviderRegistry: finds the provider for a slug and a gateway's settings.

A slug is a provider's name in URLs.
"""

from __future__ import annotations

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.engine_tenants import EngineTenants
from emberline.gateway.core.errors import ProviderNotFound
from emberline.gateway.core.request import Dialect
from emberline.gateway.core.settings import GatewaySettings, ProviderSettings
from emberline.gateway.providers.anthropic import Anthropic
from emberline.gateway.providers.aws_bedrock import Bedrock
from emberline.gateway.providers.azure_openai import AzureOpenAI
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.baseten import Baseten
from emberline.gateway.providers.cartesia import Cartesia
from emberline.gateway.providers.cerebras import Cerebras
from emberline.gateway.providers.cohere import Cohere
from emberline.gateway.providers.compatible import DEFAULT_DIALECTS, CompatibleProvider
from emberline.gateway.providers.deepgram import Deepgram
from emberline.gateway.providers.deepseek import DeepSeek
from emberline.gateway.providers.elevenlabs import ElevenLabs
from emberline.gateway.providers.emberline import Emberline
from emberline.gateway.providers.fal import Fal
from emberline.gateway.providers.google_ai_studio import GoogleAIStudio
from emberline.gateway.providers.google_vertex_ai import VertexAI
from emberline.gateway.providers.grok import Grok
from emberline.gateway.providers.groq import Groq
from emberline.gateway.providers.huggingface import HuggingFaceProvider
from emberline.gateway.providers.ideogram import Ideogram
from emberline.gateway.providers.mistral import Mistral
from emberline.gateway.providers.ollama import Ollama
from emberline.gateway.providers.openai import OpenAI
from emberline.gateway.providers.openrouter import OpenRouter
from emberline.gateway.providers.parallel import Parallel
from emberline.gateway.providers.perplexity import Perplexity
from emberline.gateway.providers.replicate import Replicate
from emberline.gateway.providers.workers_ai import WorkersAI

# Servers with an OpenAI-compatible API, such as vLLM, are configured in the settings with their URL.
PROVIDERS: tuple[type[Provider], ...] = (
    Emberline, OpenAI, Anthropic, AzureOpenAI, GoogleAIStudio, VertexAI, Bedrock, WorkersAI, Groq, Mistral, Cohere,
    DeepSeek, Perplexity, Grok, OpenRouter, Cerebras, HuggingFaceProvider, Replicate, Ollama,
    ElevenLabs, Deepgram, Cartesia, Fal, Ideogram, Baseten, Parallel,
)  # fmt: skip
PROVIDERS_BY_SLUG: dict[str, type[Provider]] = {known.slug: known for known in PROVIDERS}
MAX_CACHED_PROVIDERS = 4096

DEFAULT_PROVIDER_SETTINGS = ProviderSettings()


class ProviderRegistry:
    """The providers that this process has created, cached by slug and settings."""

    def __init__(self, allow_private: bool = False, engine_tenants: EngineTenants | None = None) -> None:
        """Create an empty registry. `allow_private`: providers may be at private IP addresses."""
        self._allow_private = allow_private
        self._engine_tenants = engine_tenants or EngineTenants()
        self._providers: dict[tuple[object, ...], Provider] = {}

    def find_provider(self, slug: str, settings: GatewaySettings) -> Provider:
        provider_settings = settings.providers.get(slug, DEFAULT_PROVIDER_SETTINGS)
        provider_class = PROVIDERS_BY_SLUG.get(slug)
        if not provider_settings.enabled or (provider_class is None and provider_settings is DEFAULT_PROVIDER_SETTINGS):
            raise ProviderNotFound(
                f"provider {slug[:80]!r} is unknown or disabled on this gateway",
                hint=f"available are {', '.join(sorted({*PROVIDERS_BY_SLUG, *settings.providers}))}",
            )
        key = (
            slug,
            provider_settings.base_url,
            provider_settings.speaks,
            provider_settings.public,
            *provider_settings.headers.items(),
        )
        if (provider := self._providers.get(key)) is None:
            if len(self._providers) >= MAX_CACHED_PROVIDERS:
                self._providers.clear()
            provider = self._providers[key] = self._create_provider(slug, provider_settings, provider_class)
        return provider

    def _create_provider(
        self, slug: str, provider_settings: ProviderSettings, provider_class: type[Provider] | None
    ) -> Provider:
        public = provider_settings.public and provider_settings.base_url is not None and not self._allow_private
        if provider_class is not None:
            provider = provider_class(provider_settings.base_url, provider_settings.headers, public_only=public)
            if provider_settings.speaks is not None:
                provider.endpoints = _select_endpoints(provider, provider_settings.speaks)
            if isinstance(provider, Emberline):
                provider.tenants = self._engine_tenants
            return provider
        speaks = DEFAULT_DIALECTS if provider_settings.speaks is None else provider_settings.speaks
        return CompatibleProvider(
            slug, provider_settings.base_url or "", speaks=speaks, headers=provider_settings.headers, public_only=public
        )


def _select_endpoints(provider: Provider, dialects: tuple[str, ...]) -> dict[Dialect, str]:
    if unknown := set(dialects) - set(provider.endpoints):
        raise InvalidRequest(
            f"provider {provider.slug!r} does not support the wire format {min(unknown)} in its setting `speaks`",
            hint=f"use {', '.join(provider.endpoints)}",
        )
    return {dialect: path for dialect, path in provider.endpoints.items() if dialect in dialects}
