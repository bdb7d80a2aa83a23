"""Converts chat messages to and from the canonical form."""

from __future__ import annotations

from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.field_reader import FieldReader, make_unknown_value_error, parse_content
from emberline.gateway.dialects.media import make_data_url, split_data_url

_AUDIO_FORMATS = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mp3": "mp3", "audio/mpeg": "mp3"}


def parse_message(raw: object, path: str) -> canonical.CanonicalMessage:
    fields = FieldReader(raw, path)
    match fields.require("role", str):
        case "system" | "developer" | "user" as role:
            parts, shape = _parse_message_content(fields)
            return canonical.CanonicalMessage(role, parts, shape, fields.unread)
        case "assistant":
            return parse_assistant(fields)
        case "tool":
            id = fields.require("tool_call_id", str)
            parts, shape = _parse_message_content(fields)
            return canonical.CanonicalMessage(
                "tool", [canonical.ToolResultContent(id, parts, shape=shape)], shape, fields.unread
            )
        case "function":
            return canonical.CanonicalMessage("tool", [canonical.OpaqueContent("function", dict(fields.unread))])
        case role:
            raise make_unknown_value_error(role, f"{path}.role", "system, developer, user, assistant, tool")


def parse_assistant(fields: FieldReader) -> canonical.CanonicalMessage:
    """Parse an assistant message, from a request or from a reply."""
    parts: list[canonical.Part] = []
    for name in ("reasoning_content", "reasoning"):
        if isinstance(fields.unread.get(name), str) and not parts:
            extra = {"type": name} if name == "reasoning" else {}
            parts.append(canonical.ReasoningContent(fields.unread.pop(name), "openai-chat", extra=extra))
    content, shape = _parse_message_content(fields)
    parts += content
    if (refusal := fields.read("refusal", str)) is not None:
        parts.append(canonical.RefusalContent(refusal))
    parts += fields.read_list("tool_calls", _parse_tool_call)
    return canonical.CanonicalMessage("assistant", parts, shape, fields.unread)


def _parse_tool_call(raw: object, path: str) -> canonical.Part:
    fields = FieldReader(raw, path)
    if fields.unread.get("type", "function") != "function":
        return canonical.OpaqueContent("custom", fields.unread)
    fields.unread.pop("type", None)
    id = fields.read("id", str, "")
    function = FieldReader(fields.require("function", dict), f"{path}.function")
    name, arguments = function.require("name", str), function.read("arguments", str, "")
    return canonical.ToolCallContent(
        id, name, arguments, {**fields.unread, **({"function": function.unread} if function.unread else {})}
    )


def _parse_message_content(fields: FieldReader) -> tuple[list[canonical.Part], str]:
    if "content" not in fields.unread:
        return [], "absent"
    match fields.unread.pop("content"):
        case None:
            return [], "null"
        case "":
            return [], "text"
        case content:
            return parse_content(content, fields.path_of("content"), _parse_part)


def _parse_part(raw: object, path: str) -> canonical.Part:
    fields = FieldReader(raw, path)
    kind = fields.require("type", str)
    match kind:
        case "text":
            return canonical.TextContent(fields.require("text", str), fields.unread)
        case "refusal":
            # The type in `extra` marks a refusal within the content list.
            return canonical.RefusalContent(fields.require("refusal", str), {"type": kind, **fields.unread})
        case "image_url":
            image = FieldReader(fields.require("image_url", dict), f"{path}.image_url")
            url, detail = image.require("url", str), image.read("detail", str)
            mime, data = split_data_url(url) or ("", "")
            return canonical.ImageContent(
                "" if data else url, data, mime, detail=detail, extra=_merge_unread_fields(fields, image, kind)
            )
        case "input_audio":
            audio = FieldReader(fields.require("input_audio", dict), f"{path}.input_audio")
            data, mime = audio.require("data", str), f"audio/{audio.require('format', str)}"
            return canonical.AudioContent(data, mime, _merge_unread_fields(fields, audio, kind))
        case "file":
            return _parse_file(fields, FieldReader(fields.require("file", dict), f"{path}.file"))
        case _:
            return canonical.OpaqueContent(kind, fields.whole)


def read_mistral_reasoning(row: canonical.Json) -> str:
    """Return the text of a Mistral thinking part, "" for any other part."""
    rows = row.get("thinking")
    if row.get("type") != "thinking" or not isinstance(rows, list):
        return ""
    return "".join(str(inner.get("text", "")) for inner in rows if isinstance(inner, dict))


def _merge_unread_fields(outer: FieldReader, inner: FieldReader, kind: str) -> canonical.Json:
    """Return the unread fields of a content part (`outer`) and of the object nested in it (`inner`)."""
    return {**outer.unread, kind: inner.unread} if inner.unread else outer.unread


