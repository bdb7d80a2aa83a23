"""The report of what a translation dropped or changed. Nothing is dropped without an entry in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from emberline.core.errors import InvalidRequest
from emberline.gateway.dialects.anthropic import words as anthropic
from emberline.gateway.dialects.chat import words as chat
from emberline.gateway.dialects.gemini import words as gemini
from emberline.gateway.dialects.inner import Conversation, Json, Opaque, Part, Spoken, Text, Tool, ToolResult
from emberline.gateway.dialects.responses import words as responses
from emberline.gateway.dialects.words import Words

# Request fields with the same name and meaning in Chat Completions and Responses.
OPENAI_SHARED = frozenset(
    {
        "service_tier",
        "store",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prompt_cache_breakpoint",
        "safety_identifier",
        "moderation",
    }
)
OPENAI: tuple[Spoken, ...] = ("openai-chat", "openai-responses")

# Fields of returned items that carry no information for a model (ids, states): dropped without a report.
_IDLE = frozenset({"id", "status", "type", "role", "logprobs", "caller", "index", "phase", "summary", "content"})

_WORDS: Mapping[Spoken, Words] = {
    "openai-chat": chat.WORDS,
    "openai-responses": responses.WORDS,
    "anthropic": anthropic.WORDS,
    "gemini": gemini.WORDS,
}


@dataclass(frozen=True, slots=True)
class Changed:
    field: str  # path in the client's wire format
    why: str

    def __str__(self) -> str:
        return f"{self.field}={self.why}"


class Changes:
    """The changes of one translation, each listed once, with field paths in the wire format `source`."""

    def __init__(self, source: Spoken) -> None:
        self._words = _WORDS[source]
        self._said: dict[Changed, None] = {}

    @property
    def all(self) -> list[Changed]:
        return list(self._said)

    def say(self, name: str, reason: str, *, within: str = "") -> None:
        """Add a change of the canonical field `name`; `subfield` is a path below it."""
        self.at(self._words.name(name) + within, reason)

    def at(self, field: str, reason: str) -> None:
        self._said[Changed(field, reason)] = None

    def dropped(self, request: object, name: str, target: str) -> None:
        if request is not None:
            self.say(name, f"{target} has no such field")

    def reply_left(self, fields: Json, ignored: Iterable[str]) -> None:
        """Add the fields of a reply that exist only in the provider's wire format, except `ignored` ones."""
        for name, value in fields.items():
            if value and name not in ignored:
                self.at(f"reply.{name}", "the client's API has no such field")

    def bare(self, parts: list[Part], target: Spoken) -> list[Part]:
        """Return a reply's parts without what only the provider's wire format knows, and report what is lost."""
        result: list[Part] = []
        for part in parts:
            if isinstance(part, Opaque):
                self.at(f"reply.{part.kind}", "the client's API has no such field")
                continue
            self.reply_left(part.extra, _IDLE)
            if isinstance(part, Text) and target != "anthropic" and any(citation.quote for citation in part.citations):
                self.at("reply.citations.cited_text", "the client's API has no such field")
            part.extra = {}
            result.append(part)
        return result

    def leftovers(self, request: Conversation, target: Spoken) -> None:
        """Report the fields that only the source format knows; raise InvalidRequest for essential ones."""
        words = self._words
        shared = OPENAI_SHARED if request.dialect in OPENAI and target in OPENAI else frozenset()
        for name, value in request.extra.items():
            if value:
                self._not_vital(name)
        self._extra(request.extra | request.unread, "", target, shared)
        self._parts(request.system, words.system, target, shared)
        for message in request.messages:
            self._extra(message.extra, f"{words.message}.", target, shared | _IDLE)
            self._parts(message.parts, f"{words.message}.{words.part}", target, shared)
        for tool in request.tools:
            if isinstance(tool, Tool):
                self._extra(tool.extra, "tools[].", target, shared | {"type"})
            else:
                self.at(f"tools[].{tool.kind}", f"{target} has no such tool")

    def _parts(self, parts: Iterable[Part], path: str, target: Spoken, shared: frozenset[str]) -> None:
        for part in parts:
            if isinstance(part, Opaque):
                self._not_vital(part.kind)
                self.at(f"{path}.{part.kind}", f"{target} has no such part")
                continue
            self._extra(part.extra, f"{path}.", target, shared | _IDLE)
            if isinstance(part, ToolResult):
                self._parts(part.parts, f"{path}.content[]", target, shared)

    def _not_vital(self, name: str) -> None:
        if (hint := self._words.vital.get(name)) is not None:
            raise InvalidRequest(f"{name} is not supported by this model's provider", param=name, hint=hint)

    def _extra(self, extra: Json, path: str, target: Spoken, carried: frozenset[str]) -> None:
        for name, value in extra.items():
            if value and name not in carried and (name, target) != ("extra_content", "gemini"):
                self.at(path + name, f"{target} has no such field")
