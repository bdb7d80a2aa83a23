"""The schemas of all replies, for the OpenAPI document.

Reply writers do not use these structs: they build dicts, which a test checks against the schemas.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from emberline.api.parse import WireStruct

Json = dict[str, Any]


class OpenAIErrorDetail(WireStruct):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(WireStruct):
    error: OpenAIErrorDetail


class AnthropicErrorDetails(WireStruct):
    error_code: str


class AnthropicErrorDetail(WireStruct):
    type: str
    message: str
    details: AnthropicErrorDetails | UnsetType = UNSET


class AnthropicError(WireStruct):
    type: Literal["error"]
    error: AnthropicErrorDetail


class PromptTokensDetails(WireStruct):
    cached_tokens: int


class CompletionTokensDetails(WireStruct):
    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class CompletionUsage(WireStruct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenLogprobEntry(WireStruct):
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[Json] | UnsetType = UNSET


class ChatLogprobs(WireStruct):
    content: list[TokenLogprobEntry]
    refusal: None
    reasoning_content: list[TokenLogprobEntry] | UnsetType = UNSET


class ChatFunctionCall(WireStruct):
    name: str
    arguments: str


class ChatToolCall(WireStruct):
    id: str
    type: Literal["function"]
    function: ChatFunctionCall


class ChatMessage(WireStruct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    function_call: ChatFunctionCall | UnsetType = UNSET


class ChatChoice(WireStruct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call", "abort"]
    stop_reason: str | int | None
    matched_stop: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(WireStruct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default", "flex"]
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_logprobs: list[Json | None] | None
    metadata: dict[str, str] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(WireStruct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(WireStruct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: str | int | None
    matched_stop: str | int | None
    prompt_logprobs: list[Json | None] | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextCompletion(WireStruct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class Embedding(WireStruct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # numbers, or base64 of little-endian float32


class EmbeddingUsage(WireStruct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(WireStruct):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class ModelEntry(WireStruct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    kind: str
    type: Literal["model"]
    display_name: str
    created_at: str
    description: str | UnsetType = UNSET
    default_sampling_params: dict[str, float] | UnsetType = UNSET


class ModelListing(WireStruct):
    object: Literal["list"]
    data: list[ModelEntry]
    has_more: bool
    first_id: str | None
    last_id: str | None


class TokenizeReply(WireStruct):
    count: int
    max_model_len: int
    tokens: list[int | Json]
    token_strs: list[str] | None


class DetokenizeReply(WireStruct):
    prompt: str
    content: str | UnsetType = UNSET  # llama.cpp's name for the same text


class TokenCount(WireStruct):
    input_tokens: int


class AnthropicMessage(WireStruct):
    """A reply of Anthropic's Messages API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Json


class Response(msgspec.Struct):
    """A reply of the Responses API; it also repeats fields of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    error: Json | None
    incomplete_details: Json | None
    output: list[Json]
    usage: Json | None
