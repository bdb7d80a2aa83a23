"""The schemas of Ollama's replies, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from emberline.api.parse import WireStruct
from emberline.api.replies import TokenLogprobEntry

Json = dict[str, Any]


class OllamaError(WireStruct):
    error: str


class OllamaReplyMessage(WireStruct):
    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[Json] | UnsetType = UNSET


class OllamaReplyEnd(WireStruct, kw_only=True):
    model: str
    created_at: str
    done: bool
    done_reason: str
    logprobs: list[TokenLogprobEntry] | UnsetType = UNSET
    # nanoseconds; all counts and durations are missing if the request had no prompt
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatReply(OllamaReplyEnd):
    message: OllamaReplyMessage


class OllamaGenerateReply(OllamaReplyEnd):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedReply(WireStruct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsReply(WireStruct):
    embedding: list[float]


class OllamaModelDetails(WireStruct):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModelEntry(WireStruct):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaModelDetails
    # of /api/ps
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModelList(WireStruct):
    models: list[OllamaModelEntry]


class OllamaModelDescription(WireStruct):
    modelfile: str
    parameters: str
    template: str
    details: OllamaModelDetails
    model_info: Json
    capabilities: list[str]
    modified_at: str


class OllamaVersion(WireStruct):
    version: str
