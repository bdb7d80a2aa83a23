"""The OpenAPI document of everything we serve. Its schemas are made from the structs that decode the requests, so that
the two cannot drift apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from emberline.api import replies
from emberline.api.anthropic.request import CountTokensRequest, MessagesRequest
from emberline.api.openai.chat import ChatRequest
from emberline.api.openai.completions import CompletionRequest
from emberline.api.openai.embeddings import EmbeddingRequest
from emberline.api.responses.request import ResponsesRequest
from emberline.api.tokenize import DetokenizeRequest, TokenizeRequest

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    method: Literal["get", "post"]
    path: str
    summary: str
    request: type | None = None
    reply: type | None = None  # None: of `content_type`, in no further detail
    content_type: str = "application/json"
    streams: bool = False
    error: type = replies.OpenAIError
    needs_key: bool = True
    may_be_down: bool = False  # 503 is one of its answers, not a failure


ENDPOINTS = (
    Endpoint("post", "/v1/chat/completions", "Continue a chat", ChatRequest, replies.ChatCompletion, streams=True),
    Endpoint("post", "/v1/completions", "Continue texts", CompletionRequest, replies.Completion, streams=True),
    Endpoint("post", "/v1/responses", "Continue a chat, as items", ResponsesRequest, replies.Response, streams=True),
    Endpoint("post", "/v1/embeddings", "Turn texts into vectors", EmbeddingRequest, replies.Embeddings),
    Endpoint("get", "/v1/models", "What is served", reply=replies.ModelList),
    Endpoint("get", "/v1/models/{model}", "One of them", reply=replies.ModelEntry),
    Endpoint(
        "post",
        "/v1/messages",
        "Continue a chat, in Anthropic's protocol",
        MessagesRequest,
        replies.Message,
        streams=True,
        error=replies.AnthropicError,
    ),
    Endpoint(
        "post",
        "/v1/messages/count_tokens",
        "How many tokens its prompt has",
        CountTokensRequest,
        replies.TokenCount,
        error=replies.AnthropicError,
    ),
    Endpoint("post", "/tokenize", "Text or messages to tokens", TokenizeRequest, replies.Tokens),
    Endpoint("post", "/detokenize", "Tokens to text", DetokenizeRequest, replies.Text),
    Endpoint("get", "/health", "As /health/ready", needs_key=False, may_be_down=True),
    Endpoint("get", "/health/live", "Whether the server runs", needs_key=False),
    Endpoint("get", "/health/ready", "Whether it takes requests", needs_key=False, may_be_down=True),
    Endpoint("get", "/health/progress", "Whether the engine moves", needs_key=False, may_be_down=True),
    Endpoint("get", "/stats", "Load, as the playground shows it"),
    Endpoint("get", "/metrics", "Metrics for Prometheus", content_type="text/plain"),
    Endpoint("get", "/openapi.json", "This document", needs_key=False),
)

_REFUSALS = {400: "A field is wrong; `param` names it", 404: "No such model", 413: "The body is too large"}
_FAILURES = {
    401: "The API key is missing or wrong",
    429: "The queue is full; Retry-After says when to come back",
    500: "The engine died, or we made a mistake",
    503: "The engine is starting or restarting",
    504: "The time limit passed",
}


def _pattern(endpoint: Endpoint) -> str:
    """A regular expression for "METHOD PATH"; a `{name}` in the path is any text, also with slashes."""
    path = re.sub(r"\\{\w+\\}", ".+", re.escape(endpoint.path))
    return f"{endpoint.method.upper()} {path}"


# What generates, counts, embeds or lists models. Health, statistics and metrics are the operator's.
_MODEL_API = re.compile("|".join(_pattern(endpoint) for endpoint in ENDPOINTS if endpoint.reply is not None))


def is_model_api(method: str, path: str) -> bool:
    """Whether a client that may use the models may call this, through a gateway too."""
    return _MODEL_API.fullmatch(f"{'GET' if method == 'HEAD' else method} {path}") is not None


def document(version: str) -> Json:
    types = dict.fromkeys(t for e in ENDPOINTS for t in (e.request, e.reply, e.error) if t is not None)
    refs, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    ref_of = dict(zip(types, refs, strict=True))
    schemas["TokenizeRequest"]["oneOf"] = [_needs(name) for name in ("prompt", "messages")]
    paths: dict[str, Json] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint, ref_of)
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


def _needs(name: str) -> Json:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _operation(endpoint: Endpoint, ref_of: dict[type, Any]) -> Json:
    operation: Json = {
        "operationId": endpoint.method + re.sub(r"\W+", "_", endpoint.path).rstrip("_"),
        "summary": endpoint.summary,
        # The empty one: keys are asked for only where the server was started with some.
        "security": [{}, {"bearer": []}, {"x-api-key": []}] if endpoint.needs_key else [],
        "responses": _responses(endpoint, ref_of),
    }
    if endpoint.request is not None:
        content = {"application/json": {"schema": ref_of[endpoint.request]}}
        operation["requestBody"] = {"required": True, "content": content}
    if "{model}" in endpoint.path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _responses(endpoint: Endpoint, ref_of: dict[type, Any]) -> Json:
    schema = {} if endpoint.reply is None else {"schema": ref_of[endpoint.reply]}
    content: Json = {endpoint.content_type: schema}
    if endpoint.streams:
        content["text/event-stream"] = {}  # OpenAPI 3.1 cannot say what single events look like
    responses: Json = {"200": {"description": "The reply", "content": content}}
    if endpoint.may_be_down:
        responses["503"] = {"description": "No, and why", "content": {endpoint.content_type: {}}}
    if not endpoint.needs_key:
        return responses
    faults = _FAILURES | (_REFUSALS if endpoint.request is not None else {404: _REFUSALS[404]})
    for status, description in sorted(faults.items()):
        content = {"application/json": {"schema": ref_of[endpoint.error]}}
        responses[str(status)] = {"description": description, "content": content}
    return responses
