"""Converts Gemini's contents to and from canonical messages.

Gemini's tool calls may have no ids. Generated ids follow from the call's position, so that they are the same each time,
and are removed on the way back. A result without an id answers the first open call of its name.
"""

from __future__ import annotations

import base64
import binascii

import msgspec

from emberline.gateway.dialects import seals
from emberline.gateway.dialects.anthropic.content import arguments_of, object_of
from emberline.gateway.dialects.fields import Fields, unknown
from emberline.gateway.dialects.inner import (
    Audio,
    File,
    Image,
    Json,
    Message,
    Opaque,
    Part,
    Spoken,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from emberline.gateway.dialects.media import mime_of

MADE = "gemini-"  # prefix of ids that Gemini did not assign
FOREIGN_SEAL = "skip_thought_signature_validator"  # Google's documented value for calls that Gemini did not make


class ContentsParser:
    """Parses the contents of one request or one reply."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = MADE + prefix
        self._calls = 0
        self._open: list[ToolCall] = []  # calls without a result

    def message(self, raw: object, path: str) -> Message:
        fields = Fields(raw, path)
        role = fields.left.get("role") or "user"
        if role not in ("user", "model", "function", "system"):
            raise unknown(role, f"{path}.role", "user, model")
        rows = fields.take("parts", list, [])
        parts = [part for index, row in enumerate(rows) for part in self.part(row, f"{path}.parts[{index}]")]
        return Message("assistant" if role == "model" else "user", parts, "list", fields.left)

    def part(self, raw: object, path: str) -> list[Part]:
        fields = Fields(raw, path)
        if (text := fields.take("text", str)) is not None:
            if fields.left.get("thought"):
                del fields.left["thought"]
                signature, origin = found_seal(fields.take("thoughtSignature", str, ""))
                return [Thinking(text, origin, signature, extra=fields.left)]
            return [Text(text, fields.left)]
        if (call := fields.take("functionCall", dict)) is not None:
            return [self._call(Fields(call, f"{path}.functionCall"), fields)]
        if (result := fields.take("functionResponse", dict)) is not None:
            return [self._result(Fields(result, f"{path}.functionResponse"), fields)]
        for name, place in (("inlineData", "data"), ("fileData", "fileUri")):
            if (media := fields.take(name, dict)) is not None:
                return [_parse_media(Fields(media, f"{path}.{name}"), place, fields.left)]
        kind = next(iter(fields.left), "part")
        return [Opaque(kind, fields.left)]

    def _call(self, call: Fields, fields: Fields) -> ToolCall:
        id = call.take("id", str) or f"{self._prefix}{self._calls}"
        self._calls += 1
        arguments = msgspec.json.encode(call.take("args", dict, {})).decode()
        result = ToolCall(id, call.need("name", str), arguments, fields.left | call.left)
        self._open.append(result)
        return result

    def _result(self, result: Fields, fields: Fields) -> ToolResult:
        id, name = result.take("id", str, ""), result.need("name", str)
        answered = next((call for call in self._open if (call.id == id if id else call.name == name)), None)
        if answered is not None:
            self._open.remove(answered)
            id = answered.id
        response = result.take("response", dict, {})
        text, shape = _told(response)
        parts: list[Part] = [Text(text)]
        for row in result.take("parts", list, []):
            parts += self.part(row, f"{result.path}.parts")
        failed = True if shape == "error" else None
        return ToolResult(id or f"{MADE}{name}", parts, name, failed, shape, fields.left | result.left)


def _told(response: Json) -> tuple[str, str]:
    """Return the text of a function response, and the shape in which it was wrapped."""
    if len(response) == 1:
        for name in ("output", "result", "error"):
            if isinstance(response.get(name), str):
                return response[name], name
    return msgspec.json.encode(response).decode(), "object"


def _parse_media(fields: Fields, place: str, extra: Json) -> Part:
    given, mime = fields.need(place, str), fields.take("mimeType", str, "")
    name = fields.take("displayName", str, "")
    kept = extra | fields.left
    data, url = (given, "") if place == "data" else ("", given)
    if mime.startswith("image/") and not name:
        return Image(url, data, mime, extra=kept)
    if mime.startswith("audio/") and data and not name:
        return Audio(data, mime, kept)
    return File(url, data, mime, name=name, extra=kept)


def found_seal(signature: str) -> tuple[str, Spoken]:
    """Return a signature and its origin; those of other origins are wrapped in base64."""
    try:
        return _foreign(base64.b64decode(signature, validate=True).decode()) or (signature, "gemini")
    except (binascii.Error, UnicodeDecodeError):
        return signature, "gemini"


def _foreign(text: str) -> tuple[str, Spoken] | None:
    signature, origin = seals.found(text, "gemini")
    return (signature, origin) if origin != "gemini" else None


def shown_seal(signature: str, origin: Spoken) -> str:
    if not signature or origin == "gemini":
        return signature
    return base64.b64encode(seals.shown(signature, origin, "gemini").encode()).decode()


def render_parts(parts: list[Part], names: dict[str, str]) -> list[Json]:
    """Render parts; `names` maps call ids to function names, which results must repeat.

    A signature without text belongs to the call after it.
    """
    rows: list[Json] = []
    signature = ""
    for part in parts:
        if isinstance(part, Thinking) and not part.text and not part.extra:
            signature = part.seal
            continue
        row = _render_part(part, names)
        if isinstance(part, ToolCall) and signature:
            row["thoughtSignature"] = signature
            signature = ""
        rows.append(row)
    return rows


def _render_part(part: Part, names: dict[str, str]) -> Json:
    match part:
        case Text():
            return {"text": part.text, **part.extra}
        case Thinking():
            signed = {"thoughtSignature": shown_seal(part.seal, part.family)} if part.seal else {}
            return {"text": part.text, "thought": True, **signed, **part.extra}
        case ToolCall():
            signature = {name: part.extra[name] for name in part.extra if name in _BESIDE}
            inside = {name: value for name, value in part.extra.items() if name not in _BESIDE}
            call = {**_id(part.id), "name": part.name, "args": arguments_of(part), **inside}
            return {"functionCall": call, **signature}
        case ToolResult():
            return _render_result(part, names)
        case Image() | Audio() | File():
            return _render_media(part)
        case Opaque():
            return part.raw
    raise AssertionError(f"{type(part).__name__} was not adapted for Gemini")


_BESIDE = ("thoughtSignature", "partMetadata")  # fields of the part itself; all others belong to the call in it


def _id(id: str) -> Json:
    return {} if not id or id.startswith(MADE) else {"id": id}


def _render_result(result: ToolResult, names: dict[str, str]) -> Json:
    texts = [part.text for part in result.parts if isinstance(part, Text)]
    rest = [_render_part(part, names) for part in result.parts if not isinstance(part, Text)]
    text = "\n".join(texts)
    if result.shape == "object":
        response: Json = object_of(text) or {}
    else:
        default_type = "error" if result.is_error else "output"
        response = {result.shape if result.shape in ("output", "result", "error") else default_type: text}
    beside = {name: result.extra[name] for name in result.extra if name in _BESIDE}
    inside = {name: value for name, value in result.extra.items() if name not in _BESIDE}
    function_response = {
        **_id(result.id),
        "name": result.name or names.get(result.id, result.id),
        "response": response,
        **inside,
    }
    return {"functionResponse": function_response | ({"parts": rest} if rest else {}), **beside}


def _render_media(part: Image | Audio | File) -> Json:
    if isinstance(part, Audio) or part.data:
        media: Json = {"mimeType": part.mime, "data": part.data}
        result: Json = {"inlineData": media}
    else:
        mime = part.mime or mime_of(part.url)
        media = {"fileUri": part.url} | ({"mimeType": mime} if mime else {})
        result = {"fileData": media}
    if isinstance(part, File) and part.name:
        media["displayName"] = part.name
    inside = {name: value for name, value in part.extra.items() if name not in _AROUND}
    media |= inside
    return {**result, **{name: value for name, value in part.extra.items() if name in _AROUND}}


_AROUND = ("videoMetadata", "mediaResolution", "thoughtSignature", "partMetadata", "thought")
