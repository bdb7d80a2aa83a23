"""Converts the items of a Responses request or reply to and from canonical messages."""

from __future__ import annotations

from functools import partial

from emberline.gateway.dialects import seals
from emberline.gateway.dialects.fields import Fields, expect, parse_content, unknown
from emberline.gateway.dialects.inner import (
    File,
    Image,
    Json,
    Message,
    Opaque,
    Part,
    Refusal,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from emberline.gateway.dialects.media import data_url, split_data_url
from emberline.gateway.dialects.responses.citations import render


def parse_item(raw: object, path: str) -> Message:
    """Parse one item into a separate message; `merge_adjacent` joins messages where required."""
    fields = Fields(raw, path)
    kind = fields.left.get("type", "message")
    match kind:
        case "message":
            role = fields.need("role", str)
            if role not in ("user", "assistant", "system", "developer"):
                raise unknown(role, f"{path}.role", "user, assistant, system, developer")
            parts, shape = _content(fields, "content", "output_text" if role == "assistant" else "input_text")
            return Message(role, parts, shape, fields.left)  # type: ignore[arg-type]  # checked above
        case "reasoning":
            return Message("assistant", [_parse_reasoning(fields)])
        case "function_call":
            id, name = fields.need("call_id", str), fields.need("name", str)
            arguments = fields.take("arguments", str, "")
            del fields.left["type"]
            return Message("assistant", [ToolCall(id, name, arguments, fields.left)])
        case "function_call_output":
            id = fields.take("call_id", str, "")
            parts, shape = _content(fields, "output", "input_text")
            return Message("tool", [ToolResult(id, parts, shape=shape)], "auto", fields.left)
        case _:
            return Message("assistant", [Opaque(str(kind), fields.left)])


def _parse_reasoning(fields: Fields) -> Thinking:
    signature, origin = seals.found(fields.take("encrypted_content", str, ""), "openai-responses")
    name = "content" if fields.left.get("content") else "summary"
    rows = expect(fields.left.get(name) or [], list, fields.at(name))
    text = "\n\n".join(str(row.get("text", "")) for row in rows if isinstance(row, dict))
    return Thinking(text, origin, signature, extra=fields.left)


def _content(fields: Fields, name: str, default_type: str) -> tuple[list[Part], str]:
    return parse_content(fields.raw(name), fields.at(name), partial(_parse_part, default_type=default_type))


def _parse_part(raw: object, path: str, default_type: str) -> Part:
    fields = Fields(raw, path)
    kind = fields.need("type", str)
    match kind:
        case "input_text" | "output_text":
            odd = {} if kind == default_type else {"type": kind}
            return Text(fields.need("text", str), odd | fields.left)
        case "refusal":
            return Refusal(fields.need("refusal", str), fields.left)
        case "input_image":
            url, detail = fields.take("image_url", str, ""), fields.take("detail", str)
            mime, data = split_data_url(url) or ("", "")
            return Image("" if data else url, data, mime, fields.take("file_id", str, ""), detail, fields.left)
        case "input_file":
            given = fields.take("file_data", str, "")
            mime, data = split_data_url(given) or ("", given)
            url, file_id, name = [fields.take(field, str, "") for field in ("file_url", "file_id", "filename")]
            return File(url, data, mime, file_id, name, extra=fields.left)
        case _:
            return Opaque(kind, fields.whole)


def render_items(message: Message) -> list[Json]:
    """Return the message's items in order; adjacent texts and images become one message item."""
    items: list[Json] = []
    together: list[Part] = []
    for part in message.parts:
        if not isinstance(part, Thinking | ToolCall | ToolResult | Opaque) or _inside(part):
            together.append(part)
            continue
        items += _render_message(message, together)
        together = []
        items.append(_render_single(part, message.extra))
    if together or not message.parts:
        items += _render_message(message, together or None)
    return items


def _inside(part: Part) -> bool:
    """Return whether an unknown part belongs to a message's content; other unknown parts are items."""
    return isinstance(part, Opaque) and part.kind.startswith("input_")


def _render_message(message: Message, parts: list[Part] | None) -> list[Json]:
    if parts is not None and not parts:
        return []
    result: Json = {"role": message.role}
    default_type = "output_text" if message.role == "assistant" else "input_text"
    if parts or message.shape != "absent":
        result["content"] = _render_content(parts or [], message.shape, default_type)
    return [{**result, **message.extra}]


def _render_single(part: Thinking | ToolCall | ToolResult | Opaque, extra: Json) -> Json:
    match part:
        case Thinking():
            return _render_reasoning(part)
        case ToolCall():
            call = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
            return {"type": "function_call", **call, **part.extra}
        case ToolResult():
            result: Json = {"type": "function_call_output"} | ({"call_id": part.id} if part.id else {})
            result["output"] = _render_content(part.parts, part.shape, "input_text")
            return {**result, **extra}
        case Opaque():
            return part.raw


def _render_reasoning(part: Thinking) -> Json:
    result: Json = {"type": "reasoning"}
    if not part.extra:
        result["summary"] = [{"type": "summary_text", "text": part.text}] if part.text else []
    if part.seal:
        result["encrypted_content"] = seals.shown(part.seal, part.family, "openai-responses")
    return {**result, **part.extra}


def _render_content(parts: list[Part], shape: str, default_type: str) -> str | list[Json]:
    match parts:
        case [Text(text=text, extra=extra, citations=[])] if shape != "list" and not extra:
            return text
        case [] if shape == "auto":
            return ""
    return [result for part in parts if (result := _render_part(part, default_type))]


def _render_part(part: Part, default_type: str) -> Json:
    match part:
        case Text():
            cited = {"annotations": [render(citation) for citation in part.citations]} if part.citations else {}
            return {"type": default_type, "text": part.text, **cited, **part.extra}
        case Refusal():
            return {"type": "refusal", "refusal": part.text, **part.extra}
        case Image():
            given = {"image_url": part.url or (data_url(part.mime, part.data) if part.data else "")}
            given |= {"file_id": part.file_id, "detail": part.detail or ""}
            return {"type": "input_image", **{name: value for name, value in given.items() if value}, **part.extra}
        case File():
            data = data_url(part.mime, part.data) if part.mime else part.data
            given = {"file_data": data if part.data else "", "file_url": part.url, "file_id": part.file_id}
            given["filename"] = part.name
            return {"type": "input_file", **{name: value for name, value in given.items() if value}, **part.extra}
        case Opaque():
            return part.raw
    raise AssertionError(f"{type(part).__name__} was not adapted for Responses")
