"""Adapts a canonical request to a wire format that cannot express all of it."""

from __future__ import annotations

import base64
from dataclasses import replace

from emberline.core.errors import InvalidRequest
from emberline.gateway.dialects.anthropic import citations as anthropic_citations
from emberline.gateway.dialects.changes import OPENAI, OPENAI_SHARED, Changes
from emberline.gateway.dialects.chat import citations as chat_citations
from emberline.gateway.dialects.chat.content import google_seal
from emberline.gateway.dialects.inner import (
    Audio,
    Conversation,
    File,
    Image,
    Json,
    Message,
    Opaque,
    Part,
    Refusal,
    Spoken,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolResult,
)
from emberline.gateway.dialects.media import mime_of
from emberline.gateway.dialects.recipient import Recipient
from emberline.gateway.dialects.schemas import is_exact

_ANTHROPIC_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def adapt(request: Conversation, target: Spoken, target_model: Recipient, changes: Changes) -> None:
    """Change `request` in place so that the wire format `target` can express it, and report each change.

    Raises InvalidRequest for content that cannot be dropped without changing what the request means.
    """
    both_openai = request.dialect in OPENAI and target in OPENAI
    if request.user is None and not both_openai and isinstance(request.extra.get("safety_identifier"), str):
        request.user = request.extra.pop("safety_identifier")
    if target == "openai-responses":
        _cite(request)
    changes.leftovers(request, target)
    if (request.n or 1) > 1 and target in ("anthropic", "openai-responses"):
        raise InvalidRequest(
            f"n is {request.n}, but this model's provider returns one choice per request", param="n", hint="set n to 1"
        )
    adapter = _Fit(target, both_openai, target_model, changes)
    request.extra = adapter.shared(request.extra)
    request.kept = {}
    request.system = adapter.parts(request.system)
    for message in request.messages:
        message.parts, message.extra, message.shape = (
            adapter.parts(message.parts),
            adapter.shared(message.extra),
            "auto",
        )
    request.messages = [message for message in request.messages if message.parts]
    request.tools = [adapter.tool(tool) for tool in request.tools if isinstance(tool, Tool)]


def _cite(request: Conversation) -> None:
    """Turn the citations of earlier assistant messages into canonical ones, for a Responses request.

    Other formats cannot take them back: Anthropic would require its own encrypted_index.
    """
    for message in request.messages:
        if message.role == "assistant" and request.dialect == "anthropic":
            anthropic_citations.lift(message.parts)
        elif message.role == "assistant" and request.dialect == "openai-chat":
            chat_citations.lift(message)


