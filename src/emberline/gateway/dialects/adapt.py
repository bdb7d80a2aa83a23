"""Removes from a canonical request what the provider's wire format cannot express."""

from __future__ import annotations

import base64
from dataclasses import replace

from emberline.core.errors import InvalidRequest
from emberline.gateway.dialects import canonical
from emberline.gateway.dialects.anthropic import citations as anthropic_citations
from emberline.gateway.dialects.anthropic.threads import remove_thread
from emberline.gateway.dialects.change_report import OPENAI_DIALECTS, SHARED_OPENAI_FIELDS, ChangeReport
from emberline.gateway.dialects.chat import citations as chat_citations
from emberline.gateway.dialects.chat.content import read_google_signature
from emberline.gateway.dialects.media import guess_mime_type
from emberline.gateway.dialects.responses.namespaces import flatten_namespaces
from emberline.gateway.dialects.schemas import is_strict_schema
from emberline.gateway.dialects.target_model import TargetModel
from emberline.wire.deltas import ChatDialect

_ANTHROPIC_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def adapt_request(
    request: canonical.CanonicalRequest, target: ChatDialect, target_model: TargetModel, changes: ChangeReport
) -> None:
    """Change `request` in place so that the wire format `target` can express it, and report each change.

    Raises InvalidRequest for content that cannot be dropped without changing what the request means.
    """
    if request.dialect == "openai-responses":
        flatten_namespaces(request)
    if request.dialect == "anthropic":
        remove_thread(request.extra)
    both_openai = request.dialect in OPENAI_DIALECTS and target in OPENAI_DIALECTS
    if request.user is None and not both_openai and isinstance(request.extra.get("safety_identifier"), str):
        request.user = request.extra.pop("safety_identifier")
    if target == "openai-responses":
        _restore_citations(request)
    changes.report_request_fields(request, target)
    if (request.n or 1) > 1 and target in ("anthropic", "openai-responses"):
        raise InvalidRequest(
            f"n is {request.n}, but this model's provider returns one choice per request", param="n", hint="set n to 1"
        )
    adapter = _PartAdapter(target, both_openai, target_model, changes)
    request.extra = adapter.keep_shared_fields(request.extra)
    request.source_fields = {}
    request.system = adapter.adapt_parts(request.system)
    for message in request.messages:
        message.parts, message.extra, message.shape = (
            adapter.adapt_parts(message.parts),
            adapter.keep_shared_fields(message.extra),
            "auto",
        )
    request.messages = [message for message in request.messages if message.parts]
    request.tools = [adapter.adapt_tool(tool) for tool in request.tools if isinstance(tool, canonical.CanonicalTool)]


def _restore_citations(request: canonical.CanonicalRequest) -> None:
    """Parse the citations in assistant messages, so that a Responses request can contain them.

    Only Responses accepts citations that a different provider wrote.
    """
    for message in request.messages:
        if message.role == "assistant" and request.dialect == "anthropic":
            anthropic_citations.extract_citations_from_parts(message.parts)
        elif message.role == "assistant" and request.dialect == "openai-chat":
            chat_citations.extract_citations_from_message(message)


