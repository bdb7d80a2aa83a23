"""The canonical form of a chat request and its reply, into which all wire formats are parsed.

Every class keeps in `extra` the fields that only the original wire format has. Rendering into the same wire format
writes these fields again; rendering into a different one reports them as dropped (`change_report.py`). `shape` records
how the original wrote a value that has several forms ("text": a bare string, "list", "null", "absent").
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from emberline.wire.deltas import ChatDialect, Citation, FinishReason
from emberline.wire.usage import Usage

Role = Literal["system", "developer", "user", "assistant", "tool"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Json = dict[str, Any]


@dataclass(slots=True)
class TextContent:
    text: str
    extra: Json = field(default_factory=dict)
    citations: list[Citation] = field(default_factory=list)  # stay in `extra` if source and target format are the same


@dataclass(slots=True)
class ImageContent:
    """An image: at a URL, as base64 data, or as the id of a file stored at the provider."""

    url: str = ""
    data: str = ""
    mime: str = ""
    file_id: str = ""
    detail: str | None = None
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class AudioContent:
    data: str
    mime: str
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class FileContent:
    """A document: at a URL, as the id of a stored file, or as base64 `data` (text if `plain` is set)."""

    url: str = ""
    data: str = ""
    mime: str = ""
    file_id: str = ""
    name: str = ""
    plain: bool = False
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class ToolCallContent:
    id: str
    name: str
    arguments: str  # JSON text
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class ToolResultContent:
    id: str
    parts: list[Part]
    name: str = ""
    is_error: bool | None = None
    shape: str = "text"
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class ReasoningContent:
    """Reasoning of a model.

    `signature` is a signature or encrypted text that only the wire format `origin` can read.
    """

    text: str
    origin: ChatDialect
    signature: str = ""
    redacted: bool = False  # only the encrypted form exists
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class RefusalContent:
    text: str
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class OpaqueContent:
    """Content that only one wire format knows, such as a server-side tool. It cannot be translated."""

    kind: str
    raw: Json


Part = (
    TextContent
    | ImageContent
    | AudioContent
    | FileContent
    | ToolCallContent
    | ToolResultContent
    | ReasoningContent
    | RefusalContent
    | OpaqueContent
)


@dataclass(slots=True)
class CanonicalMessage:
    role: Role
    parts: list[Part]
    shape: str = "list"
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class CanonicalTool:
    name: str
    description: str | None = None
    schema: Json | None = None  # JSON schema of the arguments
    strict: bool | None = None
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class CanonicalToolChoice:
    mode: Literal["auto", "none", "required", "named"]
    names: list[str] = field(default_factory=list)  # named: the one tool; otherwise the allowed tools, [] for all


@dataclass(slots=True)
class ResponseFormat:
    kind: Literal["text", "json", "schema"]
    schema: Json | None = None
    name: str = ""
    strict: bool | None = None
    description: str | None = None


@dataclass(slots=True)
class ReasoningOptions:
    effort: Effort | None = None
    budget: int | None = None  # tokens
    include_reasoning: bool | None = None  # whether the reply includes the reasoning


@dataclass(slots=True)
class CanonicalRequest:
    """A chat request. A field is None if the client did not set it."""

    dialect: ChatDialect
    model: str
    system: list[Part] = field(default_factory=list)  # system prompt outside the messages
    messages: list[CanonicalMessage] = field(default_factory=list)
    tools: list[CanonicalTool | OpaqueContent] = field(default_factory=list)
    tool_choice: CanonicalToolChoice | None = None
    parallel_tools: bool | None = None
    max_output: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: int | None = None
    logprobs: int | None = None  # number of alternatives per token
    response_format: ResponseFormat | None = None
    reasoning: ReasoningOptions | None = None
    verbosity: str | None = None
    stream: bool | None = None
    include_usage: bool | None = None
    user: str | None = None
    metadata: Json | None = None
    extra: Json = field(default_factory=dict)
    source_fields: Json = field(default_factory=dict)  # fields as the source wrote them, where several spellings exist
    unmapped_fields: Json = field(default_factory=dict)  # path -> value of fields in `source_fields` to be reported

    def keep_source_field(self, name: str, source: Json, *, translated_subfields: Iterable[str]) -> None:
        """Keep the request field `name` as the client wrote it, for rendering into the same wire format.

        Subfields that are not in `translated_subfields` are reported as dropped when the request is translated.
        """
        self.source_fields[name] = source
        self.unmapped_fields |= {
            f"{name}.{field_name}": value
            for field_name, value in source.items()
            if field_name not in translated_subfields
        }


@dataclass(slots=True)
class CanonicalChoice:
    """One choice of a reply; `logprobs` are in the format of OpenAI's Chat Completions."""

    parts: list[Part]
    finish_reason: FinishReason | None
    stop_sequence: str | None = None
    logprobs: list[Json] | None = None
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class CanonicalReply:
    """A complete, unstreamed reply."""

    dialect: ChatDialect
    id: str
    model: str
    choices: list[CanonicalChoice]
    created: int = 0
    usage: Usage | None = None
    extra: Json = field(default_factory=dict)


def correct_finish_reason(reason: FinishReason, parts: Iterable[Part]) -> FinishReason:
    """Return `reason`, or "tool_calls" if a provider sent "stop" although the reply has tool calls."""
    return "tool_calls" if reason == "stop" and any(isinstance(part, ToolCallContent) for part in parts) else reason