class _Fit:
    def __init__(self, target: Spoken, both_openai: bool, target_model: Recipient, changes: Changes) -> None:
        self._target = target
        self._kin = both_openai  # Chat to Responses or back: both know the same files and cache fields
        self._to = target_model
        self._changes = changes

    def shared(self, extra: Json) -> Json:
        return {name: value for name, value in extra.items() if name in OPENAI_SHARED} if self._kin else {}

    def tool(self, tool: Tool) -> Tool:
        strict = tool.strict
        if strict and self._target in OPENAI and not self._kin and not is_exact(tool.schema):
            strict = False
            reason = f"{self._target} requires a schema with all properties required and no others"
            self._changes.say("tools[]", reason, within=".strict")
        return replace(tool, strict=strict, extra={})

    def parts(self, parts: list[Part]) -> list[Part]:
        result: list[Part] = []
        for part in parts:
            if isinstance(part, ToolCall) and self._target == "gemini" and (seal := google_seal(part)):
                result.append(Thinking("", "gemini", seal))
            if (adapted := self._part(part)) is not None:
                result.append(adapted)
        return result

    def _part(self, part: Part) -> Part | None:
        if isinstance(part, Opaque):
            return None  # already reported by report_request_fields
        part.extra = self.shared(part.extra)
        match part:
            case Text(text="") if self._target == "anthropic":
                return None  # Anthropic rejects empty text blocks
            case Text() if any(cited.quote for cited in part.citations):
                self._changes.say("messages", f"{self._target} has no such field", within=".citations.cited_text")
            case ToolResult():
                return self._result(part)
            case Thinking():
                return self._thinking(part)
            case Refusal() if self._target in ("anthropic", "gemini"):
                self._changes.say("messages", "a refusal became text", within=".refusal")
                return Text(part.text)
            case Image():
                return self._kept(part, self._why_no_image(part))
            case Audio():
                if self._target not in ("openai-chat", "gemini"):
                    raise InvalidRequest(
                        f"messages contain an input_audio part ({part.mime}), but {self._target} does not accept audio",
                        param="messages",
                        hint="use a model whose provider accepts audio, or send the transcript as text",
                    )
            case File() if part.plain and self._target != "anthropic":
                return Text(part.data)
            case File():
                return self._kept(part, self._why_no_file(part))
        return part

    def _kept(self, part: Image | Audio | File, reason: str | None) -> Part | None:
        if reason is None:
            return part
        self._changes.say("messages", reason, within=f".{type(part).__name__.removesuffix('Content').lower()}")
        return None

    def _result(self, result: ToolResult) -> ToolResult:
        result.parts, result.shape = self.parts(result.parts), "auto"
        if result.is_error and self._target in OPENAI:
            self._changes.say("messages", f"{self._target} cannot mark a tool result as failed", within=".is_error")
        return result

    def _thinking(self, part: Thinking) -> Thinking | None:
        if part.family == self._target and part.seal:
            return part
        if self._to.takes_thoughts and part.text:
            return Thinking(part.text, self._target)
        self._changes.say("thinking", "only the provider that produced reasoning accepts it back")
        return None

    def _why_no_image(self, image: Image) -> str | None:
        if self._target == "openai-responses":
            image.detail = image.detail or "auto"  # Responses requires the field
        if image.detail not in (None, "auto") and self._target not in OPENAI:
            self._changes.say("messages", f"{self._target} has no such field", within=".image_url.detail")
        if image.file_id and not (image.url or image.data):
            is_usable = self._kin and self._target == "openai-responses"
            return None if is_usable else "the file is stored at another provider"
        if image.data and self._target == "anthropic" and image.mime not in _ANTHROPIC_IMAGES:
            return f"anthropic does not accept images of type {image.mime or 'unknown'}"
        return None

    def _why_no_file(self, file: File) -> str | None:
        if file.file_id and not (file.url or file.data):
            return None if self._kin else "the file is stored at another provider"
        if file.url and self._target == "openai-chat":
            return "chat does not accept files by URL"
        file.mime = file.mime or mime_of(file.name or file.url)
        if file.data and self._target in OPENAI:
            file.name = file.name or "document"  # OpenAI requires the field
        if self._target == "anthropic" and file.data:
            return self._as_document(file)
        return None

    def _as_document(self, file: File) -> str | None:
        if file.mime == "application/pdf":
            return None
        if not file.mime.startswith("text/"):
            return f"anthropic does not accept documents of type {file.mime or 'unknown'}"
        try:
            file.data, file.mime, file.plain = base64.b64decode(file.data, validate=True).decode(), "text/plain", True
        except ValueError:
            return "the file's data is not base64-encoded text"
        return None


def merged(messages: list[Message], *, roles: tuple[str, ...]) -> list[Message]:
    """Return the messages with adjacent ones of the same role joined, for the given `roles`.

    Tool results count as the user's.
    """
    result: list[Message] = []
    for message in messages:
        role = "user" if message.role == "tool" else message.role
        if result and result[-1].role == role and role in roles:
            result[-1].parts += message.parts
        else:
            result.append(Message(role, list(message.parts), "auto"))
    for message in result:
        if message.role == "user":  # tool results must directly follow the calls that they answer
            message.parts.sort(key=lambda part: not isinstance(part, ToolResult))
    return result