def _parse_file(fields: FieldReader, file: FieldReader) -> canonical.FileContent:
    file_data = file.read("file_data", str, "")
    mime, data = split_data_url(file_data) or ("", file_data)
    file_id, name = file.read("file_id", str, ""), file.read("filename", str, "")
    return canonical.FileContent(
        data=data, mime=mime, file_id=file_id, name=name, extra=_merge_unread_fields(fields, file, "file")
    )


def render_message(message: canonical.CanonicalMessage) -> list[canonical.Json]:
    """Return the chat messages for a canonical message: one per tool result, then one with all other parts."""
    if message.role == "assistant":
        return [render_assistant(message)]
    rows = [row for part in message.parts if (row := _render_tool_result(part, message))]
    rest: list[canonical.Part] = [part for part in message.parts if not isinstance(part, canonical.ToolResultContent)]
    if message.role != "tool" and (rest or not rows):
        rows.append({"role": message.role, **_render_content(rest, message.shape), **message.extra})
    return rows


def _render_tool_result(part: canonical.Part, message: canonical.CanonicalMessage) -> canonical.Json | None:
    match part:
        case canonical.ToolResultContent():
            extra = message.extra if message.role == "tool" else {}
            return {"role": "tool", "tool_call_id": part.id, **_render_content(part.parts, part.shape), **extra}
        case canonical.OpaqueContent(kind="function"):
            return {"role": "function", **part.raw}
    return None


def render_assistant(message: canonical.CanonicalMessage) -> canonical.Json:
    result: canonical.Json = {"role": "assistant"}
    result |= _render_content([part for part in message.parts if _is_content_part(part)], message.shape)
    calls = []
    for part in message.parts:
        match part:
            case canonical.ReasoningContent():
                name = part.extra.get("type", "reasoning_content")
                result[name] = result.get(name, "") + part.text
            case canonical.RefusalContent() if not part.extra:
                result["refusal"] = part.text
            case canonical.ToolCallContent():
                calls.append(render_tool_call(part))
            case canonical.OpaqueContent(kind="custom"):
                calls.append(part.raw)
    if calls:
        result["tool_calls"] = calls
        if not result.get("content") and message.shape == "auto":
            result["content"] = None
    return {**result, **message.extra}


def _is_content_part(part: canonical.Part) -> bool:
    if isinstance(part, canonical.RefusalContent | canonical.OpaqueContent):
        return isinstance(part, canonical.RefusalContent) and bool(part.extra)
    return isinstance(
        part, canonical.TextContent | canonical.ImageContent | canonical.AudioContent | canonical.FileContent
    )


def render_tool_call(call: canonical.ToolCallContent) -> canonical.Json:
    function: canonical.Json = {"name": call.name, "arguments": call.arguments, **call.extra.get("function", {})}
    return {"id": call.id, "type": "function", **call.extra, "function": function}


def read_google_signature(call: canonical.ToolCallContent) -> str:
    match call.extra.get("extra_content"):
        case {"google": {"thought_signature": str(signature)}}:
            return signature
    return ""


def _render_content(parts: list[canonical.Part], shape: str) -> canonical.Json:
    if shape == "absent" and not parts:
        return {}
    if shape == "null" and not parts:
        return {"content": None}
    texts = [part.text for part in parts if isinstance(part, canonical.TextContent)]
    if shape != "list" and len(texts) == len(parts) <= 1:
        return {"content": "".join(texts)}
    return {"content": [result for part in parts if (result := _render_part(part)) is not None]}


def _render_part(part: canonical.Part) -> canonical.Json | None:
    match part:
        case canonical.TextContent():
            return {"type": "text", "text": part.text, **part.extra}
        case canonical.RefusalContent():
            return {"type": "refusal", "refusal": part.text, **part.extra}
        case canonical.ImageContent() if part.url or part.data:
            image = {"url": part.url or make_data_url(part.mime, part.data)}
            if part.detail is not None:
                image["detail"] = part.detail
            return _nest_part("image_url", image, part.extra)
        case canonical.AudioContent():
            format = _AUDIO_FORMATS.get(part.mime, part.mime.removeprefix("audio/"))
            return _nest_part("input_audio", {"data": part.data, "format": format}, part.extra)
        case canonical.FileContent():
            return _nest_part("file", _render_file(part), part.extra)
        case canonical.OpaqueContent():
            return part.raw
    return None


def _nest_part(kind: str, inner: canonical.Json, extra: canonical.Json) -> canonical.Json:
    return {"type": kind, **extra, kind: {**inner, **extra.get(kind, {})}}


def _render_file(file: canonical.FileContent) -> canonical.Json:
    result: canonical.Json = {}
    if file.data:
        result["file_data"] = make_data_url(file.mime, file.data) if file.mime else file.data
    if file.file_id:
        result["file_id"] = file.file_id
    if file.name:
        result["filename"] = file.name
    return result
