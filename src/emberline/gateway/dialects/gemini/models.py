"""Replies of GET /v1beta/models and GET /v1beta/models/{id} in Gemini's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emberline.api.openai.models import ServedModel

_METHODS = {"embedding": ["embedContent", "batchEmbedContents"]}
_CHAT_METHODS = ["generateContent", "streamGenerateContent", "countTokens"]


def render(models: Sequence[ServedModel], name: str) -> dict[str, Any]:
    """Return the list of models, or the entry of one of them if `name` is not empty."""
    entries = {model.id: _render_model(model) for model in models}
    return entries[name] if name else {"models": list(entries.values())}


def _render_model(model: ServedModel) -> dict[str, Any]:
    return {
        "name": f"models/{model.id}",
        "displayName": model.id,
        "inputTokenLimit": model.max_context,
        "supportedGenerationMethods": _METHODS.get(model.kind, _CHAT_METHODS),
    }
