"""Converts the items of a Responses request or reply to and from canonical messages."""

from __future__ import annotations

from functools import partial

from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.field_reader import FieldReader, check_type, make_unknown_value_error, parse_content
from emberline.gateway.dialects.media import make_data_url, split_data_url
from emberline.wire import signatures
from emberline.wire.citations import render_responses_citation


def parse_item(raw: object, path: str) -> canonical.CanonicalMessage:
    """Parse one item into one message; the caller joins adjacent messages with `merge_adjacent_messages`."""
    fields = FieldReader(raw, path)
    kind = fields.unread.get("type", "message")
    match kind:
        case "message":
            role = fields.require("role", str)
            if role not in ("user", "assistant", "system", "developer"):
                raise make_unknown_value_error(role, f"{path}.role", "user, assistant, system, developer")
            parts, shape = _parse_item_content(
                fields, "content", "output_text" if role == "assistant" else "input_text"
            )
            return canonical.CanonicalMessage(role, parts, shape, fields.unread)  # type: ignore[arg-type]  # checked above
        case "reasoning":
            return canonical.CanonicalMessage("assistant", [_parse_reasoning(fields)])
        case "function_call":
            id, name = fields.require("call_id", str), fields.require("name", str)
            arguments = fields.read("arguments", str, "")
            del fields.unread["type"]
            return canonical.CanonicalMessage(
                "assistant", [canonical.ToolCallContent(id, name, arguments, fields.unread)]
            )
        case "function_call_output":
            id = fields.read("call_id", str, "")
            parts, shape = _parse_item_content(fields, "output", "input_text")
            return canonical.CanonicalMessage(
                "tool", [canonical.ToolResultContent(id, parts, shape=shape)], "auto", fields.unread
            )
        case _:
            return canonical.CanonicalMessage("assistant", [canonical.OpaqueContent(str(kind), fields.unread)])


def _parse_reasoning(fields: FieldReader) -> canonical.ReasoningContent:
    signature, origin = signatures.decode_signature(fields.read("encrypted_content", str, ""), "openai-responses")
    name = "content" if fields.unread.get("content") else "summary"
    rows = check_type(fields.unread.get(name) or [], list, fields.path_of(name))
    text = "\n\n".join(str(row.get("text", "")) for row in rows if isinstance(row, dict))
    return canonical.ReasoningContent(text, origin, signature, extra=fields.unread)


def _parse_item_content(fields: FieldReader, name: str, default_type: str) -> tuple[list[canonical.Part], str]:
    return parse_content(fields.read_any(name), fields.path_of(name), partial(_parse_part, default_type=default_type))


def _parse_part(raw: object, path: str, default_type: str) -> canonical.Part:
    fields = FieldReader(raw, path)
    kind = fields.require("type", str)
    match kind:
        case "input_text" | "output_text":
            type_field = {} if kind == default_type else {"type": kind}
            return canonical.TextContent(fields.require("text", str), type_field | fields.unread)
        case "refusal":
            return canonical.RefusalContent(fields.require("refusal", str), fields.unread)
        case "input_image":
            url, detail = fields.read("image_url", str, ""), fields.read("detail", str)
            mime, data = split_data_url(url) or ("", "")
            return canonical.ImageContent(
                "" if data else url, data, mime, fields.read("file_id", str, ""), detail, fields.unread
            )
        case "input_file":
            file_data = fields.read("file_data", str, "")
            mime, data = split_data_url(file_data) or ("", file_data)
            url, file_id, name = [fields.read(field, str, "") for field in ("file_url", "file_id", "filename")]
            return canonical.FileContent(url, data, mime, file_id, name, extra=fields.unread)
        case _:
            return canonical.OpaqueContent(kind, fields.whole)


def render_items(message: canonical.CanonicalMessage) -> list[canonical.Json]:
    """Return the message's items in order; adjacent texts and images become one message item."""
    items: list[canonical.Json] = []
    content_parts: list[canonical.Part] = []
    for part in message.parts:
        if not isinstance(
            part,
            canonical.ReasoningContent
            | canonical.ToolCallContent
            | canonical.ToolResultContent
            | canonical.OpaqueContent,
        ) or _is_message_content(part):
            content_parts.append(part)
            continue
        items += _render_message(message, content_parts)
        content_parts = []
        items.append(_render_item(part, message.extra))
    if content_parts or not message.parts:
        items += _render_message(message, content_parts or None)
    return items


def _is_message_content(part: canonical.Part) -> bool:
    """Return whether an unknown part belongs inside a message item; other unknown parts become items."""
    return isinstance(part, canonical.OpaqueContent) and part.kind.startswith("input_")


def _render_message(message: canonical.CanonicalMessage, parts: list[canonical.Part] | None) -> list[canonical.Json]:
    if parts is not None and not parts:
        return []
    result: canonical.Json = {"role": message.role}
    default_type = "output_text" if message.role == "assistant" else "input_text"
    if parts or message.shape != "absent":
        result["content"] = _render_content(parts or [], message.shape, default_type)
    return [{**result, **message.extra}]


def _render_item(
    part: canonical.ReasoningContent
    | canonical.ToolCallContent
    | canonical.ToolResultContent
    | canonical.OpaqueContent,
    extra: canonical.Json,
) -> canonical.Json:
    match part:
        case canonical.ReasoningContent():
            return _render_reasoning(part)
        case canonical.ToolCallContent():
            call = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
            return {"type": "function_call", **call, **part.extra}
        case canonical.ToolResultContent():
            result: canonical.Json = {"type": "function_call_output"} | ({"call_id": part.id} if part.id else {})
            result["output"] = _render_content(part.parts, part.shape, "input_text")
            return {**result, **extra}
        case canonical.OpaqueContent():
            return part.raw


def _render_reasoning(part: canonical.ReasoningContent) -> canonical.Json:
    result: canonical.Json = {"type": "reasoning"}
    if not part.extra:
        result["summary"] = [{"type": "summary_text", "text": part.text}] if part.text else []
    if part.signature:
        result["encrypted_content"] = signatures.encode_signature(part.signature, part.origin, "openai-responses")
    return {**result, **part.extra}


def _render_content(parts: list[canonical.Part], shape: str, default_type: str) -> str | list[canonical.Json]:
    match parts:
        case [canonical.TextContent(text=text, extra=extra, citations=[])] if shape != "list" and not extra:
            return text
        case [] if shape == "auto":
            return ""
    return [result for part in parts if (result := _render_part(part, default_type))]


def _render_part(part: canonical.Part, default_type: str) -> canonical.Json:
    match part:
        case canonical.TextContent():
            annotations = (
                {"annotations": [render_responses_citation(citation) for citation in part.citations]}
                if part.citations
                else {}
            )
            return {"type": default_type, "text": part.text, **annotations, **part.extra}
        case canonical.RefusalContent():
            return {"type": "refusal", "refusal": part.text, **part.extra}
        case canonical.ImageContent():
            source = {"image_url": part.url or (make_data_url(part.mime, part.data) if part.data else "")}
            source |= {"file_id": part.file_id, "detail": part.detail or ""}
            return {"type": "input_image", **{name: value for name, value in source.items() if value}, **part.extra}
        case canonical.FileContent():
            data = make_data_url(part.mime, part.data) if part.mime else part.data
            source = {"file_data": data if part.data else "", "file_url": part.url, "file_id": part.file_id}
            source["filename"] = part.name
            return {"type": "input_file", **{name: value for name, value in source.items() if value}, **part.extra}
        case canonical.OpaqueContent():
            return part.raw
    raise AssertionError(f"a Responses item cannot contain a {type(part).__name__}")
