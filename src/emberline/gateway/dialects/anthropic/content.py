"""Converts Anthropic messages to and from the canonical form."""

from __future__ import annotations

from typing import Any

import msgspec

from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.field_reader import FieldReader, make_unknown_value_error, parse_content
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.wire import signatures
from emberline.wire.anthropic import make_safe_tool_id


def parse_message(raw: object, path: str) -> canonical.CanonicalMessage:
    fields = FieldReader(raw, path)
    role = fields.require("role", str)
    if role not in ("user", "assistant", "system"):
        raise make_unknown_value_error(role, f"{path}.role", "user, assistant, system")
    parts, shape = parse_blocks(fields.read_any("content"), f"{path}.content")
    return canonical.CanonicalMessage(role, parts, shape, fields.unread)  # type: ignore[arg-type]  # checked above


def parse_blocks(content: object, path: str) -> tuple[list[canonical.Part], str]:
    return parse_content(content, path, _parse_block)


def _parse_block(raw: object, path: str) -> canonical.Part:
    fields = FieldReader(raw, path)
    kind = fields.require("type", str)
    match kind:
        case "text":
            return canonical.TextContent(fields.require("text", str), fields.unread)
        case "thinking":
            signature, origin = signatures.decode_signature(fields.read("signature", str, ""), "anthropic")
            return canonical.ReasoningContent(fields.read("thinking", str, ""), origin, signature, extra=fields.unread)
        case "redacted_thinking":
            return canonical.ReasoningContent(
                "", "anthropic", fields.require("data", str), redacted=True, extra=fields.unread
            )
        case "tool_use":
            arguments = msgspec.json.encode(fields.read("input", dict, {})).decode()
            return canonical.ToolCallContent(
                fields.require("id", str), fields.require("name", str), arguments, fields.unread
            )
        case "tool_result":
            parts, shape = parse_blocks(fields.read_any("content"), f"{path}.content")
            id, is_error = fields.require("tool_use_id", str), fields.read("is_error", bool)
            return canonical.ToolResultContent(id, parts, is_error=is_error, shape=shape, extra=fields.unread)
        case "image" | "document" if isinstance(fields.unread.get("source"), dict):
            return _parse_source(kind, fields)
        case _:
            return canonical.OpaqueContent(kind, fields.whole)


def _parse_source(kind: str, fields: FieldReader) -> canonical.Part:
    original = dict(fields.unread, type=kind)
    match fields.unread.pop("source"):
        case {"type": "base64", "data": str(data), "media_type": str(mime), **rest} if not rest:
            source: canonical.Json = {"data": data, "mime": mime}
        case {"type": "url", "url": str(url), **rest} if not rest:
            source = {"url": url}
        case {"type": "file", "file_id": str(file_id), **rest} if not rest:
            source = {"file_id": file_id}
        case {"type": "text", "data": str(data), "media_type": "text/plain", **rest} if kind == "document" and not rest:
            source = {"data": data, "mime": "text/plain", "plain": True}
        case _:
            return canonical.OpaqueContent(kind, original)
    if kind == "image":
        return canonical.ImageContent(**source, extra=fields.unread)
    return canonical.FileContent(**source, name=fields.read("title", str, ""), extra=fields.unread)


def render_content(parts: list[canonical.Part], shape: str) -> str | list[canonical.Json]:
    match parts:
        case [canonical.TextContent(text=text, extra=extra)] if shape != "list" and not extra:
            return text
    return [render_part(part) for part in parts]


def render_part(part: canonical.Part) -> canonical.Json:
    match part:
        case canonical.TextContent():
            return {"type": "text", "text": part.text, **part.extra}
        case canonical.ReasoningContent(redacted=True):
            return {"type": "redacted_thinking", "data": part.signature, **part.extra}
        case canonical.ReasoningContent():
            signature = signatures.encode_signature(part.signature, part.origin, "anthropic")
            return {"type": "thinking", "thinking": part.text, "signature": signature, **part.extra}
        case canonical.ToolCallContent():
            call = {"id": make_safe_tool_id(part.id), "name": part.name, "input": parse_arguments(part)}
            return {"type": "tool_use", **call, **part.extra}
        case canonical.ToolResultContent():
            return _render_tool_result(part)
        case canonical.ImageContent() | canonical.FileContent():
            return _render_source(part)
        case canonical.OpaqueContent():
            return part.raw
    raise AssertionError(f"an Anthropic message cannot contain a {type(part).__name__}")


def _render_tool_result(result: canonical.ToolResultContent) -> canonical.Json:
    block: canonical.Json = {"type": "tool_result", "tool_use_id": make_safe_tool_id(result.id)}
    if result.parts or result.shape in ("text", "list"):
        block["content"] = render_content(result.parts, result.shape)
    if result.is_error is not None:
        block["is_error"] = result.is_error
    return {**block, **result.extra}


def _render_source(part: canonical.ImageContent | canonical.FileContent) -> canonical.Json:
    if part.data and isinstance(part, canonical.FileContent) and part.plain:
        source = {"type": "text", "media_type": "text/plain", "data": part.data}
    elif part.data:
        source = {"type": "base64", "media_type": part.mime, "data": part.data}
    else:
        source = {"type": "url", "url": part.url} if part.url else {"type": "file", "file_id": part.file_id}
    result: canonical.Json = {
        "type": "document" if isinstance(part, canonical.FileContent) else "image",
        "source": source,
    }
    if isinstance(part, canonical.FileContent) and part.name:
        result["title"] = part.name
    return {**result, **part.extra}


def parse_arguments(call: canonical.ToolCallContent) -> canonical.Json:
    """Return the call's arguments, or {} if they are not a JSON object, as in a reply that was cut off."""
    return parse_object(call.arguments) or {}


def parse_object(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except JSON_DECODE_ERRORS:
        return None
