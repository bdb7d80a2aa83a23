"""Cohere: its second chat, which looks like OpenAI's and is not, and its embeddings."""

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
        """On its own paths it speaks as it does."""
        compatible = endpoint.removeprefix("compatibility/v1/")
        return "openai-chat" if compatible != endpoint and compatible == "chat/completions" else "raw"

    def request(self, call: Call, key: str | None) -> Outgoing:
        if not call.plain or call.dialect == "raw":
            return super().request(call, key)
        said: Json = msgspec.json.decode(call.body)
        decoder: Callable[[], Decoder]
        if call.dialect == "openai-chat":
            body, decoder = chat(said, call), partial(Chatted, call.model, call.id)
        else:
            body, decoder = embed(said, call), partial(Embedded, call.model)
        out = super().request(call.moved(body=msgspec.json.encode(body)), key)
        return msgspec.structs.replace(out, decoder=decoder)


def chat(said: Json, call: Call) -> Json:
    if (said.get("n") or 1) != 1:
        raise InvalidRequest(f"n is {said['n']}: cohere gives one answer a request", param="n", hint="1")
    body = {name: said[name] for name in _SAME if said.get(name) is not None}
    body |= {own: said[name] for name, own in _RENAMED.items() if said.get(name) is not None}
    if isinstance(body.get("stop_sequences"), str):
        body["stop_sequences"] = [body["stop_sequences"]]
    body["messages"] = [_message(message, call) for message in said.get("messages") or ()]
    _tools(said, body, call)
    match said.get("response_format"):
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            body["response_format"] = {"type": "json_object", "schema": schema}
        case {"type": "json_object"}:
            body["response_format"] = {"type": "json_object"}
    if effort := said.get("reasoning_effort"):
        body["thinking"] = {"type": "disabled" if effort == "none" else "enabled"}
        report(call, "reasoning_effort", "cohere knows only whether to think")
    for name in sorted(said.keys() - _READ):
        if said[name] is not None:
            report(call, name, "cohere has no such field")
    return body


def _message(message: Json, call: Call) -> Json:
    made = {name: message[name] for name in _OF_MESSAGES if message.get(name) is not None}
    for name in sorted(message.keys() - set(_OF_MESSAGES)):
        if message[name]:
            report(call, f"messages[].{name}", "cohere has no such field")
    if made.get("role") == "developer":
        made["role"] = "system"
    if made.get("tool_calls") and isinstance(made.get("content"), str):
        made["tool_plan"] = made.pop("content")  # before its calls a model only says what it means to do
    return made


def _tools(said: Json, body: Json, call: Call) -> None:
    tools = [tool for tool in said.get("tools") or () if isinstance(tool, dict) and "function" in tool]
    match said.get("tool_choice"):
        case "required":
            body["tool_choice"] = "REQUIRED"
        case "none":
            body["tool_choice"] = "NONE"
        case {"function": {"name": name}}:
            tools = [tool for tool in tools if tool["function"].get("name") == name]
            body["tool_choice"] = "REQUIRED"
            report(call, "tool_choice", "cohere was given this tool alone")
    if tools:
        body["strict_tools"] = any(tool["function"].get("strict") for tool in tools)
        functions = ({n: v for n, v in tool["function"].items() if n != "strict"} for tool in tools)
        body["tools"] = [{"type": "function", "function": function} for function in functions]


def embed(said: Json, call: Call) -> Json:
    texts = [said["input"]] if isinstance(said.get("input"), str) else said.get("input")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("cohere takes texts to embed, not tokens", param="input")
    kind = "base64" if said.get("encoding_format") == "base64" else "float"
    body = {"model": call.model, "texts": texts, "embedding_types": [kind]}
    body["input_type"] = said.get("input_type") or "search_document"
    if said.get("dimensions") is not None:
        body["output_dimension"] = said["dimensions"]
    if said.get("user"):
        report(call, "user", "cohere has no such field")
    return body
