"""Converts chat messages to and from the canonical form."""

from __future__ import annotations

from emberline.gateway.dialects.fields import Fields, parse_content, unknown
from emberline.gateway.dialects.inner import (
    Audio,
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

_FORMATS = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mp3": "mp3", "audio/mpeg": "mp3"}


def parse_message(raw: object, path: str) -> Message:
    fields = Fields(raw, path)
    match fields.need("role", str):
        case "system" | "developer" | "user" as role:
            parts, shape = _content(fields)
            return Message(role, parts, shape, fields.left)
        case "assistant":
            return parse_assistant(fields)
        case "tool":
            id = fields.need("tool_call_id", str)
            parts, shape = _content(fields)
            return Message("tool", [ToolResult(id, parts, shape=shape)], shape, fields.left)
        case "function":
            return Message("tool", [Opaque("function", dict(fields.left))])
        case role:
            raise unknown(role, f"{path}.role", "system, developer, user, assistant, tool")


def parse_assistant(fields: Fields) -> Message:
    """Parse an assistant's message of a request or of a reply."""
    parts: list[Part] = []
    for name in ("reasoning_content", "reasoning"):
        if isinstance(fields.left.get(name), str) and not parts:
            extra = {"type": name} if name == "reasoning" else {}
            parts.append(Thinking(fields.left.pop(name), "openai-chat", extra=extra))
    content, shape = _content(fields)
    parts += content
    if (refusal := fields.take("refusal", str)) is not None:
        parts.append(Refusal(refusal))
    parts += fields.each("tool_calls", _parse_call)
    return Message("assistant", parts, shape, fields.left)


def _parse_call(raw: object, path: str) -> Part:
    fields = Fields(raw, path)
    if fields.left.get("type", "function") != "function":
        return Opaque("custom", fields.left)
    fields.left.pop("type", None)
    id = fields.take("id", str, "")
    function = Fields(fields.need("function", dict), f"{path}.function")
    name, arguments = function.need("name", str), function.take("arguments", str, "")
    return ToolCall(id, name, arguments, {**fields.left, **({"function": function.left} if function.left else {})})


def _content(fields: Fields) -> tuple[list[Part], str]:
    if "content" not in fields.left:
        return [], "absent"
    match fields.left.pop("content"):
        case None:
            return [], "null"
        case "":
            return [], "text"
        case content:
            return parse_content(content, fields.at("content"), _parse_part)


def _parse_part(raw: object, path: str) -> Part:
    fields = Fields(raw, path)
    kind = fields.need("type", str)
    match kind:
        case "text":
            return Text(fields.need("text", str), fields.left)
        case "refusal":
            return Refusal(
                fields.need("refusal", str), {"type": kind, **fields.left}
            )  # `extra` marks a refusal within the content list
        case "image_url":
            image = Fields(fields.need("image_url", dict), f"{path}.image_url")
            url, detail = image.need("url", str), image.take("detail", str)
            mime, data = split_data_url(url) or ("", "")
            return Image("" if data else url, data, mime, detail=detail, extra=_with_inner(fields, image, kind))
        case "input_audio":
            audio = Fields(fields.need("input_audio", dict), f"{path}.input_audio")
            data, mime = audio.need("data", str), f"audio/{audio.need('format', str)}"
            return Audio(data, mime, _with_inner(fields, audio, kind))
        case "file":
            return _parse_file(fields, Fields(fields.need("file", dict), f"{path}.file"))
        case _:
            return Opaque(kind, fields.whole)


def thought_of(row: Json) -> str:
    """Return the text of a Mistral thinking part, "" for any other part."""
    rows = row.get("thinking")
    if row.get("type") != "thinking" or not isinstance(rows, list):
        return ""
    return "".join(str(inner.get("text", "")) for inner in rows if isinstance(inner, dict))


def _with_inner(outer: Fields, inner: Fields, kind: str) -> Json:
    """Return the unread fields of a part and of the object nested in it."""
    return {**outer.left, kind: inner.left} if inner.left else outer.left


def _parse_file(fields: Fields, file: Fields) -> File:
    given = file.take("file_data", str, "")
    mime, data = split_data_url(given) or ("", given)
    file_id, name = file.take("file_id", str, ""), file.take("filename", str, "")
    return File(data=data, mime=mime, file_id=file_id, name=name, extra=_with_inner(fields, file, "file"))


def render_message(message: Message) -> list[Json]:
    """Return the chat messages for a canonical one: first its tool results, then the rest."""
    if message.role == "assistant":
        return [render_assistant(message)]
    rows = [row for part in message.parts if (row := _render_result(part, message))]
    rest: list[Part] = [part for part in message.parts if not isinstance(part, ToolResult)]
    if message.role != "tool" and (rest or not rows):
        rows.append({"role": message.role, **_with_content(rest, message.shape), **message.extra})
    return rows


def _render_result(part: Part, message: Message) -> Json | None:
    match part:
        case ToolResult():
            extra = message.extra if message.role == "tool" else {}
            return {"role": "tool", "tool_call_id": part.id, **_with_content(part.parts, part.shape), **extra}
        case Opaque(kind="function"):
            return {"role": "function", **part.raw}
    return None


def render_assistant(message: Message) -> Json:
    result: Json = {"role": "assistant"}
    result |= _with_content([part for part in message.parts if _is_content(part)], message.shape)
    calls = []
    for part in message.parts:
        match part:
            case Thinking():
                name = part.extra.get("type", "reasoning_content")
                result[name] = result.get(name, "") + part.text
            case Refusal() if not part.extra:
                result["refusal"] = part.text
            case ToolCall():
                calls.append(render_call(part))
            case Opaque(kind="custom"):
                calls.append(part.raw)
    if calls:
        result["tool_calls"] = calls
        if not result.get("content") and message.shape == "auto":
            result["content"] = None
    return {**result, **message.extra}


def _is_content(part: Part) -> bool:
    if isinstance(part, Refusal | Opaque):
        return isinstance(part, Refusal) and bool(part.extra)
    return isinstance(part, Text | Image | Audio | File)


def render_call(call: ToolCall) -> Json:
    function: Json = {"name": call.name, "arguments": call.arguments, **call.extra.get("function", {})}
    return {"id": call.id, "type": "function", **call.extra, "function": function}


def google_extra(signature: str) -> Json:
    """Return the field for a tool call's signature in Google's OpenAI-compatible API."""
    return {"extra_content": {"google": {"thought_signature": signature}}} if signature else {}


def google_seal(call: ToolCall) -> str:
    match call.extra.get("extra_content"):
        case {"google": {"thought_signature": str(signature)}}:
            return signature
    return ""


def _with_content(parts: list[Part], shape: str) -> Json:
    if shape == "absent" and not parts:
        return {}
    if shape == "null" and not parts:
        return {"content": None}
    texts = [part.text for part in parts if isinstance(part, Text)]
    if shape != "list" and len(texts) == len(parts) <= 1:
        return {"content": "".join(texts)}
    return {"content": [result for part in parts if (result := _render_part(part)) is not None]}


def _render_part(part: Part) -> Json | None:
    match part:
        case Text():
            return {"type": "text", "text": part.text, **part.extra}
        case Refusal():
            return {"type": "refusal", "refusal": part.text, **part.extra}
        case Image() if part.url or part.data:
            image = {"url": part.url or data_url(part.mime, part.data)}
            if part.detail is not None:
                image["detail"] = part.detail
            return _nested("image_url", image, part.extra)
        case Audio():
            format = _FORMATS.get(part.mime, part.mime.removeprefix("audio/"))
            return _nested("input_audio", {"data": part.data, "format": format}, part.extra)
        case File():
            return _nested("file", _render_file(part), part.extra)
        case Opaque():
            return part.raw
    return None


def _nested(kind: str, inner: Json, extra: Json) -> Json:
    return {"type": kind, **extra, kind: {**inner, **extra.get(kind, {})}}


def _render_file(file: File) -> Json:
    result: Json = {}
    if file.data:
        result["file_data"] = data_url(file.mime, file.data) if file.mime else file.data
    if file.file_id:
        result["file_id"] = file.file_id
    if file.name:
        result["filename"] = file.name
    return result
