"""Changed: what a translation dropped or said otherwise. Nothing is dropped without one."""

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

# What both of OpenAI's dialects call alike and mean alike.
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

# Of things given back as they came: ids and states that tell a model nothing.
_IDLE = frozenset({"id", "status", "type", "role", "logprobs", "caller", "index", "phase", "summary", "content"})

_WORDS: Mapping[Spoken, Words] = {
    "openai-chat": chat.WORDS,
    "openai-responses": responses.WORDS,
    "anthropic": anthropic.WORDS,
    "gemini": gemini.WORDS,
}


@dataclass(frozen=True, slots=True)
class Changed:
    field: str  # as the client calls it
    why: str

    def __str__(self) -> str:
        return f"{self.field}={self.why}"


class Changes:
    """Those of one translation, each once, in the words of who asked."""

    def __init__(self, source: Spoken) -> None:
        self._words = _WORDS[source]
        self._said: dict[Changed, None] = {}

    @property
    def all(self) -> list[Changed]:
        return list(self._said)

    def say(self, name: str, reason: str, *, within: str = "") -> None:
        """`name` is a field of the inner form; `within` what is meant inside it."""
        self.at(self._words.name(name) + within, reason)

    def at(self, field: str, reason: str) -> None:
        self._said[Changed(field, reason)] = None

    def dropped(self, request: object, name: str, target: str) -> None:
        if request is not None:
            self.say(name, f"{target} has no such field")

    def reply_left(self, fields: Json, ignored: Iterable[str]) -> None:
        """What a reply said that only its own dialect knows."""
        for name, value in fields.items():
            if value and name not in ignored:
                self.at(f"reply.{name}", "no place in this dialect")

    def bare(self, parts: list[Part], target: Spoken) -> list[Part]:
        """The parts of a reply without what only its own dialect knows."""
        result: list[Part] = []
        for part in parts:
            if isinstance(part, Opaque):
                self.at(f"reply.{part.kind}", "no place in this dialect")
                continue
            self.reply_left(part.extra, _IDLE)
            if isinstance(part, Text) and target != "anthropic" and any(citation.quote for citation in part.citations):
                self.at("reply.citations.cited_text", "no place in this dialect")
            part.extra = {}
            result.append(part)
        return result

    def leftovers(self, request: Conversation, target: Spoken) -> None:
        """Report, or refuse, what the source said and nobody but its own dialect understands."""
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
            raise InvalidRequest(f"{name} cannot be translated for this model's provider", param=name, hint=hint)

    def _extra(self, extra: Json, path: str, target: Spoken, carried: frozenset[str]) -> None:
        for name, value in extra.items():
            if value and name not in carried and (name, target) != ("extra_content", "gemini"):
                self.at(path + name, f"{target} has no such field")
