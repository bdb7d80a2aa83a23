"""Makes the writers that render a reply of the engine in Ollama's format."""

from __future__ import annotations

from typing import Any

from emberline.api.ollama.request import LoadRequest, OllamaChatCall, OllamaRawCall
from emberline.wire.ollama import (
    OllamaContent,
    OllamaWriter,
    format_time,
    render_chat_fields,
    render_generate_fields,
)

STREAM_MEDIA_TYPE = "application/x-ndjson"


def make_chat_writer(call: OllamaChatCall, id: str, created: int, fingerprint: str) -> OllamaWriter:
    """Return the writer for the reply of /api/chat. Ollama's replies have neither an id nor a fingerprint."""
    model = call.requested_model or call.common.model
    return OllamaWriter(model, created, render_chat_fields, stream=call.stream)


def make_generate_writer(call: OllamaChatCall | OllamaRawCall, id: str, created: int, fingerprint: str) -> OllamaWriter:
    """Return the writer for the reply of /api/generate."""
    model = call.requested_model or call.common.model
    return OllamaWriter(model, created, render_generate_fields, stream=call.stream)


def render_loaded(request: LoadRequest, model: str, now: float, *, is_chat: bool) -> dict[str, Any]:
    """Return the reply to a request without a prompt: the model is loaded, and no text is generated."""
    fields = (render_chat_fields if is_chat else render_generate_fields)(OllamaContent())
    head = {"model": request.model or model, "created_at": format_time(now)}
    return {**head, **fields, "done_reason": "load", "done": True}
