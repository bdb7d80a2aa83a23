"""The inner form of a conversation and of its reply: what all dialects say, each in its way.

Every noun keeps, as `extra`, the fields of its source that have no common meaning, so that the way back into the same
dialect loses nothing; on the way into another they are reported (`changes.py`). `shape` is how the source wrote what
can be written in several ways ("text": a bare string, "list", "null", "": not at all); it is never reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from emberline.gateway.costs.usage import Usage

Spoken = Literal["openai-chat", "openai-responses", "anthropic", "gemini"]
Role = Literal["system", "developer", "user", "assistant", "tool"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Reason = Literal["stop", "stop_sequence", "length", "context", "tool_calls", "filter", "pause"]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Citation:
    """A page on the web that a text rests on, from its character `start` to before `end`; where these are the same,
    nobody said what of it does. In a stream the text is all that an answer said."""

    url: str
    title: str = ""
    quote: str = ""  # of the page
    start: int = 0
    end: int = 0
    seal: str = ""  # what Anthropic wants to see again with it

    def moved(self, by: int) -> Citation:
        return replace(self, start=self.start + by, end=self.end + by)


@dataclass(slots=True)
class Text:
    text: str
    extra: Json = field(default_factory=dict)
    citations: list[Citation] = field(default_factory=list)  # in `extra` while they only pass through their own dialect


@dataclass(slots=True)
class Image:
    """At a URL, as base64 data, or as a file that the provider has."""

    url: str = ""
    data: str = ""
    mime: str = ""
    file_id: str = ""
    detail: str | None = None
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class Audio:
    data: str
    mime: str
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class File:
    """A document. Of `mime` text/plain the data may be the text itself: then `plain`."""

    url: str = ""
    data: str = ""
    mime: str = ""
    file_id: str = ""
    name: str = ""
    plain: bool = False
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON text
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class ToolResult:
    id: str
    parts: list[Part]
    name: str = ""
    is_error: bool | None = None
    shape: str = "text"
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class Thinking:
    """`seal` is what only its maker can read: a signature, or the thoughts encrypted. `family` is whose it is."""

    text: str
    family: Spoken
    seal: str = ""
    redacted: bool = False  # there is nothing but the seal
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class Refusal:
    text: str
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class Opaque:
    """What only its own dialect knows: a server's tool, a search result. Into others it cannot come."""

    kind: str
    raw: Json


Part = Text | Image | Audio | File | ToolCall | ToolResult | Thinking | Refusal | Opaque


@dataclass(slots=True)
class Message:
    role: Role
    parts: list[Part]
    shape: str = "list"
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class Tool:
    name: str
    description: str | None = None
    schema: Json | None = None  # of its arguments
    strict: bool | None = None
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class ToolChoice:
    mode: Literal["auto", "none", "required", "named"]
    names: list[str] = field(default_factory=list)  # named: the one; otherwise those allowed, if not all


@dataclass(slots=True)
class ResponseFormat:
    kind: Literal["text", "json", "schema"]
    schema: Json | None = None
    name: str = ""
    strict: bool | None = None
    description: str | None = None


@dataclass(slots=True)
class Reasoning:
    effort: Effort | None = None
    budget: int | None = None  # tokens
    show: bool | None = None  # whether thoughts are told


@dataclass(slots=True)
class Conversation:
    """A request. None: it says nothing about it."""

    dialect: Spoken
    model: str
    system: list[Part] = field(default_factory=list)  # what stands apart from the messages
    messages: list[Message] = field(default_factory=list)
    tools: list[Tool | Opaque] = field(default_factory=list)
    tool_choice: ToolChoice | None = None
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
    logprobs: int | None = None  # how many others beside the chosen token
    response_format: ResponseFormat | None = None
    reasoning: Reasoning | None = None
    verbosity: str | None = None
    stream: bool | None = None
    include_usage: bool | None = None
    user: str | None = None
    metadata: Json | None = None
    extra: Json = field(default_factory=dict)
    kept: Json = field(default_factory=dict)  # fields as the source wrote them, where there are several ways
    unread: Json = field(default_factory=dict)  # by its path: what those say that has no common meaning

    def keep(self, name: str, given: Json, *, read: Iterable[str]) -> None:
        """An object as it was written, of which these fields are understood."""
        self.kept[name] = given
        self.unread |= {f"{name}.{inner}": value for inner, value in given.items() if inner not in read}


@dataclass(slots=True)
class Choice:
    """One answer of a reply. `logprobs` are as OpenAI's chat shows them."""

    parts: list[Part]
    reason: Reason | None
    stop_sequence: str | None = None
    logprobs: list[Json] | None = None
    extra: Json = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """A whole reply."""

    dialect: Spoken
    id: str
    model: str
    choices: list[Choice]
    created: int = 0
    usage: Usage | None = None
    extra: Json = field(default_factory=dict)
