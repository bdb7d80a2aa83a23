"""Converts requests from Anthropic's wire format to Bedrock's Converse API."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from emberline.core.errors import InvalidRequest

ChangeCallback = Callable[[str, str], None]  # takes a field and why it was changed
Json = dict[str, Any]

_INFERENCE_FIELDS = {
    "max_tokens": "maxTokens",
    "temperature": "temperature",
    "top_p": "topP",
    "stop_sequences": "stopSequences",
}
_IMAGE_FORMATS = ("jpeg", "png", "gif", "webp")
_KNOWN_FIELDS = {
    *_INFERENCE_FIELDS,
    "model",
    "stream",
    "system",
    "messages",
    "tools",
    "tool_choice",
    "anthropic_version",
}
_CACHE_POINT: Json = {"cachePoint": {"type": "default"}}


def render_converse_request(fields: Json, on_change: ChangeCallback) -> Json:
    body: Json = {"messages": [_render_message(message, on_change) for message in fields.get("messages") or ()]}
    if system := _render_blocks(fields.get("system") or [], on_change):
        body["system"] = system
    if limits := {own: fields[name] for name, own in _INFERENCE_FIELDS.items() if fields.get(name) is not None}:
        body["inferenceConfig"] = limits
    if tools := _render_tools(fields, on_change):
        body["toolConfig"] = tools
    for name in fields.keys() - _KNOWN_FIELDS:
        if fields[name]:
            on_change(name, "Converse has no such field")
    return body


def _render_message(message: Json, on_change: ChangeCallback) -> Json:
    return {"role": message.get("role"), "content": _render_blocks(message.get("content") or [], on_change)}


def _render_blocks(content: str | list[Json], on_change: ChangeCallback) -> list[Json]:
    if isinstance(content, str):
        return [{"text": content}] if content else []
    result = []
    for block in content:
        if (rendered := _render_block(block, on_change)) is not None:
            result.append(rendered)
            result += [_CACHE_POINT] * bool(block.get("cache_control"))
    return result


def _render_block(block: Json, on_change: ChangeCallback) -> Json | None:
    match block:
        case {"type": "text", "text": text}:
            return {"text": text}
        case {"type": "image", "source": source}:
            return {"image": _render_image(source)}
        case {"type": "document", "source": source}:
            return {"document": {"name": str(block.get("title") or "document"), **_render_document(source)}}
        case {"type": "tool_use", "id": id, "name": name}:
            return {"toolUse": {"toolUseId": id, "name": name, "input": block.get("input") or {}}}
        case {"type": "tool_result", "tool_use_id": id}:
            content = _render_blocks(block.get("content") or "", on_change)
            status = "error" if block.get("is_error") else "success"
            return {"toolResult": {"toolUseId": id, "content": content, "status": status}}
        case {"type": "thinking", "thinking": text, "signature": str(signature)} if signature:
            return {"reasoningContent": {"reasoningText": {"text": text, "signature": signature}}}
        case {"type": "redacted_thinking", "data": data}:
            return {"reasoningContent": {"redactedContent": data}}
    on_change(f"messages[].content[].{block.get('type')}", "Converse has no such part")
    return None


def _render_image(source: Json) -> Json:
    kind = str(source.get("media_type")).removeprefix("image/")
    if source.get("type") != "base64" or kind not in _IMAGE_FORMATS:
        raise InvalidRequest(
            f"Bedrock's Converse API does not accept an image of type {source.get('type')}, {source.get('media_type')}",
            param="messages",
            hint="send the image as base64 data in jpeg, png, gif or webp",
        )
    return {"format": kind, "source": {"bytes": source.get("data")}}


def _render_document(source: Json) -> Json:
    match source:
        case {"type": "base64", "media_type": "application/pdf", "data": data}:
            return {"format": "pdf", "source": {"bytes": data}}
        case {"type": "text", "data": str(text)}:
            return {"format": "txt", "source": {"bytes": base64.b64encode(text.encode()).decode()}}
    raise InvalidRequest(
        f"Bedrock's Converse API does not accept a document of type {source.get('type')}, {source.get('media_type')}",
        param="messages",
        hint="send the document as a base64-encoded PDF or as text",
    )


def _render_tools(fields: Json, on_change: ChangeCallback) -> Json | None:
    tools = []
    for tool in fields.get("tools") or ():
        if "input_schema" not in tool:
            on_change(f"tools[].{tool.get('type')}", "Converse has no such tool")
            continue
        spec = {"name": tool.get("name"), "inputSchema": {"json": tool["input_schema"]}}
        if tool.get("description"):
            spec["description"] = tool["description"]
        tools.append({"toolSpec": spec})
    choice = fields.get("tool_choice") or {}
    if not tools or (choice.get("type") == "none" and not _has_tool_calls(fields)):
        return None
    result: Json = {"tools": tools}
    match choice:
        case {"type": "any" | "auto" as kind}:
            result["toolChoice"] = {kind: {}}
        case {"type": "tool", "name": name}:
            result["toolChoice"] = {"tool": {"name": name}}
        case {"type": "none"}:
            on_change("tool_choice", "Converse cannot disable tools that were called before")
    return result


def _has_tool_calls(fields: Json) -> bool:
    contents = (message.get("content") for message in fields.get("messages") or ())
    return any(
        block.get("type") == "tool_use" for content in contents if isinstance(content, list) for block in content
    )
