"""Cohere: its chat API, version 2, which resembles OpenAI's, and its embeddings API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.request import Dialect, GatewayRequest
from emberline.gateway.providers.base import Provider, report_change
from emberline.gateway.providers.cohere_reply import CohereChatDecoder, CohereEmbeddingDecoder
from emberline.gateway.providers.inference_paths import InferencePaths
from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.gateway.upstream.reply_decoder import ReplyDecoder

Json = dict[str, Any]
_UNCHANGED_FIELDS = (
    "model",
    "messages",
    "stream",
    "temperature",
    "max_tokens",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "logprobs",
    "safety_mode",
    "documents",
    "citation_options",
)
_RENAMED_FIELDS = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "top_p": "p", "top_k": "k"}
_KNOWN_FIELDS = {
    *_UNCHANGED_FIELDS,
    *_RENAMED_FIELDS,
    "tools",
    "tool_choice",
    "response_format",
    "reasoning_effort",
    "n",
    "stream_options",
}
_MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "tool_plan", "citations")


class Cohere(Provider):
    slug = "cohere"
    base_url = "https://api.cohere.com"
    paths: ClassVar[Mapping[Dialect, str]] = {"openai-chat": "v2/chat", "openai-embeddings": "v2/embed"}
    unified_families = frozenset({"rerank"})
    inference_paths = InferencePaths(
        (
            *(f"{version}/{action}" for version in ("v1", "v2") for action in ("chat", "embed", "rerank")),
            *("v1/generate", "v1/tokenize", "v1/detokenize"),
            *("compatibility/v1/chat/completions", "compatibility/v1/embeddings"),
        )
    )
    max_tokens_field = "max_tokens"

    def unified_path(self, endpoint: str, family: str, model: str) -> str:
        return f"v2/{super().unified_path(endpoint, family, model)}"

    def dialect_at(self, endpoint: str, query: str = "") -> Dialect:
        """Return "openai-chat" for Cohere's OpenAI-compatible path and "raw" for Cohere's own paths."""
        compatible = endpoint.removeprefix("compatibility/v1/")
        return "openai-chat" if compatible != endpoint and compatible == "chat/completions" else "raw"

    def build_request(self, call: GatewayRequest, key: str | None) -> ProviderRequest:
        if not call.is_dialect_endpoint or call.dialect == "raw":
            return super().build_request(call, key)
        fields: Json = msgspec.json.decode(call.body)
        decoder: Callable[[], ReplyDecoder]
        if call.dialect == "openai-chat":
            body, decoder = render_chat_request(fields, call), partial(CohereChatDecoder, call.model, call.id)
        else:
            body, decoder = render_embedding_request(fields, call), partial(CohereEmbeddingDecoder, call.model)
        request = super().build_request(call.with_changes(body=msgspec.json.encode(body)), key)
        return msgspec.structs.replace(request, decoder=decoder)


def render_chat_request(fields: Json, call: GatewayRequest) -> Json:
    if (fields.get("n") or 1) != 1:
        raise InvalidRequest(
            f"n is {fields['n']}, but cohere returns one choice per request", param="n", hint="set n to 1"
        )
    body = {name: fields[name] for name in _UNCHANGED_FIELDS if fields.get(name) is not None}
    body |= {own: fields[name] for name, own in _RENAMED_FIELDS.items() if fields.get(name) is not None}
    if isinstance(body.get("stop_sequences"), str):
        body["stop_sequences"] = [body["stop_sequences"]]
    body["messages"] = [_render_message(message, call) for message in fields.get("messages") or ()]
    _render_tools(fields, body, call)
    match fields.get("response_format"):
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            body["response_format"] = {"type": "json_object", "schema": schema}
        case {"type": "json_object"}:
            body["response_format"] = {"type": "json_object"}
    if effort := fields.get("reasoning_effort"):
        body["thinking"] = {"type": "disabled" if effort == "none" else "enabled"}
        report_change(call, "reasoning_effort", "cohere can only enable or disable reasoning")
    for name in sorted(fields.keys() - _KNOWN_FIELDS):
        if fields[name] is not None:
            report_change(call, name, "cohere has no such field")
    return body


def _render_message(message: Json, call: GatewayRequest) -> Json:
    result = {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None}
    for name in sorted(message.keys() - set(_MESSAGE_FIELDS)):
        if message[name]:
            report_change(call, f"messages[].{name}", "cohere has no such field")
    if result.get("role") == "developer":
        result["role"] = "system"
    if result.get("tool_calls") and isinstance(result.get("content"), str):
        result["tool_plan"] = result.pop("content")  # Cohere's field for the text before tool calls
    return result


def _render_tools(fields: Json, body: Json, call: GatewayRequest) -> None:
    tools = [tool for tool in fields.get("tools") or () if isinstance(tool, dict) and "function" in tool]
    match fields.get("tool_choice"):
        case "required":
            body["tool_choice"] = "REQUIRED"
        case "none":
            body["tool_choice"] = "NONE"
        case {"function": {"name": name}}:
            tools = [tool for tool in tools if tool["function"].get("name") == name]
            body["tool_choice"] = "REQUIRED"
            report_change(call, "tool_choice", "cohere cannot force one tool, so all others were removed")
    if tools:
        body["strict_tools"] = any(tool["function"].get("strict") for tool in tools)
        functions = ({n: v for n, v in tool["function"].items() if n != "strict"} for tool in tools)
        body["tools"] = [{"type": "function", "function": function} for function in functions]


def render_embedding_request(fields: Json, call: GatewayRequest) -> Json:
    texts = [fields["input"]] if isinstance(fields.get("input"), str) else fields.get("input")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(
            "input must be a string or a list of strings: cohere does not embed token ids",
            param="input",
            hint="send the text",
        )
    kind = "base64" if fields.get("encoding_format") == "base64" else "float"
    body = {"model": call.model, "texts": texts, "embedding_types": [kind]}
    body["input_type"] = fields.get("input_type") or "search_document"
    if fields.get("dimensions") is not None:
        body["output_dimension"] = fields["dimensions"]
    if fields.get("user"):
        report_change(call, "user", "cohere has no such field")
    return body
