"""Converts Anthropic messages to and from the canonical form."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from emberline.gateway.dialects import seals
from emberline.gateway.dialects.fields import Fields, parse_content, unknown
from emberline.gateway.dialects.inner import (
    File,
    Image,
    Json,
    Message,
    Opaque,
    Part,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from emberline.net.notjson import NOT_JSON

_NOT_IN_IDS = re.compile(r"[^a-zA-Z0-9_-]")


def parse_message(raw: object, path: str) -> Message:
    fields = Fields(raw, path)
    role = fields.need("role", str)
    if role not in ("user", "assistant", "system"):
        raise unknown(role, f"{path}.role", "user, assistant, system")
    parts, shape = parse_blocks(fields.raw("content"), f"{path}.content")
    return Message(role, parts, shape, fields.left)  # type: ignore[arg-type]  # checked above


def parse_blocks(content: object, path: str) -> tuple[list[Part], str]:
    return parse_content(content, path, _parse_block)


def _parse_block(raw: object, path: str) -> Part:
    fields = Fields(raw, path)
    kind = fields.need("type", str)
    match kind:
        case "text":
            return Text(fields.need("text", str), fields.left)
        case "thinking":
            signature, origin = seals.found(fields.take("signature", str, ""), "anthropic")
            return Thinking(fields.take("thinking", str, ""), origin, signature, extra=fields.left)
        case "redacted_thinking":
            return Thinking("", "anthropic", fields.need("data", str), redacted=True, extra=fields.left)
        case "tool_use":
            arguments = msgspec.json.encode(fields.take("input", dict, {})).decode()
            return ToolCall(fields.need("id", str), fields.need("name", str), arguments, fields.left)
        case "tool_result":
            parts, shape = parse_blocks(fields.raw("content"), f"{path}.content")
            id, failed = fields.need("tool_use_id", str), fields.take("is_error", bool)
            return ToolResult(id, parts, is_error=failed, shape=shape, extra=fields.left)
        case "image" | "document" if isinstance(fields.left.get("source"), dict):
            return _parse_source(kind, fields)
        case _:
            return Opaque(kind, fields.whole)


def _parse_source(kind: str, fields: Fields) -> Part:
    whole = dict(fields.left, type=kind)
    match fields.left.pop("source"):
        case {"type": "base64", "data": str(data), "media_type": str(mime), **rest} if not rest:
            given: Json = {"data": data, "mime": mime}
        case {"type": "url", "url": str(url), **rest} if not rest:
            given = {"url": url}
        case {"type": "file", "file_id": str(file_id), **rest} if not rest:
            given = {"file_id": file_id}
        case {"type": "text", "data": str(data), "media_type": "text/plain", **rest} if kind == "document" and not rest:
            given = {"data": data, "mime": "text/plain", "plain": True}
        case _:
            return Opaque(kind, whole)
    if kind == "image":
        return Image(**given, extra=fields.left)
    return File(**given, name=fields.take("title", str, ""), extra=fields.left)


def render_content(parts: list[Part], shape: str) -> str | list[Json]:
    match parts:
        case [Text(text=text, extra=extra)] if shape != "list" and not extra:
            return text
    return [render_part(part) for part in parts]


def render_part(part: Part) -> Json:
    match part:
        case Text():
            return {"type": "text", "text": part.text, **part.extra}
        case Thinking(redacted=True):
            return {"type": "redacted_thinking", "data": part.seal, **part.extra}
        case Thinking():
            signature = seals.shown(part.seal, part.family, "anthropic")
            return {"type": "thinking", "thinking": part.text, "signature": signature, **part.extra}
        case ToolCall():
            call = {"id": tool_id(part.id), "name": part.name, "input": arguments_of(part)}
            return {"type": "tool_use", **call, **part.extra}
        case ToolResult():
            return _render_result(part)
        case Image() | File():
            return _render_source(part)
        case Opaque():
            return part.raw
    raise AssertionError(f"{type(part).__name__} was not adapted for Anthropic")


def _render_result(result: ToolResult) -> Json:
    block: Json = {"type": "tool_result", "tool_use_id": tool_id(result.id)}
    if result.parts or result.shape in ("text", "list"):
        block["content"] = render_content(result.parts, result.shape)
    if result.is_error is not None:
        block["is_error"] = result.is_error
    return {**block, **result.extra}


def _render_source(part: Image | File) -> Json:
    if part.data and isinstance(part, File) and part.plain:
        source = {"type": "text", "media_type": "text/plain", "data": part.data}
    elif part.data:
        source = {"type": "base64", "media_type": part.mime, "data": part.data}
    else:
        source = {"type": "url", "url": part.url} if part.url else {"type": "file", "file_id": part.file_id}
    result: Json = {"type": "document" if isinstance(part, File) else "image", "source": source}
    if isinstance(part, File) and part.name:
        result["title"] = part.name
    return {**result, **part.extra}


def tool_id(id: str) -> str:
    """Return the id with the characters replaced that Anthropic rejects; equal ids stay equal."""
    return _NOT_IN_IDS.sub("_", id)


def arguments_of(call: ToolCall) -> Json:
    """Return the call's arguments; {} if they are not a JSON object, as after a reply that was cut off."""
    return object_of(call.arguments) or {}


def object_of(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except NOT_JSON:
        return None
