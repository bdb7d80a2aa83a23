"""Converts Gemini's contents to and from canonical messages.

Gemini's tool calls may have no ids. Parsing then generates an id from the call's position, so that the id is
the same each time; rendering for Gemini removes it. A tool result without an id belongs to the first call of that
function that has no result yet.
"""

from __future__ import annotations

import base64
import binascii

import msgspec

from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.anthropic.content import parse_arguments, parse_object
from emberline.gateway.dialects.field_reader import FieldReader, make_unknown_value_error
from emberline.gateway.dialects.media import guess_mime_type
from emberline.wire import signatures
from emberline.wire.deltas import ChatDialect

GENERATED_ID_PREFIX = "gemini-"  # prefix of ids that Gemini did not assign
# Google's documented value for calls that Gemini did not make.
FOREIGN_CALL_SIGNATURE = "skip_thought_signature_validator"


class GeminiContentParser:
    """Parses the contents of one request or one reply."""

    def __init__(self, prefix: str = "") -> None:
        self._id_prefix = GENERATED_ID_PREFIX + prefix
        self._call_count = 0
        self._open_calls: list[canonical.ToolCallContent] = []  # calls without a result

    def parse_message(self, raw: object, path: str) -> canonical.CanonicalMessage:
        fields = FieldReader(raw, path)
        role = fields.unread.get("role") or "user"
        if role not in ("user", "model", "function", "system"):
            raise make_unknown_value_error(role, f"{path}.role", "user, model")
        rows = fields.read("parts", list, [])
        parts = [part for index, row in enumerate(rows) for part in self.parse_part(row, f"{path}.parts[{index}]")]
        return canonical.CanonicalMessage("assistant" if role == "model" else "user", parts, "list", fields.unread)

    def parse_part(self, raw: object, path: str) -> list[canonical.Part]:
        fields = FieldReader(raw, path)
        if (text := fields.read("text", str)) is not None:
            if fields.unread.get("thought"):
                del fields.unread["thought"]
                signature, origin = decode_gemini_signature(fields.read("thoughtSignature", str, ""))
                return [canonical.ReasoningContent(text, origin, signature, extra=fields.unread)]
            return [canonical.TextContent(text, fields.unread)]
        if (call := fields.read("functionCall", dict)) is not None:
            return [self._parse_call(FieldReader(call, f"{path}.functionCall"), fields)]
        if (result := fields.read("functionResponse", dict)) is not None:
            return [self._parse_result(FieldReader(result, f"{path}.functionResponse"), fields)]
        for name, value_field in (("inlineData", "data"), ("fileData", "fileUri")):
            if (media := fields.read(name, dict)) is not None:
                return [_parse_media(FieldReader(media, f"{path}.{name}"), value_field, fields.unread)]
        kind = next(iter(fields.unread), "part")
        return [canonical.OpaqueContent(kind, fields.unread)]

    def _parse_call(self, call: FieldReader, fields: FieldReader) -> canonical.ToolCallContent:
        id = call.read("id", str) or f"{self._id_prefix}{self._call_count}"
        self._call_count += 1
        arguments = msgspec.json.encode(call.read("args", dict, {})).decode()
        result = canonical.ToolCallContent(id, call.require("name", str), arguments, fields.unread | call.unread)
        self._open_calls.append(result)
        return result

    def _parse_result(self, result: FieldReader, fields: FieldReader) -> canonical.ToolResultContent:
        id, name = result.read("id", str, ""), result.require("name", str)
        answered_call = next((call for call in self._open_calls if (call.id == id if id else call.name == name)), None)
        if answered_call is not None:
            self._open_calls.remove(answered_call)
            id = answered_call.id
        response = result.read("response", dict, {})
        text, shape = _unwrap_response(response)
        parts: list[canonical.Part] = [canonical.TextContent(text)]
        for row in result.read("parts", list, []):
            parts += self.parse_part(row, f"{result.path}.parts")
        is_error = True if shape == "error" else None
        return canonical.ToolResultContent(
            id or f"{GENERATED_ID_PREFIX}{name}", parts, name, is_error, shape, fields.unread | result.unread
        )


def _unwrap_response(response: canonical.Json) -> tuple[str, str]:
    """Return the text of a tool's response, and the name of the field that contains the text.

    The field must be `output`, `result` or `error`, and the only field. For any other response, return its JSON and
    "object".
    """
    if len(response) == 1:
        for name in ("output", "result", "error"):
            if isinstance(response.get(name), str):
                return response[name], name
    return msgspec.json.encode(response).decode(), "object"


def _parse_media(fields: FieldReader, value_field: str, extra: canonical.Json) -> canonical.Part:
    value, mime = fields.require(value_field, str), fields.read("mimeType", str, "")
    name = fields.read("displayName", str, "")
    merged_extra = extra | fields.unread
    data, url = (value, "") if value_field == "data" else ("", value)
    if mime.startswith("image/") and not name:
        return canonical.ImageContent(url, data, mime, extra=merged_extra)
    if mime.startswith("audio/") and data and not name:
        return canonical.AudioContent(data, mime, merged_extra)
    return canonical.FileContent(url, data, mime, name=name, extra=merged_extra)


