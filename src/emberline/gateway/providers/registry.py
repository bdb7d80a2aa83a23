"""Finds the provider for a slug and a gateway's settings; instances are cached."""

from __future__ import annotations

from emberline.core.errors import InvalidRequest
from emberline.gateway.call import Dialect
from emberline.gateway.errors import ProviderNotFound
from emberline.gateway.providers.anthropic import Anthropic
from emberline.gateway.providers.aws_bedrock import Bedrock
from emberline.gateway.providers.azure_openai import AzureOpenAI
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.baseten import Baseten
from emberline.gateway.providers.cartesia import Cartesia
from emberline.gateway.providers.cerebras import Cerebras
from emberline.gateway.providers.cohere import Cohere
from emberline.gateway.providers.compatible import USUAL, Compatible
from emberline.gateway.providers.deepgram import Deepgram
from emberline.gateway.providers.deepseek import DeepSeek
from emberline.gateway.providers.elevenlabs import ElevenLabs
from emberline.gateway.providers.emberline import Emberline
from emberline.gateway.providers.fal import Fal
from emberline.gateway.providers.google_ai_studio import GoogleAIStudio
from emberline.gateway.providers.google_vertex_ai import VertexAI
from emberline.gateway.providers.grok import Grok
from emberline.gateway.providers.groq import Groq
from emberline.gateway.providers.huggingface import HuggingFace
from emberline.gateway.providers.ideogram import Ideogram
from emberline.gateway.providers.mistral import Mistral
from emberline.gateway.providers.ollama import Ollama
from emberline.gateway.providers.openai import OpenAI
from emberline.gateway.providers.openrouter import OpenRouter
from emberline.gateway.providers.parallel import Parallel
from emberline.gateway.providers.perplexity import Perplexity
from emberline.gateway.providers.replicate import Replicate
from emberline.gateway.providers.workers_ai import WorkersAI
from emberline.gateway.settings import ProviderSettings, Settings

# Servers with an OpenAI-compatible API, such as vLLM, are configured in the settings with their URL.
ALL: tuple[type[Provider], ...] = (
    Emberline, OpenAI, Anthropic, AzureOpenAI, GoogleAIStudio, VertexAI, Bedrock, WorkersAI, Groq, Mistral, Cohere,
    DeepSeek, Perplexity, Grok, OpenRouter, Cerebras, HuggingFace, Replicate, Ollama,
    ElevenLabs, Deepgram, Cartesia, Fal, Ideogram, Baseten, Parallel,
)  # fmt: skip
KNOWN: dict[str, type[Provider]] = {known.slug: known for known in ALL}
MOST = 4096

NOTHING = ProviderSettings()


class Registry:
    def __init__(self, private: bool = False) -> None:
        """`allow_private`: the operator allows all providers to be at private addresses."""
        self._private = private
        self._made: dict[tuple[object, ...], Provider] = {}

    def find(self, slug: str, settings: Settings) -> Provider:
        given = settings.providers.get(slug, NOTHING)
        known = KNOWN.get(slug)
        if not given.enabled or (known is None and given is NOTHING):
            raise ProviderNotFound(
                f"provider {slug[:80]!r} is unknown or disabled on this gateway",
                hint=f"available are {', '.join(sorted({*KNOWN, *settings.providers}))}",
            )
        key = (slug, given.base_url, given.speaks, given.public, *given.headers.items())
        if (result := self._made.get(key)) is None:
            if len(self._made) >= MOST:
                self._made.clear()
            result = self._made[key] = self._make(slug, given, known)
        return result

    def _make(self, slug: str, given: ProviderSettings, known: type[Provider] | None) -> Provider:
        public = given.public and given.base_url is not None and not self._private
        if known is not None:
            result = known(given.base_url, given.headers, public=public)
            if given.speaks is not None:
                result.native = _some(result, given.speaks)
            return result
        speaks = USUAL if given.speaks is None else given.speaks
        return Compatible(slug, given.base_url or "", speaks=speaks, headers=given.headers, public=public)


def _some(provider: Provider, speaks: tuple[str, ...]) -> dict[Dialect, str]:
    if unknown := set(speaks) - set(provider.native):
        raise InvalidRequest(
            f"provider {provider.slug!r} does not support the wire format {min(unknown)}, which speaks lists",
            hint=f"use {', '.join(provider.native)}",
        )
    return {dialect: path for dialect, path in provider.native.items() if dialect in speaks}
