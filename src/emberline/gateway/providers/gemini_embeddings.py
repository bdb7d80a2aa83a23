"""Gemini's endpoints for embeddings, for models of every provider that has OpenAI's endpoint for embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from emberline.api.parse import decode
from emberline.core.errors import InvalidRequest
from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.dialects.canonical import Json
from emberline.gateway.providers.base import Provider, report_change
from emberline.gateway.providers.converted_request import ConvertedRequest, convert_request

SINGLE_ACTION, BATCH_ACTION = ":embedContent", ":batchEmbedContents"


def is_embedding_call(call: GatewayRequest) -> bool:
    is_gemini = call.is_dialect_endpoint and call.dialect == "gemini"
    return is_gemini and call.endpoint.endswith((SINGLE_ACTION, BATCH_ACTION))


def build_embedding_request(call: GatewayRequest, provider: Provider) -> ConvertedRequest:
    """Return the provider's request. Raise InvalidRequest if the provider cannot compute embeddings."""
    is_batch = call.endpoint.endswith(BATCH_ACTION)
    body: Json = decode(call.body, Json)
    requests = body.get("requests") if is_batch else [body]
    if not isinstance(requests, list) or not requests or not all(isinstance(each, dict) for each in requests):
        raise InvalidRequest("requests must be a list of objects with at least one element", param="requests")
    if provider.is_gemini_api:
        for each in requests:
            each["model"] = f"models/{call.model}"
        action = BATCH_ACTION if is_batch else SINGLE_ACTION
        endpoint = provider.endpoint_for("gemini", call.model, False).rpartition(":")[0] + action
        return convert_request(call, endpoint, msgspec.json.encode(body), bytes, dialect="gemini")
    if not provider.supports("openai-embeddings", call.model):
        raise InvalidRequest(
            f"provider {provider.slug!r} has no endpoint for embeddings",
            param="model",
            hint="GET /v1/models lists the models; those of kind embedding compute embeddings",
        )
    endpoint = provider.endpoint_for("openai-embeddings", call.model, False)
    fields: Json = {"model": call.model, "input": [_read_text(each) for each in requests], "encoding_format": "float"}
    if (dimensions := _read_dimensions(requests)) is not None:
        fields["dimensions"] = dimensions
    if any(each.get("taskType") for each in requests):
        report_change(call, "taskType", "OpenAI's embeddings have no such field")
    convert = partial(convert_embeddings, is_batch, len(requests))
    encoded = msgspec.json.encode(fields)
    dialect: Dialect = "openai-embeddings"
    return convert_request(call, endpoint, encoded, convert, dialect=dialect, reply_dialect=dialect)


def _read_text(request: Json) -> str:
    content = request.get("content")
    parts = content.get("parts") if isinstance(content, dict) else None
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts or ()]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(
            "content.parts must be a list of texts: only Google's models embed other parts",
            param="content",
            hint='send {"content": {"parts": [{"text": "..."}]}}',
        )
    return "\n".join(map(str, texts))


def _read_dimensions(requests: list[Json]) -> Any:
    """Return outputDimensionality, of which there is one for all texts. The provider checks its value."""
    found = [each.get("outputDimensionality") for each in requests]
    if any(each != found[0] for each in found):
        raise InvalidRequest(
            "outputDimensionality must be the same in all requests",
            param="outputDimensionality",
            hint="send texts with different dimensions in separate calls",
        )
    return found[0]


class _Embedding(msgspec.Struct):
    embedding: list[float]
    index: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0


class _EmbeddingReply(msgspec.Struct):
    data: list[_Embedding]
    usage: _Usage = _Usage()


_REPLY = msgspec.json.Decoder(_EmbeddingReply)


def convert_embeddings(is_batch: bool, count: int, body: bytes) -> bytes:
    """Return the reply in Gemini's format. Raise UpstreamBroken if it has not one vector for each text."""
    try:
        reply = _REPLY.decode(body)
    except msgspec.MsgspecError as e:
        raise UpstreamBroken(f"the provider's reply does not have embeddings as lists of numbers: {e}") from e
    if len(reply.data) != count:
        raise UpstreamBroken(f"the provider's reply has {len(reply.data)} embeddings for {count} texts")
    vectors = [{"values": each.embedding} for each in sorted(reply.data, key=lambda each: each.index)]
    usage = {"usageMetadata": {"promptTokenCount": reply.usage.prompt_tokens}}
    return msgspec.json.encode({**({"embeddings": vectors} if is_batch else {"embedding": vectors[0]}), **usage})
