"""UnifiedEndpoint: an endpoint that several providers share at one path of the gateway, such as /v1/audio/speech.

The provider is the one that the body's model names. For endpoints without a model, it is the one in the header
x-emberline-provider, else the default provider. For stored objects (responses, conversations), the id names it.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from emberline.gateway.core.request import Dialect, GatewayRequest

# inference: every caller that may use the model. owned: the caller that created the object. operator: tokens only, as
# the objects of all callers lie in one account of the provider.
Access = Literal["inference", "owned", "operator"]

PROVIDER_HEADER = "x-emberline-provider"
COUNT_TOKENS_ENDPOINT = "messages/count_tokens"
OBJECT_ID, ITEM_ID = r"(?P<id>[A-Za-z0-9_-]{1,1024})", r"[A-Za-z0-9_-]{1,256}"


class UnifiedEndpoint(msgspec.Struct, frozen=True):
    family: str  # what a provider has or lacks as a whole, such as "files"
    methods: tuple[str, ...] = ("POST",)
    dialect: Dialect = "raw"
    access: Access = "inference"
    accepts_form: bool = False  # the body may be multipart/form-data
    requires_model: bool = False
    object_id: str = ""  # id of the stored object that the path names


def _with_model(family: str, dialect: Dialect = "raw", *, accepts_form: bool = False) -> UnifiedEndpoint:
    return UnifiedEndpoint(family, dialect=dialect, accepts_form=accepts_form, requires_model=True)


def _of_caller(family: str, *methods: str) -> UnifiedEndpoint:
    return UnifiedEndpoint(family, methods, access="owned")


def _of_operator(family: str, *methods: str, accepts_form: bool = False) -> UnifiedEndpoint:
    return UnifiedEndpoint(family, methods, access="operator", accepts_form=accepts_form)


_BY_PATH = {
    "chat/completions": _with_model("chat/completions", "openai-chat"),
    "completions": _with_model("completions"),
    "responses": _with_model("responses", "openai-responses"),
    "responses/input_tokens": _with_model("responses/input_tokens"),
    "responses/compact": _with_model("responses/compact"),
    "embeddings": _with_model("embeddings", "openai-embeddings"),
    "messages": _with_model("messages", "anthropic"),
    COUNT_TOKENS_ENDPOINT: _with_model(COUNT_TOKENS_ENDPOINT),
    "audio/speech": _with_model("audio/speech"),
    "audio/transcriptions": _with_model("audio/transcriptions", accepts_form=True),
    "audio/translations": _with_model("audio/translations", accepts_form=True),
    "rerank": _with_model("rerank"),
    "images/generations": UnifiedEndpoint("images/generations"),
    "images/edits": UnifiedEndpoint("images/edits", accepts_form=True),
    "images/variations": UnifiedEndpoint("images/variations", accepts_form=True),
    "moderations": UnifiedEndpoint("moderations"),
    "conversations": _of_caller("conversations", "POST"),
    "files": _of_operator("files", "GET", "POST", accepts_form=True),
    "batches": _of_operator("batches", "GET", "POST"),
}

_TEMPLATES = {
    "responses/{id}": _of_caller("responses", "GET", "DELETE"),
    "responses/{id}/cancel": _of_caller("responses", "POST"),
    "responses/{id}/input_items": _of_caller("responses", "GET"),
    "conversations/{id}": _of_caller("conversations", "GET", "POST", "DELETE"),
    "conversations/{id}/items": _of_caller("conversations", "GET", "POST"),
    "conversations/{id}/items/{item}": _of_caller("conversations", "GET", "DELETE"),
    "files/{id}": _of_operator("files", "GET", "DELETE"),
    "files/{id}/content": _of_operator("files", "GET"),
    "batches/{id}": _of_operator("batches", "GET"),
    "batches/{id}/cancel": _of_operator("batches", "POST"),
}
_BY_PATTERN = [
    (re.compile(template.format(id=OBJECT_ID, item=ITEM_ID)), endpoint) for template, endpoint in _TEMPLATES.items()
]

# First path segments below /v1 that name no account, because OpenAI's API has them.
RESERVED_SEGMENTS = frozenset(name.partition("/")[0] for name in _BY_PATH) | {
    "assistants", "chatkit", "containers", "evals", "fine_tuning", "models", "organization", "realtime", "threads",
    "uploads", "vector_stores", "videos",
}  # fmt: skip


def find_unified_endpoint(endpoint: str) -> UnifiedEndpoint | None:
    """Return the endpoint at a path below /v1, or None if the gateway has no such endpoint."""
    if (found := _BY_PATH.get(endpoint)) is not None:
        return found
    if endpoint.partition("/")[0] not in RESERVED_SEGMENTS:  # the usual case of all other paths
        return None
    for pattern, each in _BY_PATTERN:
        if (match := pattern.fullmatch(endpoint)) is not None:
            return msgspec.structs.replace(each, object_id=match["id"])
    return None


def runs_model(call: GatewayRequest) -> bool:
    """Return whether the request may cost tokens. Requests that read or change stored objects do not."""
    unified = find_unified_endpoint(call.endpoint) if call.is_dialect_endpoint else None
    return unified is None or unified.access == "inference"
