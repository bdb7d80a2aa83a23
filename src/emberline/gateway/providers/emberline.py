"""Emberline: our own engine or router. It speaks three protocols itself, so nothing is translated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from emberline.gateway.call import Dialect
from emberline.gateway.providers.base import Provider


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
    needs_key = False
    takes_thoughts = True
    prefill = "flag"
