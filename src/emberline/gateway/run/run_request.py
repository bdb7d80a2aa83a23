"""Requests of /ai/run: converts the input of Workers AI to a request of one of the OpenAI protocols."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from emberline.core.errors import InvalidRequest

RunEndpoint = Literal["chat/completions", "responses", "embeddings"]
Json = dict[str, Any]
_UNSUPPORTED = {"raw": "a prompt without a template", "lora": "an adapter", "image": "an image", "audio": "audio"}


class ProtocolRequest(msgspec.Struct, frozen=True):
    kind: RunEndpoint  # the endpoint
    body: Json


class EncodedRequest(msgspec.Struct, frozen=True):
    """A request encoded for one of the gateway's own endpoints."""

    kind: RunEndpoint
    body: bytes
    wants_json: bool  # the reply's text is JSON, to be decoded

    @property
    def path(self) -> str:
        return f"/v1/{self.kind}"


def encode_request(model: str, input: Json) -> EncodedRequest:
    """Return the encoded request for a model and its input.

    Raise InvalidRequest if the input is not supported.
    """
    request = translate_request(model, input)
    wants_json = isinstance(request.body.get("response_format"), dict)
    return EncodedRequest(request.kind, msgspec.json.encode(request.body), wants_json)


def translate_request(model: str, input: Json) -> ProtocolRequest:
    """Return the request for a model and its input.

    The fields of the input decide to which endpoint the request is sent. Raise InvalidRequest for an unsupported input.
    """
    for name, what in _UNSUPPORTED.items():
        if input.get(name):
            raise InvalidRequest(
                f"field {name} of the input is not supported: the gateway cannot send {what}",
                param=name,
                hint=f"remove {name}",
            )
    if "messages" in input or "prompt" in input:
        return ProtocolRequest("chat/completions", _build_chat_request(model, input))
    if "text" in input:
        rest = {name: value for name, value in input.items() if name not in ("text", "pooling")}
        if input.get("pooling"):
            raise InvalidRequest(
                f"pooling must not be set to {input['pooling']!r:.40}, because a model's pooling cannot be changed",
                param="pooling",
                hint="remove pooling",
            )
        return ProtocolRequest(
            "embeddings", {**rest, "model": model, "input": input["text"], "encoding_format": "float"}
        )
    if "input" in input:
        return ProtocolRequest("responses", {**input, "model": model})
    raise InvalidRequest(
        "the input must contain messages, prompt, text or input",
        param="messages",
        hint='send {"prompt": "..."} or {"messages": [...]}',
    )


def _build_chat_request(model: str, input: Json) -> Json:
    body = {name: value for name, value in input.items() if name != "prompt"} | {"model": model}
    if "messages" not in input:
        body["messages"] = [{"role": "user", "content": input["prompt"]}]
    if isinstance(tools := input.get("tools"), list):
        body["tools"] = [tool if _is_openai_tool(tool) else {"type": "function", "function": tool} for tool in tools]
    if isinstance(format := input.get("response_format"), dict) and format.get("type") == "json_schema":
        schema = format.get("json_schema")
        if isinstance(schema, dict) and "schema" not in schema:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
    if input.get("stream") is True:
        body["stream_options"] = {"include_usage": True}
    return body


def _is_openai_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and "function" in tool