class _PartAdapter:
    """Adapts the parts of one request to the wire format `target`."""

    def __init__(
        self, target: ChatDialect, both_openai: bool, target_model: TargetModel, changes: ChangeReport
    ) -> None:
        self._target = target
        self._both_openai = both_openai  # Chat to Responses or back: both know the same files and cache fields
        self._target_model = target_model
        self._changes = changes

    def keep_shared_fields(self, extra: canonical.Json) -> canonical.Json:
        return (
            {name: value for name, value in extra.items() if name in SHARED_OPENAI_FIELDS} if self._both_openai else {}
        )

    def adapt_tool(self, tool: canonical.CanonicalTool) -> canonical.CanonicalTool:
        strict = tool.strict
        if strict and self._target in OPENAI_DIALECTS and not self._both_openai and not is_strict_schema(tool.schema):
            strict = False
            reason = f"{self._target} requires a schema with all properties required and no others"
            self._changes.report("tools[]", reason, subfield=".strict")
        return replace(tool, strict=strict, extra={})

    def adapt_parts(self, parts: list[canonical.Part]) -> list[canonical.Part]:
        result: list[canonical.Part] = []
        for part in parts:
            if (
                isinstance(part, canonical.ToolCallContent)
                and self._target == "gemini"
                and (signature := read_google_signature(part))
            ):
                result.append(canonical.ReasoningContent("", "gemini", signature))
            if (adapted := self._adapt_part(part)) is not None:
                result.append(adapted)
        return result

    def _adapt_part(self, part: canonical.Part) -> canonical.Part | None:
        match part:
            case canonical.OpaqueContent(kind="tool_reference", raw={"tool_name": str(name)}):
                return canonical.TextContent(name)  # the result of a search: `tools` describes what it found
            case canonical.OpaqueContent():
                return None  # already reported by report_request_fields
        part.extra = self.keep_shared_fields(part.extra)
        match part:
            case canonical.TextContent(text="") if self._target == "anthropic":
                return None  # Anthropic rejects empty text blocks
            case canonical.TextContent() if any(citation.quote for citation in part.citations):
                self._changes.report("messages", f"{self._target} has no such field", subfield=".citations.cited_text")
            case canonical.ToolResultContent():
                return self._adapt_tool_result(part)
            case canonical.ReasoningContent():
                return self._adapt_reasoning(part)
            case canonical.RefusalContent() if self._target in ("anthropic", "gemini"):
                self._changes.report("messages", "a refusal was sent as text", subfield=".refusal")
                return canonical.TextContent(part.text)
            case canonical.ImageContent():
                return self._drop_media_if_unsupported(part, self._reason_to_drop_image(part))
            case canonical.AudioContent():
                if self._target not in ("openai-chat", "gemini"):
                    raise InvalidRequest(
                        f"messages contain an input_audio part ({part.mime}), but {self._target} does not accept audio",
                        param="messages",
                        hint="use a model whose provider accepts audio, or send the transcript as text",
                    )
            case canonical.FileContent() if part.plain and self._target != "anthropic":
                return canonical.TextContent(part.data)
            case canonical.FileContent():
                return self._drop_media_if_unsupported(part, self._reason_to_drop_file(part))
        return part

    def _drop_media_if_unsupported(
        self, part: canonical.ImageContent | canonical.AudioContent | canonical.FileContent, reason_to_drop: str | None
    ) -> canonical.Part | None:
        if reason_to_drop is None:
            return part
        self._changes.report(
            "messages", reason_to_drop, subfield=f".{type(part).__name__.removesuffix('Content').lower()}"
        )
        return None

    def _adapt_tool_result(self, result: canonical.ToolResultContent) -> canonical.ToolResultContent:
        result.parts, result.shape = self.adapt_parts(result.parts), "auto"
        if result.is_error and self._target in OPENAI_DIALECTS:
            self._changes.report(
                "messages", f"{self._target} cannot mark a tool result as failed", subfield=".is_error"
            )
        return result

    def _adapt_reasoning(self, part: canonical.ReasoningContent) -> canonical.ReasoningContent | None:
        if part.origin == self._target and part.signature:
            return part
        if self._target_model.accepts_reasoning and part.text:
            return canonical.ReasoningContent(part.text, self._target)
        self._changes.report("thinking", "only the provider that produced reasoning accepts it back")
        return None

    def _reason_to_drop_image(self, image: canonical.ImageContent) -> str | None:
        """Return why the target format cannot express the image, or None if it can.

        Sets the fields of the image that the target format requires."""
        if self._target == "openai-responses":
            image.detail = image.detail or "auto"  # Responses requires the field
        if image.detail not in (None, "auto") and self._target not in OPENAI_DIALECTS:
            self._changes.report("messages", f"{self._target} has no such field", subfield=".image_url.detail")
        if image.file_id and not (image.url or image.data):
            is_usable = self._both_openai and self._target == "openai-responses"
            return None if is_usable else "the file is stored at another provider"
        if image.data and self._target == "anthropic" and image.mime not in _ANTHROPIC_IMAGE_TYPES:
            return f"anthropic does not accept images of type {image.mime or 'unknown'}"
        return None

    def _reason_to_drop_file(self, file: canonical.FileContent) -> str | None:
        """Return why the target format cannot express the file, or None if it can.

        Sets the fields of the file that the target format requires."""
        if file.file_id and not (file.url or file.data):
            return None if self._both_openai else "the file is stored at another provider"
        if file.url and self._target == "openai-chat":
            return "chat does not accept files by URL"
        file.mime = file.mime or guess_mime_type(file.name or file.url)
        if file.data and self._target in OPENAI_DIALECTS:
            file.name = file.name or "document"  # OpenAI requires the field
        if self._target == "anthropic" and file.data:
            return self._convert_to_document(file)
        return None

    def _convert_to_document(self, file: canonical.FileContent) -> str | None:
        """Convert a text file to an Anthropic document.

        Return why the file must be dropped, or None if it is usable.
        """
        if file.mime == "application/pdf":
            return None
        if not file.mime.startswith("text/"):
            return f"anthropic does not accept documents of type {file.mime or 'unknown'}"
        try:
            file.data, file.mime, file.plain = base64.b64decode(file.data, validate=True).decode(), "text/plain", True
        except ValueError:
            return "the file's data is not base64-encoded text"
        return None


def merge_adjacent_messages(
    messages: list[canonical.CanonicalMessage], *, roles: tuple[str, ...]
) -> list[canonical.CanonicalMessage]:
    """Return the messages with adjacent messages of the same role joined, if the role is in `roles`.

    A message with tool results counts as a message of the role "user".
    """
    result: list[canonical.CanonicalMessage] = []
    for message in messages:
        role = "user" if message.role == "tool" else message.role
        if result and result[-1].role == role and role in roles:
            result[-1].parts += message.parts
        else:
            result.append(canonical.CanonicalMessage(role, list(message.parts), "auto"))
    for message in result:
        if message.role == "user":  # tool results must directly follow the calls that they answer
            message.parts.sort(key=lambda part: not isinstance(part, canonical.ToolResultContent))
    return result
