"""Generates the server's OpenAPI document from the structs that decode requests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec

from emberline.api import replies
from emberline.api.anthropic.request import CountTokensRequest, MessagesRequest
from emberline.api.model_management import ModelRequest, UnloadRequest
from emberline.api.ollama import replies as ollama_replies
from emberline.api.ollama.embed import OllamaEmbeddingsRequest, OllamaEmbedRequest
from emberline.api.ollama.models import OllamaShowRequest
from emberline.api.ollama.reply import STREAM_MEDIA_TYPE
from emberline.api.ollama.request import OllamaChatRequest, OllamaGenerateRequest
from emberline.api.openai.chat import ChatRequest
from emberline.api.openai.completions import CompletionRequest
from emberline.api.openai.embeddings import EmbeddingRequest
from emberline.api.responses.request import ResponsesRequest
from emberline.api.tokenize import DetokenizeRequest, TokenizeRequest

Json = dict[str, Any]

EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    request: type | None = None
    reply: type | None = None  # None: the document gives only `content_type`
    content_type: str = "application/json"
    stream_type: str = ""  # content type of the streamed reply; "": the reply is never a stream
    error: type = replies.OpenAIError
    needs_key: bool = True
    needs_admin_key: bool = False
    may_be_unavailable: bool = False  # 503 is a regular reply of this endpoint


def _ollama_endpoint(
    method: Literal["get", "post"],
    path: str,
    summary: str,
    request: type | None,
    reply: type,
    *,
    stream_type: str = "",
) -> ApiEndpoint:
    title = f"{summary} (Ollama's protocol)"
    return ApiEndpoint(method, path, title, request, reply, stream_type=stream_type, error=ollama_replies.OllamaError)


def _admin_endpoint(
    method: Literal["post", "delete"],
    path: str,
    summary: str,
    request: type = ModelRequest,
    *,
    stream_type: str = "",
    error: type = replies.OpenAIError,
) -> ApiEndpoint:
    return ApiEndpoint(method, path, summary, request, stream_type=stream_type, error=error, needs_admin_key=True)


ENDPOINTS = (
    ApiEndpoint(
        "post",
        "/v1/chat/completions",
        "Generate a chat completion",
        ChatRequest,
        replies.ChatCompletion,
        stream_type=EVENT_STREAM,
    ),
    ApiEndpoint(
        "post",
        "/v1/completions",
        "Generate text completions",
        CompletionRequest,
        replies.TextCompletion,
        stream_type=EVENT_STREAM,
    ),
    ApiEndpoint(
        "post", "/v1/responses", "Generate a response", ResponsesRequest, replies.Response, stream_type=EVENT_STREAM
    ),
    ApiEndpoint("post", "/v1/embeddings", "Compute embeddings", EmbeddingRequest, replies.EmbeddingList),
    ApiEndpoint("get", "/v1/models", "List the models", reply=replies.ModelListing),
    ApiEndpoint("get", "/v1/models/{model}", "Describe one model", reply=replies.ModelEntry),
    ApiEndpoint(
        "post",
        "/v1/messages",
        "Generate a message (Anthropic's protocol)",
        MessagesRequest,
        replies.AnthropicMessage,
        stream_type=EVENT_STREAM,
        error=replies.AnthropicError,
    ),
    ApiEndpoint(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a message request",
        CountTokensRequest,
        replies.TokenCount,
        error=replies.AnthropicError,
    ),
    _ollama_endpoint(
        "post",
        "/api/chat",
        "Generate a chat message",
        OllamaChatRequest,
        ollama_replies.OllamaChatReply,
        stream_type=STREAM_MEDIA_TYPE,
    ),
    _ollama_endpoint(
        "post",
        "/api/generate",
        "Generate text",
        OllamaGenerateRequest,
        ollama_replies.OllamaGenerateReply,
        stream_type=STREAM_MEDIA_TYPE,
    ),
    _ollama_endpoint("post", "/api/embed", "Compute embeddings", OllamaEmbedRequest, ollama_replies.OllamaEmbedReply),
    _ollama_endpoint(
        "post",
        "/api/embeddings",
        "Compute the embedding of one text",
        OllamaEmbeddingsRequest,
        ollama_replies.OllamaEmbeddingsReply,
    ),
    _ollama_endpoint(
        "post", "/api/show", "Describe one model", OllamaShowRequest, ollama_replies.OllamaModelDescription
    ),
    _ollama_endpoint("get", "/api/tags", "List the models", None, ollama_replies.OllamaModelList),
    _ollama_endpoint("get", "/api/ps", "List the loaded models", None, ollama_replies.OllamaModelList),
    ApiEndpoint(
        "get",
        "/api/version",
        "The version of Ollama's API",
        reply=ollama_replies.OllamaVersion,
        error=ollama_replies.OllamaError,
        needs_key=False,
    ),
    ApiEndpoint("get", "/admin/models", "List the served models and those in the cache", needs_admin_key=True),
    _admin_endpoint("post", "/admin/models/pull", "Download a model", stream_type=STREAM_MEDIA_TYPE),
    _admin_endpoint("post", "/admin/models/load", "Download and serve a model", stream_type=STREAM_MEDIA_TYPE),
    _admin_endpoint("post", "/admin/models/unload", "Stop serving a model", UnloadRequest),
    _admin_endpoint("post", "/admin/models/remove", "Delete a model from the cache"),
    _admin_endpoint(
        "post",
        "/api/pull",
        "Download and serve a model (Ollama's protocol)",
        stream_type=STREAM_MEDIA_TYPE,
        error=ollama_replies.OllamaError,
    ),
    _admin_endpoint(
        "delete",
        "/api/delete",
        "Unload and delete a model (Ollama's protocol)",
        error=ollama_replies.OllamaError,
    ),
    ApiEndpoint("post", "/tokenize", "Convert text or messages to tokens", TokenizeRequest, replies.TokenizeReply),
    ApiEndpoint("post", "/detokenize", "Convert tokens to text", DetokenizeRequest, replies.DetokenizeReply),
    ApiEndpoint("get", "/health", "The same as /health/ready", needs_key=False, may_be_unavailable=True),
    ApiEndpoint("get", "/health/live", "Whether the server process runs", needs_key=False),
    ApiEndpoint(
        "get", "/health/ready", "Whether the server accepts requests", needs_key=False, may_be_unavailable=True
    ),
    ApiEndpoint(
        "get", "/health/progress", "Whether the engine makes progress", needs_key=False, may_be_unavailable=True
    ),
    ApiEndpoint("get", "/stats", "Load of the server, for the playground"),
    ApiEndpoint("get", "/metrics", "Metrics in the Prometheus format", content_type="text/plain"),
    ApiEndpoint("get", "/openapi.json", "This document", needs_key=False),
)

_REQUEST_ERRORS = {400: "A field is invalid; `param` names it", 404: "Model not found", 413: "The body is too large"}
_ADMIN_ERRORS = {
    403: "The server has no admin key, or the request comes from a web page of another site",
    409: "The model is in use",
    502: "The download failed",
    507: "The machine has not enough memory",
}
_SERVER_ERRORS = {
    401: "The API key is missing or wrong",
    429: "The queue is full; retry after the time in the Retry-After header",
    500: "The engine process died, or the server has a bug",
    503: "The engine is starting or restarting",
    504: "The request exceeded its time limit",
}


def _build_endpoint_regex(endpoint: ApiEndpoint) -> str:
    """Return a regex that matches "METHOD PATH"; `{name}` in the path also matches text with slashes."""
    path = re.sub(r"\\{\w+\\}", ".+", re.escape(endpoint.path))
    return f"{endpoint.method.upper()} {path}"


# Endpoints that generate, count, embed or list models. Health, statistics and metrics are for the operator.
_MODEL_API = re.compile(
    "|".join(_build_endpoint_regex(endpoint) for endpoint in ENDPOINTS if endpoint.reply is not None)
)


def is_model_endpoint(method: str, path: str) -> bool:
    """Return whether the endpoint is open to every client with an API key, not only to administrators."""
    return _MODEL_API.fullmatch(f"{'GET' if method == 'HEAD' else method} {path}") is not None


@cache
def build_document(version: str) -> Json:
    types = dict.fromkeys(t for e in ENDPOINTS for t in (e.request, e.reply, e.error) if t is not None)
    refs, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    ref_of = dict(zip(types, refs, strict=True))
    for schema in schemas.values():
        schema.pop("additionalProperties", None)  # unknown fields are ignored, and replies may get new ones
    schemas["TokenizeRequest"]["oneOf"] = [_require_non_null_field(name) for name in ("prompt", "messages")]
    paths: dict[str, Json] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = _render_operation(endpoint, ref_of)
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Emberline",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
    }


def _require_non_null_field(name: str) -> Json:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _render_operation(endpoint: ApiEndpoint, schema_refs: dict[type, Any]) -> Json:
    operation: Json = {
        "operationId": endpoint.method + re.sub(r"\W+", "_", endpoint.path).rstrip("_"),
        "summary": endpoint.summary,
        # The empty entry: keys are required only if the server was started with API keys.
        "security": [{}, {"bearer": []}, {"x-api-key": []}] if endpoint.needs_key else [],
        "responses": _render_responses(endpoint, schema_refs),
    }
    if endpoint.request is not None:
        content = {"application/json": {"schema": schema_refs[endpoint.request]}}
        operation["requestBody"] = {"required": True, "content": content}
    if "{model}" in endpoint.path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _render_responses(endpoint: ApiEndpoint, schema_refs: dict[type, Any]) -> Json:
    schema = {} if endpoint.reply is None else {"schema": schema_refs[endpoint.reply]}
    content: Json = {endpoint.content_type: schema}
    if endpoint.stream_type:
        content[endpoint.stream_type] = {}  # OpenAPI 3.1 cannot describe single events
    responses: Json = {"200": {"description": "The reply", "content": content}}
    if endpoint.may_be_unavailable:
        responses["503"] = {"description": "Not ready; the body has the reason", "content": {endpoint.content_type: {}}}
    if not endpoint.needs_key:
        return responses
    errors = (
        _SERVER_ERRORS
        | (_ADMIN_ERRORS if endpoint.needs_admin_key else {})
        | (_REQUEST_ERRORS if endpoint.request is not None else {404: _REQUEST_ERRORS[404]})
    )
    for status, description in sorted(errors.items()):
        content = {"application/json": {"schema": schema_refs[endpoint.error]}}
        responses[str(status)] = {"description": description, "content": content}
    return responses
