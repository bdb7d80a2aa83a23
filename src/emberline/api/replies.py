"""Schemas of the replies, for the OpenAPI document. The writers build plain dicts; a test checks them against these."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from emberline.api.parse import Wire

Json = dict[str, Any]


class OpenAIErrorDetail(Wire):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(Wire):
    error: OpenAIErrorDetail


class AnthropicErrorDetail(Wire):
    type: str
    message: str


class AnthropicError(Wire):
    type: Literal["error"]
    error: AnthropicErrorDetail


class PromptTokensDetails(Wire):
    cached_tokens: int


class CompletionTokensDetails(Wire):
    reasoning_tokens: int


class CompletionUsage(Wire):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenChance(Wire):
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[Json] | UnsetType = UNSET


class ChatLogprobs(Wire):
    content: list[TokenChance]
    refusal: None
    reasoning_content: list[TokenChance] | UnsetType = UNSET


class FunctionCall(Wire):
    name: str
    arguments: str


class ToolCall(Wire):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Wire):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChoice(Wire):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call", "abort"]
    stop_reason: str | int | None
    matched_stop: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Wire):
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


class CompletionLogprobs(Wire):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Wire):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: str | int | None
    matched_stop: str | int | None
    prompt_logprobs: list[Json | None] | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Wire):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class Embedding(Wire):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # numbers, or base64 of little-endian float32


class EmbeddingUsage(Wire):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Wire):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class ModelEntry(Wire):
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
    default_sampling_params: dict[str, float] | UnsetType = UNSET


class ModelList(Wire):
    object: Literal["list"]
    data: list[ModelEntry]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Tokens(Wire):
    count: int
    max_model_len: int
    tokens: list[int | Json]
    token_strs: list[str] | None


class Text(Wire):
    prompt: str
    content: str | UnsetType = UNSET  # llama.cpp's name for the same text


class TokenCount(Wire):
    input_tokens: int


class Message(Wire):
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
