"""Requests and replies of Ollama's /api/embed, and of /api/embeddings, which takes one text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from msgspec import Meta

from emberline.api.call import CommonFields, EmbeddingCall
from emberline.api.fields import IgnoredField
from emberline.api.openai.inputs import MAX_INPUTS_PER_REQUEST
from emberline.api.openai.sampling import ModelName
from emberline.api.parse import WireStruct, decode_request
from emberline.core.errors import InvalidRequest


class OllamaEmbedRequest(WireStruct):
    model: ModelName | None = None
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS_PER_REQUEST)] | None = None
    truncate: bool | None = None  # None: true
    dimensions: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None  # 0: all
    keep_alive: IgnoredField = None
    options: IgnoredField = None


class OllamaEmbeddingsRequest(WireStruct):
    model: ModelName | None = None
    prompt: str | None = None
    keep_alive: IgnoredField = None
    options: IgnoredField = None


def parse_embed(body: bytes) -> EmbeddingCall:
    request, ignored = decode_request(body, OllamaEmbedRequest)
    if request.input is None:
        raise InvalidRequest("input is required and missing", param="input", hint="send a text or a list of texts")
    return EmbeddingCall(
        common=CommonFields(request.model or ""),
        inputs=[request.input] if isinstance(request.input, str) else request.input,
        dimensions=request.dimensions or None,
        truncates=request.truncate is not False,
        ignored=ignored,
    )


def parse_embeddings(body: bytes) -> EmbeddingCall:
    request, ignored = decode_request(body, OllamaEmbeddingsRequest)
    return EmbeddingCall(
        common=CommonFields(request.model or ""),
        inputs=[request.prompt or ""],
        truncates=True,
        ignored=ignored,
    )


def render_embed(
    call: EmbeddingCall, vectors: Sequence[Iterable[float]], tokens: int, model: str, duration_ns: int
) -> dict[str, Any]:
    return {
        "model": call.common.model or model,
        "embeddings": [[float(value) for value in vector] for vector in vectors],
        "total_duration": duration_ns,
        "load_duration": 0,
        "prompt_eval_count": tokens,
    }


def render_embeddings(vectors: Sequence[Iterable[float]]) -> dict[str, Any]:
    return {"embedding": [float(value) for value in vectors[0]]}
