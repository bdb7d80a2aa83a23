"""Question: what Workers AI would be asked, as one of the protocols asks it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from emberline.core.errors import InvalidRequest

Kind = Literal["chat/completions", "responses", "embeddings"]
Json = dict[str, Any]
_CANNOT = {"raw": "a prompt without a template", "lora": "an adapter", "image": "a picture", "audio": "sound"}


class Question(msgspec.Struct, frozen=True):
    kind: Kind  # the endpoint
    body: Json


class WrittenQuestion(msgspec.Struct, frozen=True):
    """A question as it is sent."""

    kind: Kind
    body: bytes
    wants_json: bool  # the answer's text is to be JSON

    @property
    def path(self) -> str:
        return f"/v1/{self.kind}"


def written(model: str, said: Json) -> WrittenQuestion:
    asked = question(model, said)
    wants_json = isinstance(asked.body.get("response_format"), dict)
    return WrittenQuestion(asked.kind, msgspec.json.encode(asked.body), wants_json)


def question(model: str, said: Json) -> Question:
    """By the shape of the input: messages or a prompt, a text to embed, or what the Responses API takes."""
    for name, what in _CANNOT.items():
        if said.get(name):
            raise InvalidRequest(f"{name}: {what} is not taken here", param=name)
    if "messages" in said or "prompt" in said:
        return Question("chat/completions", _chat(model, said))
    if "text" in said:
        rest = {name: value for name, value in said.items() if name not in ("text", "pooling")}
        if said.get("pooling"):
            raise InvalidRequest("pooling is the model's own here", param="pooling")
        return Question("embeddings", {**rest, "model": model, "input": said["text"], "encoding_format": "float"})
    if "input" in said:
        return Question("responses", {**said, "model": model})
    raise InvalidRequest("the input has none of messages, prompt, text and input", param="messages")


def _chat(model: str, said: Json) -> Json:
    body = {name: value for name, value in said.items() if name != "prompt"} | {"model": model}
    if "messages" not in said:
        body["messages"] = [{"role": "user", "content": said["prompt"]}]
    if isinstance(tools := said.get("tools"), list):
        body["tools"] = [tool if _is_openai(tool) else {"type": "function", "function": tool} for tool in tools]
    if isinstance(form := said.get("response_format"), dict) and form.get("type") == "json_schema":
        schema = form.get("json_schema")
        if isinstance(schema, dict) and "schema" not in schema:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
    if said.get("stream") is True:
        body["stream_options"] = {"include_usage": True}
    return body


def _is_openai(tool: Any) -> bool:
    return isinstance(tool, dict) and "function" in tool
