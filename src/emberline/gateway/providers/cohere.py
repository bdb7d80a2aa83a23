"""Cohere: version 2 of its chat API, which resembles OpenAI's, and its embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.call import Call, Dialect
from emberline.gateway.providers.base import Provider, report
from emberline.gateway.providers.cohere_reply import Chatted, Embedded
from emberline.gateway.upstream.decoder import Decoder
from emberline.gateway.upstream.outgoing import Outgoing

Json = dict[str, Any]
_SAME = ("model", "messages", "stream", "temperature", "max_tokens", "seed", "frequency_penalty", "presence_penalty",
         "logprobs", "safety_mode", "documents", "citation_options")  # fmt: skip
_RENAMED = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "top_p": "p", "top_k": "k"}
_READ = {*_SAME, *_RENAMED, "tools", "tool_choice", "response_format", "reasoning_effort", "n", "stream_options"}
_OF_MESSAGES = ("role", "content", "tool_calls", "tool_call_id", "tool_plan", "citations")


class Cohere(Provider):
    slug = "cohere"
    base_url = "https://api.cohere.com"
    paths: ClassVar[Mapping[Dialect, str]] = {"openai-chat": "v2/chat", "openai-embeddings": "v2/embed"}
    max_tokens_name = "max_tokens"

    def dialect_of(self, endpoint: str, query: str = "") -> Dialect:
        """Return "openai-chat" for Cohere's compatibility path; its own paths are passed on unchanged."""
        compatible = endpoint.removeprefix("compatibility/v1/")
        return "openai-chat" if compatible != endpoint and compatible == "chat/completions" else "raw"

    def request(self, call: Call, key: str | None) -> Outgoing:
        if not call.plain or call.dialect == "raw":
            return super().request(call, key)
        fields: Json = msgspec.json.decode(call.body)
        decoder: Callable[[], Decoder]
        if call.dialect == "openai-chat":
            body, decoder = chat(fields, call), partial(Chatted, call.model, call.id)
        else:
            body, decoder = embed(fields, call), partial(Embedded, call.model)
        request = super().request(call.moved(body=msgspec.json.encode(body)), key)
        return msgspec.structs.replace(request, decoder=decoder)


def chat(fields: Json, call: Call) -> Json:
    if (fields.get("n") or 1) != 1:
        raise InvalidRequest(
            f"n is {fields['n']}, but cohere returns one choice per request", param="n", hint="set n to 1"
        )
    body = {name: fields[name] for name in _SAME if fields.get(name) is not None}
    body |= {own: fields[name] for name, own in _RENAMED.items() if fields.get(name) is not None}
    if isinstance(body.get("stop_sequences"), str):
        body["stop_sequences"] = [body["stop_sequences"]]
    body["messages"] = [_message(message, call) for message in fields.get("messages") or ()]
    _tools(fields, body, call)
    match fields.get("response_format"):
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            body["response_format"] = {"type": "json_object", "schema": schema}
        case {"type": "json_object"}:
            body["response_format"] = {"type": "json_object"}
    if effort := fields.get("reasoning_effort"):
        body["thinking"] = {"type": "disabled" if effort == "none" else "enabled"}
        report(call, "reasoning_effort", "cohere can only enable or disable reasoning")
    for name in sorted(fields.keys() - _READ):
        if fields[name] is not None:
            report(call, name, "cohere has no such field")
    return body


def _message(message: Json, call: Call) -> Json:
    result = {name: message[name] for name in _OF_MESSAGES if message.get(name) is not None}
    for name in sorted(message.keys() - set(_OF_MESSAGES)):
        if message[name]:
            report(call, f"messages[].{name}", "cohere has no such field")
    if result.get("role") == "developer":
        result["role"] = "system"
    if result.get("tool_calls") and isinstance(result.get("content"), str):
        result["tool_plan"] = result.pop("content")  # Cohere's field for the text before tool calls
    return result


def _tools(fields: Json, body: Json, call: Call) -> None:
    tools = [tool for tool in fields.get("tools") or () if isinstance(tool, dict) and "function" in tool]
    match fields.get("tool_choice"):
        case "required":
            body["tool_choice"] = "REQUIRED"
        case "none":
            body["tool_choice"] = "NONE"
        case {"function": {"name": name}}:
            tools = [tool for tool in tools if tool["function"].get("name") == name]
            body["tool_choice"] = "REQUIRED"
            report(call, "tool_choice", "cohere cannot force one tool, so all others were removed")
    if tools:
        body["strict_tools"] = any(tool["function"].get("strict") for tool in tools)
        functions = ({n: v for n, v in tool["function"].items() if n != "strict"} for tool in tools)
        body["tools"] = [{"type": "function", "function": function} for function in functions]


def embed(fields: Json, call: Call) -> Json:
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
        report(call, "user", "cohere has no such field")
    return body
