"""Converts Anthropic messages to and from the canonical form."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.gateway.dialects.canonical import (
    CanonicalMessage,
    FileContent,
    ImageContent,
    Json,
    OpaqueContent,
    Part,
    ReasoningContent,
    TextContent,
    ToolCallContent,
    ToolResultContent,
)
from emberline.gateway.dialects.field_reader import FieldReader, make_unknown_value_error, parse_content
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire import signatures
from emberline.wire.anthropic import make_safe_tool_id


def parse_message(raw: object, path: str) -> CanonicalMessage:
    fields = FieldReader(raw, path)
    role = fields.require("role", str)
    if role not in ("user", "assistant", "system"):
        raise make_unknown_value_error(role, f"{path}.role", "user, assistant, system")
    parts, shape = parse_blocks(fields.take_any("content"), f"{path}.content")
    return CanonicalMessage(role, parts, shape, fields.unread)  # type: ignore[arg-type]  # checked above


def parse_blocks(content: object, path: str) -> tuple[list[Part], str]:
    return parse_content(content, path, _parse_block)


def _parse_block(raw: object, path: str) -> Part:
    fields = FieldReader(raw, path)
    kind = fields.require("type", str)
    match kind:
        case "text":
            return TextContent(fields.require("text", str), fields.unread)
        case "thinking":
            signature, origin = signatures.decode_signature(fields.take("signature", str, ""), "anthropic")
            return ReasoningContent(fields.take("thinking", str, ""), origin, signature, extra=fields.unread)
        case "redacted_thinking":
            return ReasoningContent("", "anthropic", fields.require("data", str), redacted=True, extra=fields.unread)
        case "tool_use":
            arguments = msgspec.json.encode(fields.take("input", dict, {})).decode()
            return ToolCallContent(fields.require("id", str), fields.require("name", str), arguments, fields.unread)
        case "tool_result":
            parts, shape = parse_blocks(fields.take_any("content"), f"{path}.content")
            id, is_error = fields.require("tool_use_id", str), fields.take("is_error", bool)
            return ToolResultContent(id, parts, is_error=is_error, shape=shape, extra=fields.unread)
        case "image" | "document" if isinstance(fields.unread.get("source"), dict):
            return _parse_source(kind, fields)
        case _:
            return OpaqueContent(kind, fields.whole)


def _parse_source(kind: str, fields: FieldReader) -> Part:
    original = dict(fields.unread, type=kind)
    match fields.unread.pop("source"):
        case {"type": "base64", "data": str(data), "media_type": str(mime), **rest} if not rest:
            source: Json = {"data": data, "mime": mime}
        case {"type": "url", "url": str(url), **rest} if not rest:
            source = {"url": url}
        case {"type": "file", "file_id": str(file_id), **rest} if not rest:
            source = {"file_id": file_id}
        case {"type": "text", "data": str(data), "media_type": "text/plain", **rest} if kind == "document" and not rest:
            source = {"data": data, "mime": "text/plain", "plain": True}
        case _:
            return OpaqueContent(kind, original)
    if kind == "image":
        return ImageContent(**source, extra=fields.unread)
    return FileContent(**source, name=fields.take("title", str, ""), extra=fields.unread)


def render_content(parts: list[Part], shape: str) -> str | list[Json]:
    match parts:
        case [TextContent(text=text, extra=extra)] if shape != "list" and not extra:
            return text
    return [render_part(part) for part in parts]


def render_part(part: Part) -> Json:
    match part:
        case TextContent():
            return {"type": "text", "text": part.text, **part.extra}
        case ReasoningContent(redacted=True):
            return {"type": "redacted_thinking", "data": part.signature, **part.extra}
        case ReasoningContent():
            signature = signatures.encode_signature(part.signature, part.origin, "anthropic")
            return {"type": "thinking", "thinking": part.text, "signature": signature, **part.extra}
        case ToolCallContent():
            call = {"id": make_safe_tool_id(part.id), "name": part.name, "input": parse_arguments(part)}
            return {"type": "tool_use", **call, **part.extra}
        case ToolResultContent():
            return _render_tool_result(part)
        case ImageContent() | FileContent():
            return _render_source(part)
        case OpaqueContent():
            return part.raw
    raise AssertionError(f"an Anthropic message cannot contain a {type(part).__name__}")


def _render_tool_result(result: ToolResultContent) -> Json:
    block: Json = {"type": "tool_result", "tool_use_id": make_safe_tool_id(result.id)}
    if result.parts or result.shape in ("text", "list"):
        block["content"] = render_content(result.parts, result.shape)
    if result.is_error is not None:
        block["is_error"] = result.is_error
    return {**block, **result.extra}


def _render_source(part: ImageContent | FileContent) -> Json:
    if part.data and isinstance(part, FileContent) and part.plain:
        source = {"type": "text", "media_type": "text/plain", "data": part.data}
    elif part.data:
        source = {"type": "base64", "media_type": part.mime, "data": part.data}
    else:
        source = {"type": "url", "url": part.url} if part.url else {"type": "file", "file_id": part.file_id}
    result: Json = {"type": "document" if isinstance(part, FileContent) else "image", "source": source}
    if isinstance(part, FileContent) and part.name:
        result["title"] = part.name
    return {**result, **part.extra}


def parse_arguments(call: ToolCallContent) -> Json:
    """Return the call's arguments, or {} if they are not a JSON object, as in a reply that was cut off."""
    return parse_object(call.arguments) or {}


def parse_object(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except JSON_DECODE_ERRORS:
        return None
