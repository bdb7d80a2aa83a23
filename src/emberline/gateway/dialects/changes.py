"""Changed: what a translation dropped or said otherwise. Nothing is dropped without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from emberline.core.errors import InvalidRequest
from emberline.gateway.dialects.inner import Conversation, Json, Message, Opaque, Part, Spoken, Tool, ToolResult

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

# Without these a request would mean something else: they are refused, not dropped.
_VITAL: Mapping[Spoken, Mapping[str, str]] = {
    "openai-chat": {"functions": "use tools", "function_call": "use tool_choice", "audio": "ask for text"},
    "openai-responses": {
        "previous_response_id": "send the whole conversation as input",
        "conversation": "send the whole conversation as input",
        "prompt": "send instructions and input",
        "background": "wait for the reply, or stream it",
    },
    "anthropic": {"container": "leave it out", "mcp_servers": "leave them out"},
    "gemini": {"cachedContent": "send the content itself"},
}
# Of things given back as they came: ids and states that tell a model nothing.
_IDLE = frozenset(
    {"id", "status", "type", "role", "annotations", "logprobs", "caller", "index", "phase", "summary", "content"}
)

_PLACES: Mapping[Spoken, tuple[str, str]] = {  # messages, and the parts of one
    "openai-chat": ("messages[]", "content[]"),
    "openai-responses": ("input[]", "content[]"),
    "anthropic": ("messages[]", "content[]"),
    "gemini": ("contents[]", "parts[]"),
}
_SYSTEMS: Mapping[Spoken, str] = {"openai-responses": "instructions", "gemini": "systemInstruction"}
_NAMES: Mapping[str, tuple[str, str, str, str]] = {  # chat, responses, anthropic, gemini
    "max_output": ("max_completion_tokens", "max_output_tokens", "max_tokens", "generationConfig.maxOutputTokens"),
    "temperature": ("temperature", "temperature", "temperature", "generationConfig.temperature"),
    "top_p": ("top_p", "top_p", "top_p", "generationConfig.topP"),
    "top_k": ("top_k", "top_k", "top_k", "generationConfig.topK"),
    "stop": ("stop", "stop", "stop_sequences", "generationConfig.stopSequences"),
    "seed": ("seed", "seed", "seed", "generationConfig.seed"),
    "n": ("n", "n", "n", "generationConfig.candidateCount"),
    "presence_penalty": ("presence_penalty",) * 3 + ("generationConfig.presencePenalty",),
    "frequency_penalty": ("frequency_penalty",) * 3 + ("generationConfig.frequencyPenalty",),
    "logprobs": ("logprobs", "top_logprobs", "logprobs", "generationConfig.responseLogprobs"),
    "response_format": (
        "response_format",
        "text.format",
        "output_config.format",
        "generationConfig.responseJsonSchema",
    ),
    "reasoning": ("reasoning_effort", "reasoning", "thinking", "generationConfig.thinkingConfig"),
    "verbosity": ("verbosity", "text.verbosity", "verbosity", "verbosity"),
    "parallel_tools": ("parallel_tool_calls", "parallel_tool_calls", "tool_choice.disable_parallel_tool_use", "tools"),
    "tool_choice": ("tool_choice", "tool_choice", "tool_choice", "toolConfig.functionCallingConfig"),
    "user": ("user", "user", "metadata.user_id", "labels"),
    "metadata": ("metadata", "metadata", "metadata", "labels"),
    "tools": ("tools", "tools", "tools", "tools"),
    "system": ("messages[]", "input[]", "messages[]", "contents[]"),
    "messages": ("messages[]", "input[]", "messages[]", "contents[]"),
    "thinking": (
        "messages[].reasoning_content",
        "input[]",
        "messages[].content[].thinking",
        "contents[].parts[].thought",
    ),
}
_ORDER: tuple[Spoken, ...] = ("openai-chat", "openai-responses", "anthropic", "gemini")


@dataclass(frozen=True, slots=True)
class Changed:
    field: str  # as the client calls it
    why: str

    def __str__(self) -> str:
        return f"{self.field}={self.why}"


class Changes:
    """Those of one translation, each once, in the words of who asked."""

    def __init__(self, source: Spoken) -> None:
        self._source = source
        self._said: dict[Changed, None] = {}

    @property
    def all(self) -> list[Changed]:
        return list(self._said)

    def say(self, name: str, why: str, *, within: str = "") -> None:
        """`name` is a field of the inner form; `within` what is meant inside it."""
        names = _NAMES.get(name)
        self.at((names[_ORDER.index(self._source)] if names else name) + within, why)

    def at(self, field: str, why: str) -> None:
        self._said[Changed(field, why)] = None

    def dropped(self, asked: object, name: str, target: str) -> None:
        if asked is not None:
            self.say(name, f"{target} has no such field")

    def reply_left(self, left: Json, idle: Iterable[str]) -> None:
        """What a reply said that only its own dialect knows."""
        for name, value in left.items():
            if value and name not in idle:
                self.at(f"reply.{name}", "no place in this dialect")

    def bare(self, parts: list[Part]) -> list[Part]:
        """The parts of a reply without what only its own dialect knows."""
        made: list[Part] = []
        for part in parts:
            if isinstance(part, Opaque):
                self.at(f"reply.{part.kind}", "no place in this dialect")
                continue
            cited = {"citations", "annotations"} & part.extra.keys()
            self.reply_left(part.extra, _IDLE - cited)
            part.extra = {}
            made.append(part)
        return made

    def leftovers(self, asked: Conversation, target: Spoken) -> None:
        """Report, or refuse, what the source said and nobody but its own dialect understands."""
        vital = _VITAL[asked.dialect]
        for name, hint in vital.items():
            if asked.extra.get(name):
                raise InvalidRequest(f"{name} cannot be translated for this model's provider", param=name, hint=hint)
        shared = OPENAI_SHARED if asked.dialect in OPENAI and target in OPENAI else frozenset()
        self._extra(asked.extra, "", target, shared)
        self._parts(asked.system, _SYSTEMS.get(asked.dialect, "system[]"), target, shared)
        for message in asked.messages:
            self._message(message, target, shared)
        for tool in asked.tools:
            if isinstance(tool, Tool):
                self._extra(tool.extra, "tools[].", target, shared)
            else:
                self.at(f"tools[].{tool.kind}", f"{target} has no such tool")

    def _message(self, message: Message, target: Spoken, shared: frozenset[str]) -> None:
        outer, inner = _PLACES[self._source]
        self._extra(message.extra, f"{outer}.", target, shared | _IDLE)
        self._parts(message.parts, f"{outer}.{inner}", target, shared)

    def _parts(self, parts: Iterable[Part], path: str, target: Spoken, shared: frozenset[str]) -> None:
        for part in parts:
            if isinstance(part, Opaque):
                self.at(f"{path}.{part.kind}", f"{target} has no such part")
                continue
            self._extra(part.extra, f"{path}.", target, shared | _IDLE)
            if isinstance(part, ToolResult):
                self._parts(part.parts, f"{path}.content[]", target, shared)

    def _extra(self, extra: Json, path: str, target: Spoken, carried: frozenset[str]) -> None:
        for name, value in extra.items():
            if value and name not in carried and (name, target) != ("extra_content", "gemini"):
                self.at(path + name, f"{target} has no such field")