def decode_gemini_signature(signature: str) -> tuple[str, ChatDialect]:
    """Return a reasoning signature and the wire format that issued it.

    Signatures of formats other than Gemini are base64-encoded with a prefix.
    """
    try:
        return _decode_foreign_signature(base64.b64decode(signature, validate=True).decode()) or (signature, "gemini")
    except (binascii.Error, UnicodeDecodeError):
        return signature, "gemini"


def _decode_foreign_signature(text: str) -> tuple[str, ChatDialect] | None:
    signature, origin = signatures.decode_signature(text, "gemini")
    return (signature, origin) if origin != "gemini" else None


def encode_gemini_signature(signature: str, origin: ChatDialect) -> str:
    if not signature or origin == "gemini":
        return signature
    return base64.b64encode(signatures.encode_signature(signature, origin, "gemini").encode()).decode()


def render_parts(parts: list[canonical.Part], function_names_by_call: dict[str, str]) -> list[canonical.Json]:
    """Render a message's parts for Gemini.

    `function_names_by_call` maps tool call ids to function names, which Gemini's tool results must repeat. The
    signature of reasoning without text becomes the signature of the next tool call.
    """
    rows: list[canonical.Json] = []
    signature = ""
    for part in parts:
        if isinstance(part, canonical.ReasoningContent) and not part.text and not part.extra:
            signature = part.signature
            continue
        row = _render_part(part, function_names_by_call)
        if isinstance(part, canonical.ToolCallContent) and signature:
            row["thoughtSignature"] = signature
            signature = ""
        rows.append(row)
    return rows


def _render_part(part: canonical.Part, function_names_by_call: dict[str, str]) -> canonical.Json:
    match part:
        case canonical.TextContent():
            return {"text": part.text, **part.extra}
        case canonical.ReasoningContent():
            signature_field = (
                {"thoughtSignature": encode_gemini_signature(part.signature, part.origin)} if part.signature else {}
            )
            return {"text": part.text, "thought": True, **signature_field, **part.extra}
        case canonical.ToolCallContent():
            part_fields = {name: part.extra[name] for name in part.extra if name in _PART_FIELDS}
            call_fields = {name: value for name, value in part.extra.items() if name not in _PART_FIELDS}
            call = {**_render_id_field(part.id), "name": part.name, "args": parse_arguments(part), **call_fields}
            return {"functionCall": call, **part_fields}
        case canonical.ToolResultContent():
            return _render_tool_result(part, function_names_by_call)
        case canonical.ImageContent() | canonical.AudioContent() | canonical.FileContent():
            return _render_media(part)
        case canonical.OpaqueContent():
            return part.raw
    raise AssertionError(f"a Gemini content cannot contain a {type(part).__name__}")


_PART_FIELDS = ("thoughtSignature", "partMetadata")  # fields of the part itself; all others belong to the call in it


def _render_id_field(id: str) -> canonical.Json:
    return {} if not id or id.startswith(GENERATED_ID_PREFIX) else {"id": id}


def _render_tool_result(result: canonical.ToolResultContent, function_names_by_call: dict[str, str]) -> canonical.Json:
    texts = [part.text for part in result.parts if isinstance(part, canonical.TextContent)]
    rest = [
        _render_part(part, function_names_by_call)
        for part in result.parts
        if not isinstance(part, canonical.TextContent)
    ]
    text = "\n".join(texts)
    if result.shape == "object":
        response: canonical.Json = parse_object(text) or {}
    else:
        default_name = "error" if result.is_error else "output"
        response = {result.shape if result.shape in ("output", "result", "error") else default_name: text}
    part_fields = {name: result.extra[name] for name in result.extra if name in _PART_FIELDS}
    response_fields = {name: value for name, value in result.extra.items() if name not in _PART_FIELDS}
    function_response = {
        **_render_id_field(result.id),
        "name": result.name or function_names_by_call.get(result.id, result.id),
        "response": response,
        **response_fields,
    }
    return {"functionResponse": function_response | ({"parts": rest} if rest else {}), **part_fields}


def _render_media(part: canonical.ImageContent | canonical.AudioContent | canonical.FileContent) -> canonical.Json:
    if isinstance(part, canonical.AudioContent) or part.data:
        media: canonical.Json = {"mimeType": part.mime, "data": part.data}
        result: canonical.Json = {"inlineData": media}
    else:
        mime = part.mime or guess_mime_type(part.url)
        media = {"fileUri": part.url} | ({"mimeType": mime} if mime else {})
        result = {"fileData": media}
    if isinstance(part, canonical.FileContent) and part.name:
        media["displayName"] = part.name
    media_fields = {name: value for name, value in part.extra.items() if name not in _MEDIA_PART_FIELDS}
    media |= media_fields
    return {**result, **{name: value for name, value in part.extra.items() if name in _MEDIA_PART_FIELDS}}


_MEDIA_PART_FIELDS = ("videoMetadata", "mediaResolution", "thoughtSignature", "partMetadata", "thought")
