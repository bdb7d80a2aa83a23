"""Ollama, by default on this machine. Its own API is under api/, its OpenAI-compatible API under v1/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from emberline.gateway.core.request import Dialect
from emberline.gateway.providers.base import Provider
from emberline.gateway.providers.inference_paths import OPENAI_INFERENCE, InferencePaths


class Ollama(Provider):
    slug = "ollama"
    base_url = "http://127.0.0.1:11434"
    prefix = "v1/"
    paths: ClassVar[Mapping[Dialect, str]] = {
        "openai-chat": "v1/chat/completions",
        "openai-embeddings": "v1/embeddings",
    }
    inference_paths = InferencePaths(
        (
            *(f"v1/{endpoint}" for endpoint in OPENAI_INFERENCE),
            *("api/chat", "api/generate", "api/embed", "api/embeddings"),
        )
    )
    needs_key = False
    max_tokens_field = "max_tokens"
